"""What an engine can do, in pairs: every two are at work in one sample, or refused by name.

What was drawn is computed anew by transformers, with the weights of the version that each token
names, its adapter merged, and the tokens that its grammar allowed.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from jaxrl.models.exact import choose_tiles
from jaxrl.models.families import config_to_hf
from jaxrl.models.linear import merge
from jaxrl.models.lora import LoraConfig, adapter_specs, attach, select_modules
from jaxrl.models.weights import params_to_hf
from jaxrl.parallel import make_mesh
from jaxrl.rollout.conversations.carried import NOTHING, joined, next_piece
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Adapter, Completion, Request, Sampling
from jaxrl.tools.doctor.eight_bits import dequantised
from tests.rollout.test_constraints import EVEN, Turns
from tests.rollout.test_eight_bits import fp8_compiles
from tests.rollout.test_engine import PROMPT, SMALL, between_turns
from tests.rollout.test_native import CONFIGS, random_params

MODEL = CONFIGS["untied"]
LORA = LoraConfig(MODEL, select_modules(MODEL, ["all-linear", "lm_head"]), rank=4, alpha=4)
ADAPTER, SCALE = Adapter("model 3", 1), 0.5
TEMPERATURE = 0.4  # low, so that guesses come true
TILES = dataclasses.replace(choose_tiles("log_probs", "cpu", tokens=None, parts=1), page=16)

ASKED = ("adapters", "grammar", "n", "logprobs", "partial")  # of a request
OF_ALL = ("drafts", "prefix hits", "update in flight", "preemption")
OPTIONS = {
    "drafts": {"speculative_tokens": 3, "speculative_history": 64},
    "adapters": {"lora": LORA, "places": 2},
    "exact": {"tiles": TILES},
    "int8": {"quantization": "int8"},
    "fp8 pages": {"kv_cache_dtype": "fp8"},
}
EVERYTHING = {*ASKED, *OF_ALL}
ENGINES = {
    "plain": EVERYTHING,
    "exact": EVERYTHING - {"adapters"} | {"exact"},
    "int8 and fp8": EVERYTHING - {"adapters"} | {"int8", "fp8 pages"},
    "fp8": EVERYTHING | {"fp8 pages"},
}
REFUSED = {
    ("adapters", "exact"): "places=2: adapters of rows are .* neither exact nor quantised",
    ("adapters", "int8"): "places=2: adapters of rows are .* neither exact nor quantised",
    ("exact", "int8"): "quantization='int8', .*: the exact mode has the trainer's own weights",
    ("exact", "fp8 pages"): "kv_cache_dtype='fp8': the exact mode has the trainer's own weights",
}
# By design: what may come is known one token ahead, so a row with a grammar is not guessed.
APART = {("drafts", "grammar")}


def pairs_of(features):
    return set(itertools.combinations(sorted(features), 2))


class Forever(Turns):
    """Even and odd ids in turns, without an end."""

    def ids(self):
        return [i + len(self.taken) % 2 for i in EVEN]


@dataclasses.dataclass
class Draw:
    """A sample as it was drawn so far, and what was at work in it."""

    prompt: tuple[int, ...]
    keys: tuple[int, ...]
    asked: set[str]
    completion: Completion = NOTHING
    tops: list[dict[int, float]] = dataclasses.field(default_factory=list)
    at_work: set[str] = dataclasses.field(default_factory=set)


# ---------------------------------------------------------------- the engine


@functools.cache
def adapter():
    rng = np.random.default_rng(3)
    return {
        name: {k: 0.3 * rng.standard_normal(s.shape, np.float32) for k, s in pair.items()}
        for name, pair in adapter_specs(LORA).items()
    }


def engine_of(features):
    options: dict[str, Any] = {}
    for feature in OPTIONS.keys() & features:
        options |= OPTIONS[feature]
    return NativeEngine(
        MODEL,
        make_mesh(devices=jax.devices()[:1]),
        max_num_seqs=4,
        max_model_len=96,
        steps_per_dispatch=4,
        shrink=False,
        enable_prefix_caching=True,
        recompute_kv_on_update=True,
        **options,
    )


def request_of(draws, number, references):
    """The next `number` tokens of samples that so far have the same."""
    first = draws[0]
    sampling = Sampling(48, TEMPERATURE, logprobs=2 if "logprobs" in first.asked else 0)
    sampling = dataclasses.replace(sampling, stop_token_ids=(1000,))  # which never comes
    so_far = first.completion.tokens

    def constraint():
        made = Forever()
        made.take(so_far)
        return made

    return Request(
        (*first.prompt, *so_far),
        tuple((7, key + 100 * len(so_far)) for draw in draws for key in draw.keys),
        next_piece(sampling, first.completion, number),
        references=references,
        adapter=ADAPTER if "adapters" in first.asked else None,
        constrain=constraint if "grammar" in first.asked else None,
    )


def draw_on(engine, groups, number, references=()):
    """Draw `number` tokens more of each sample, all together; note what was at work."""
    requests = [request_of(group, number, references) for group in groups]
    known = engine.known_prefixes(requests)
    suspended, suspend = [], engine._suspend

    def noted(slot):
        suspended.append(engine.table.samples[slot].future)
        suspend(slot)

    engine._suspend = noted
    futures = engine.submit(requests)
    for group, found, hit in zip(groups, futures, known, strict=True):
        for draw, future in zip(group, found, strict=True):
            piece = future.result()
            draw.completion = joined(draw.completion, piece)
            draw.tops += piece.top_log_probs
            draw.at_work |= {"prefix hits"} if hit else set()
            draw.at_work |= {"preemption"} if future in suspended else set()
            draw.at_work |= {"drafts"} if 0 < piece.steps < len(piece.tokens) else set()
            draw.at_work |= {"update in flight"} if len(set(piece.versions)) > 1 else set()
    engine._suspend = suspend


@functools.cache
def samples(name):
    """Samples of an engine, in which every pair of what it can do is at work."""
    features = ENGINES[name]
    engine = engine_of(features)
    engine.update_weights(random_params(MODEL, 0), 1)
    if "adapters" in features:
        engine.put_adapter(ADAPTER.place, adapter(), SCALE)
    asked = [ASKED_OF & features for ASKED_OF in ({*ASKED}, {*ASKED} - {"grammar"})]
    groups = [
        [Draw(PROMPT[i : 24 + i], (10 * i + k,), chosen) for k in range(3)]
        for i, chosen in enumerate(asked)
    ]
    draw_on(engine, groups, 8)
    alone = [[draw] for both in zip(*groups, strict=True) for draw in both]  # in turns
    known = tuple(t for (draw,) in alone for t in (*draw.completion.tokens, -1))
    between_turns(engine, 6, lambda: engine.update_weights(random_params(MODEL, 1), 2))
    draw_on(engine, alone, 40, known)
    for (draw,) in alone:
        draw.at_work |= draw.asked | (features - EVERYTHING)
    return [draw for (draw,) in alone]


# ---------------------------------------------------------------- transformers


class InFp8(DynamicCache):
    """Keys and values as they are read from pages in fp8: the nearest number, of 448 at most."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(*args, **kwargs)
        return _near(keys), _near(values)


def _near(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


@functools.cache
def transformer(version, *, adapted, int8):
    params = random_params(MODEL, version - 1)
    if adapted:
        scaled = {name: {"a": w["a"], "b": SCALE * w["b"]} for name, w in adapter().items()}
        params = merge(attach(LORA, params, jax.tree.map(jnp.asarray, scaled)))
    if int8:
        params = dequantised(params, "int8", jnp.float32)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_to_hf(MODEL)))
    named = {name: torch.tensor(np.asarray(x)) for name, x in params_to_hf(MODEL, params)}
    model.load_state_dict(named)
    return model.eval()


@torch.no_grad()
def log_probs_of(draw, version):
    """Of each token of a sample, the log-probs [n, V] under a version, in float32."""
    options = {"adapted": "adapters" in draw.asked, "int8": "int8" in draw.at_work}
    tokens = torch.tensor([[*draw.prompt, *draw.completion.tokens]])
    cache = InFp8() if "fp8 pages" in draw.at_work else DynamicCache()
    logits = transformer(version, **options)(tokens, cache=cache).logits[0]
    logits = logits[len(draw.prompt) - 1 : -1] / TEMPERATURE
    if "grammar" in draw.asked:
        rules, allowed = Forever(), np.zeros(logits.shape, bool)
        for row, token in zip(allowed, draw.completion.tokens, strict=True):
            row[rules.ids()] = True
            rules.take([token])
        logits = logits.masked_fill(~torch.tensor(allowed), -torch.inf)
    return logits.log_softmax(-1).numpy()


# ---------------------------------------------------------------- tests


def test_every_pair_is_run_or_refused():
    run = set().union(*map(pairs_of, ENGINES.values()))
    refused = {tuple(sorted(pair)) for pair in REFUSED}
    assert run | refused == pairs_of(set().union(*ENGINES.values()))
    assert not run & refused


@pytest.mark.parametrize(("pair", "text"), REFUSED.items(), ids=str)
def test_a_pair_that_cannot_be_is_refused_before_anything_is_loaded(pair, text):
    with pytest.raises(ValueError, match=text):
        engine_of(set(pair))


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch):
    monkeypatch.setattr("jaxrl.rollout.native.programs.SHAPES", SMALL)
    # rows of 24 + 48 tokens have five pages of 16: four of them have not enough
    monkeypatch.setattr("jaxrl.rollout.native.engine.pages_that_fit", lambda *_, **__: 13)


# Slow: 20 s of CPU each. What they have alone: test_drafts and test_constraints in the exact mode,
# test_eight_bits.
@pytest.mark.parametrize(
    "name",
    [name if name == "plain" else pytest.param(name, marks=pytest.mark.slow) for name in ENGINES],
)
def test_each_pair_is_at_work_in_a_sample_and_right(name):
    if "fp8 pages" in ENGINES[name] and not fp8_compiles():
        pytest.skip("XLA compiles no fp8 for this processor")
    drawn = samples(name)
    assert set().union(*(pairs_of(draw.at_work) for draw in drawn)) == (
        pairs_of(ENGINES[name]) - APART
    )
    for draw in drawn:
        found = draw.completion
        assert found.context_versions == found.versions  # computed anew
        assert len(found.tokens) == 48
        assert len(draw.tops) == 48 * ("logprobs" in draw.asked)
        by_version = {version: log_probs_of(draw, version) for version in set(found.versions)}
        for at, (token, version) in enumerate(zip(found.tokens, found.versions, strict=True)):
            expected = by_version[version][at]
            np.testing.assert_allclose(found.log_probs[at], expected[token], atol=2e-4)
            for top, near in zip(draw.tops[at : at + 1], [expected], strict=False):
                np.testing.assert_allclose(list(top.values()), near[list(top)], atol=2e-4)
                np.testing.assert_allclose(sorted(top.values()), np.sort(near)[-2:], atol=2e-4)
