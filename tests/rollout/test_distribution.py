"""What the engine draws, counted against the exact distribution: chi-square for each option."""

import functools

import jax
import numpy as np
import pytest
from scipy import stats

from jaxrl.models.transformer import forward, unembed
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling
from tests.rollout.test_native import LLAMA, flat, random_params
from tests.rollout.test_sampling import reference

PROMPT = (5, 9, 5, 2, 17, 9)
DRAWS = 4000
STOP = (4, 11)
OPTIONS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": STOP},
    "cold top_k top_p": {"temperature": 0.8, "top_k": 12, "top_p": 0.8},
    "hot min_p with a penalty": {"temperature": 1.5, "min_p": 0.05, "repetition_penalty": 1.3},
    "all": {
        "temperature": 1.2,
        "top_k": 10,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "stop_token_ids": STOP,
    },
}


@functools.cache
def engine():
    mesh = make_mesh(devices=jax.devices()[:1])
    engine = NativeEngine(LLAMA, mesh, max_num_seqs=256, steps_per_dispatch=2, shrink=False)
    engine.update_weights(random_params(LLAMA), 0)
    return engine


@jax.jit
def logits_of(row):
    """The trainer's logits after each token of a row."""
    params, places = random_params(LLAMA), np.arange(row.shape[1])[None]
    hidden = forward(LLAMA, params, row, places, np.ones(row.shape, np.int32))
    return unembed(LLAMA, params, hidden[0])


@functools.cache
def next_logits(tokens):
    """The trainer's logits after some tokens."""
    row = np.zeros((1, 16), np.int32)  # what follows is not seen
    row[0, : len(tokens)] = tokens
    return np.array(logits_of(row)[len(tokens) - 1], np.float64)


def exact(tokens, *, repetition_penalty=1.0, min_tokens=0, stop_token_ids=(), drawn=0, **filters):
    """Probabilities of the token after `tokens`, the last `drawn` of which were drawn."""
    logits = next_logits(tokens).copy()
    for token in set(tokens):
        logits[token] *= repetition_penalty if logits[token] < 0 else 1 / repetition_penalty
    if drawn < min_tokens:
        logits[list(stop_token_ids)] = -1e9
    return reference(logits, **filters)


def p_value(counts, probs):
    """Of Pearson's test; outcomes expected fewer than five times are counted together."""
    assert counts[probs == 0].sum() == 0
    expected = probs * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    return stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue


@functools.cache
def draw(name, draws=DRAWS):
    keys = tuple((0, k) for k in range(draws))
    sampling = Sampling(max_tokens=2, **OPTIONS[name])
    return flat(engine().generate([Request(PROMPT, keys, sampling)]))


@pytest.mark.some(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_first_and_second_token_have_the_exact_distribution(name):
    """The keys are fixed, and so are the p-values."""
    options = OPTIONS[name]
    samples = draw(name)
    first = np.array([c.tokens[0] for c in samples])
    probs = exact(PROMPT, **options)
    assert p_value(np.bincount(first, minlength=32), probs) > 1e-3
    common = int(probs.argmax())
    second = np.array([c.tokens[1] for c in samples if c.tokens[0] == common and c.tokens[1:]])
    if common not in options.get("stop_token_ids", ()):
        after = exact((*PROMPT, common), drawn=1, **options)
        assert p_value(np.bincount(second, minlength=32), after) > 1e-3


@pytest.mark.some(6)
@pytest.mark.parametrize("name", OPTIONS)
def test_log_probs_are_of_the_exact_distribution(name):
    options = OPTIONS[name]
    probs = exact(PROMPT, **options)
    for c in draw(name, 200):
        assert c.log_probs[0] == pytest.approx(np.log(probs[c.tokens[0]]), abs=1e-4)


def test_a_wrong_distribution_is_noticed():
    """Drawn at temperature 1, tested against 1.2."""
    first = np.array([c.tokens[0] for c in draw("plain")])
    assert p_value(np.bincount(first, minlength=32), exact(PROMPT, temperature=1.2)) < 1e-3


def test_samples_of_neighbouring_keys_are_independent():
    """First tokens of keys k and k + 1, as pairs, against the product of the frequencies."""
    first = np.array([c.tokens[0] for c in draw("plain")])
    likely = np.argsort(-np.bincount(first, minlength=32))[:4]
    kind = np.select([first == token for token in likely], range(4), 4)
    table = np.zeros((5, 5))
    np.add.at(table, (kind[:-1:2], kind[1::2]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3
