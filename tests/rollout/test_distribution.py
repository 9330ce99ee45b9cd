"""What the engine draws, counted against the exact distribution: Pearson's test for each option.

The distribution is computed here, in float64 by numpy, from the trainer's logits: alone the logits
are jaxrl's. Keys are fixed, and so are the p-values. A right engine has one below LEAST in one of
100,000 tests; there are less than 200 of them, so that it fails here once in 500 sets of keys.
"""

import dataclasses
import functools
import itertools
from collections import Counter, defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxrl.models.linear import merge
from jaxrl.models.lora import LoraConfig, adapter_specs, attach, select_modules
from jaxrl.models.transformer import forward, unembed
from jaxrl.parallel import make_mesh
from jaxrl.rollout.conversations.conversation import sample_key
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Adapter, Request, Sampling
from tests.rollout.test_eight_bits import fp8_compiles
from tests.rollout.test_native import LLAMA, flat, random_params
from tests.rollout.test_sampling import reference

MODEL = dataclasses.replace(LLAMA, vocab_size=64, tie_embeddings=False)
VOCAB, DRAWS, TOKENS, LEAST = 64, 8_000, 3, 1e-5  # 24,000 tokens in a case
OFTEN = 50  # samples behind the same tokens, for these to be a test of the next one
# Its last tokens stood before: GUESSED followed, whose first two are each drawn by a fifth.
PROMPT = (31, 39, 10, 46, 23, 58) * 2
GUESSED = PROMPT[:TOKENS]
STOP = (4, 11)
ALONE = {
    "cold": {"temperature": 0.7},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "penalty": {"repetition_penalty": 1.5},
    "drafts": {"drafts": 3},
}
ALL = {
    "temperature": 1.2,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.2,
    "min_tokens": 2,
    "stop_token_ids": STOP,
}
CASES = {
    "plain": {},
    **ALONE,
    **{f"{a} and {b}": ALONE[a] | ALONE[b] for a, b in itertools.combinations(ALONE, 2)},
    "hot": {"temperature": 1.4},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": STOP},
    "all": ALL,
    "all and drafts": ALL | ALONE["drafts"],
}
# Of each of the programs with and without filters; that drafts change no token, and log-probs no
# more than rounding does, tests/rollout/test_drafts.py shows in the quick suite.
QUICK = "cold", "top_p and penalty"


def cases(*quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@functools.cache
def engine(drafts=0, **options):
    mesh = make_mesh(devices=jax.devices()[:1])
    settings = {"max_num_seqs": 256, "steps_per_dispatch": TOKENS, "speculative_tokens": drafts}
    made = NativeEngine(MODEL, mesh, shrink=False, **settings, **options)
    made.update_weights(random_params(MODEL), 0)
    return made


@functools.lru_cache(maxsize=4)
def draw(name):
    """The samples of one request, and of its engine."""
    options = dict(CASES[name])
    drawing = engine(options.pop("drafts", 0))
    keys = tuple(sample_key("seed", "train", 1, "0:p", i) for i in range(DRAWS))
    return flat(drawing.generate([Request(PROMPT, keys, Sampling(TOKENS, **options))]))


@jax.jit
def logits_of(params, row):
    """The trainer's logits after each token of a row."""
    places = np.arange(row.shape[1])[None]
    hidden = forward(MODEL, params, row, places, np.ones(row.shape, np.int32))
    return unembed(MODEL, params, hidden[0])


@functools.cache
def next_logits(tokens):
    """The trainer's logits after some tokens."""
    row = np.zeros((1, 16), np.int32)  # what follows is not seen
    row[0, : len(tokens)] = tokens
    return np.array(logits_of(random_params(MODEL), row)[len(tokens) - 1], np.float64)


def exact(drawn, *, repetition_penalty=1.0, min_tokens=0, stop_token_ids=(), drafts=0, **filters):
    """Probabilities of the token after the prompt and those that were drawn."""
    tokens = (*PROMPT, *drawn)
    logits = next_logits(tokens).copy()
    for token in set(tokens):
        logits[token] *= repetition_penalty if logits[token] < 0 else 1 / repetition_penalty
    if len(drawn) < min_tokens:
        logits[list(stop_token_ids)] = -1e9
    return reference(logits, **filters)


def followers(samples, depth):
    """What was drawn behind the same `depth` tokens: tokens -> [VOCAB] counts, if OFTEN."""
    found = defaultdict(Counter)
    for c in samples:
        if len(c.tokens) > depth:
            found[tuple(c.tokens[:depth])][c.tokens[depth]] += 1
    return {
        drawn: np.array([counts[token] for token in range(VOCAB)])
        for drawn, counts in found.items()
        if counts.total() >= OFTEN
    }


def pearson(counts, probs):
    """The statistic and its degrees of freedom; rare outcomes together, to 5 expected at least."""
    assert counts[probs == 0].sum() == 0  # nothing that a filter drops
    observed, expected, groups = 0, 0.0, []
    for token in np.argsort(probs, kind="stable"):
        observed, expected = observed + counts[token], expected + probs[token] * counts.sum()
        if expected >= 5:
            groups.append((observed, expected))
            observed, expected = 0, 0.0
    last = groups.pop()
    groups.append((last[0] + observed, last[1] + expected))
    return sum((o - e) ** 2 / e for o, e in groups), len(groups) - 1


def p_value(tables, exact):
    """Of all contexts together: a sum of independent statistics is one, too."""
    found = [pearson(counts, exact(drawn)) for drawn, counts in tables.items()]
    statistic, freedom = map(sum, zip(*found, strict=True))
    assert freedom > 0
    return stats.chi2.sf(statistic, freedom)


@pytest.mark.parametrize("name", cases(*QUICK))
def test_each_token_has_the_exact_distribution_given_those_before(name):
    options = CASES[name]
    for depth in range(TOKENS):
        tables = followers(draw(name), depth)
        assert p_value(tables, functools.partial(exact, **options)) > LEAST, depth
        if "drafts" in options:  # behind guesses that were accepted, and behind others
            assert depth == 2 or GUESSED[:depth] in tables
            assert depth != 1 or len(tables) > 3


@pytest.mark.parametrize("name", cases(*QUICK))
def test_log_probs_are_of_the_exact_distribution(name):
    for c in draw(name)[:200]:
        for depth, found in enumerate(c.log_probs[:2]):
            probs = exact(tuple(c.tokens[:depth]), **CASES[name])
            assert found == pytest.approx(np.log(probs[c.tokens[depth]]), abs=2e-4)


@pytest.mark.slow  # one of its programs is compiled for the tests above, when they are slow, too
def test_guesses_are_accepted_and_rejected():
    """A step that accepts all has three tokens, one that accepts none has one."""
    steps = Counter(c.steps for c in draw("drafts"))
    assert set(steps) == {1, 2, 3} and min(steps.values()) > OFTEN
    assert GUESSED[:2] in followers(draw("drafts"), 2)


# ------------------------------------------------------------------ what would be noticed


def test_a_wrong_distribution_is_noticed():
    """The square of the temperature 0.7, and one that is near it."""
    tables = [followers(draw("cold"), depth) for depth in range(TOKENS)]
    p_values = {
        wrong: [p_value(t, functools.partial(exact, temperature=wrong)) for t in tables]
        for wrong in (0.49, 0.75)
    }
    assert max(p_values[0.49]) < 1e-50
    assert min(p_values[0.75]) < LEAST


def test_guesses_that_are_always_accepted_would_be_noticed():
    """Of ten samples one says the guess, whatever it drew."""
    first = np.array([c.tokens[0] for c in draw("cold")])
    first[::10] = GUESSED[0]
    tables = {(): np.bincount(first, minlength=VOCAB)}
    assert p_value(tables, functools.partial(exact, temperature=0.7)) < LEAST


# ------------------------------------------------------------------ samples of a prompt


def independence(samples, size):
    """The least p-value of first tokens i and j of groups, as pairs in a table of 5 x 5."""
    first = np.array([c.tokens[0] for c in samples])
    likely = np.argsort(-np.bincount(first, minlength=VOCAB), kind="stable")[:4]
    kinds = np.select([first == token for token in likely], range(4), 4).reshape(-1, size)
    found = []
    for i, j in itertools.combinations(range(size), 2):
        table = np.zeros((5, 5))
        np.add.at(table, (kinds[:, i], kinds[:, j]), 1)
        found.append(stats.chi2_contingency(table).pvalue)
    return min(found)


def test_the_samples_of_a_prompt_are_independent():
    """Groups of 4 that follow each other: each sample of 2,000 groups with each other one."""
    assert independence(draw("cold"), 4) > LEAST
    same = [c for c in draw("cold")[::4] for _ in range(4)]  # one key for all of a group
    assert independence(same, 4) < 1e-100


@pytest.mark.slow  # the keys are those of the test above, and tokens depend on nothing else
def test_the_samples_of_many_prompts_are_independent():
    """Groups as a step asks for them, 4 samples each, of 2,000 prompts with the same tokens."""
    asks = [
        Request(
            PROMPT,
            tuple(sample_key("seed", "train", 1, f"0:{n}", i) for i in range(4)),
            Sampling(1, temperature=0.7),
        )
        for n in range(DRAWS // 4)
    ]
    samples = flat(engine().generate(asks))
    tables = followers(samples, 0)
    assert p_value(tables, functools.partial(exact, temperature=0.7)) > LEAST
    assert independence(samples, 4) > LEAST


# ------------------------------------------------------------------ numbers of the engine alone


def said(samples, depth):
    """The engine's own probabilities, by context: all ids are among the alternatives."""
    found = {}
    for c in samples:
        table = c.top_log_probs[depth]
        log_probs = np.array([table[token] for token in range(VOCAB)], np.float64)
        found.setdefault(tuple(c.tokens[:depth]), np.exp(log_probs))
        assert c.log_probs[depth] == pytest.approx(log_probs[c.tokens[depth]], abs=1e-4)
    return {drawn: probs / probs.sum() for drawn, probs in found.items()}


def assert_as_said(samples):
    for depth in range(TOKENS):
        known = said(samples, depth)
        assert p_value(followers(samples, depth), known.__getitem__) > LEAST


@pytest.mark.slow  # that the log-probs are those of such numbers: tests/rollout/test_eight_bits.py
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_cache_dtype": "fp8"}])
def test_in_eight_bits_the_distribution_is_that_of_the_log_probs(options):
    if "kv_cache_dtype" in options and not fp8_compiles():
        pytest.skip("XLA compiles no fp8 for this processor")
    keys = tuple((0, k) for k in range(DRAWS))
    sampling = Sampling(TOKENS, temperature=0.7, logprobs=VOCAB)
    assert_as_said(flat(engine(**options).generate([Request(PROMPT, keys, sampling)])))


@pytest.mark.slow  # that a row with an adapter is one of merged weights: test_adapters.py
def test_rows_with_adapters_have_the_distribution_of_theirs():
    """Two adapters and the base, in the same blocks; of each the merged weights are known, too."""
    lora = LoraConfig(MODEL, select_modules(MODEL, ["all-linear", "lm_head"]), rank=4, alpha=4)
    made = engine(lora=lora, places=3, max_model_len=128, device_memory=2**30)
    asked, merged = [], {}
    for place in range(3):
        rng = np.random.default_rng(place)
        adapter = {
            name: {k: 0.3 * rng.standard_normal(s.shape, np.float32) for k, s in pair.items()}
            for name, pair in adapter_specs(lora).items()
        }
        params = random_params(MODEL)
        if place:
            made.put_adapter(place, adapter, 1.0)
            params = merge(attach(lora, params, jax.tree.map(jnp.asarray, adapter)))
        merged[place] = params
        keys = tuple((place, k) for k in range(DRAWS))
        of = Adapter(f"model {place}", place) if place else None
        sampling = Sampling(TOKENS, temperature=0.7, logprobs=VOCAB)
        parts = range(0, DRAWS, 64)
        asked.append([Request(PROMPT, keys[i : i + 64], sampling, adapter=of) for i in parts])
    groups = made.generate([ask for three in zip(*asked, strict=True) for ask in three])
    row = np.array([[*PROMPT, *[0] * (16 - len(PROMPT))]], np.int32)
    for place, params in merged.items():
        samples = flat(groups[place::3])
        assert len(samples) == DRAWS
        assert_as_said(samples)
        logits = np.array(logits_of(params, row)[len(PROMPT) - 1], np.float64)
        expected = reference(logits, temperature=0.7)
        np.testing.assert_allclose(said(samples, 0)[()], expected, atol=1e-5)
