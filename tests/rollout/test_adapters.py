"""Rows of an engine with an adapter each, in one block: what they draw, and what they share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.linear import merge
from jaxrl.models.lora import LoraConfig, adapter_specs, attach, select_modules
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Adapter, Request, Sampling
from tests.rollout.test_native import CONFIGS, random_params

MODEL = CONFIGS["untied"]
LORA = LoraConfig(MODEL, select_modules(MODEL, ["all-linear", "lm_head"]), rank=4, alpha=4)
PROMPT = tuple(range(1, 60)) + tuple(range(1, 30))


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {
        name: {k: 0.3 * rng.standard_normal(s.shape, np.float32) for k, s in pair.items()}
        for name, pair in adapter_specs(LORA).items()
    }


@functools.cache
def engine(places=4, **options):
    made = NativeEngine(
        MODEL,
        make_mesh(devices=jax.devices()[:1]),
        max_num_seqs=4,
        max_model_len=128,
        device_memory=2**30,
        shrink=False,
        lora=LORA if places else None,
        places=places,
        **options,
    )
    made.update_weights(random_params(MODEL), 1)
    return made


def ask(adapter=None, key=1, tokens=12, **sampling):
    keys = ((key, 0), (key, 1))
    return Request(PROMPT, keys, Sampling(max_tokens=tokens, **sampling), adapter=adapter)


def results(groups):
    return [(c.tokens, c.log_probs) for group in groups for c in group]


def put(made, *seeds):
    for place, seed in enumerate(seeds, start=1):
        made.put_adapter(place, drawn(seed), 0.5)
    return [Adapter(f"model {seed}", place) for place, seed in enumerate(seeds, start=1)]


@pytest.mark.parametrize("seed", [None, 7])
def test_an_adapter_of_a_row_is_one_in_the_weights(seed):
    params = random_params(MODEL)
    if seed is not None:
        scaled = {n: {"a": w["a"], "b": 0.5 * w["b"]} for n, w in drawn(seed).items()}
        params = merge(attach(LORA, params, jax.tree.map(jnp.asarray, scaled)))
    merged = engine(places=0)
    merged.update_weights(params, 2)
    adapters = put(engine(), 3, 7)
    asked = ask(None if seed is None else adapters[1], temperature=0.0)
    found = results(engine().generate([asked]))
    for (tokens, log_probs), (same, near) in zip(
        found, results(merged.generate([ask(temperature=0.0)])), strict=True
    ):
        assert tokens == same
        np.testing.assert_allclose(log_probs, near, atol=2e-5)


def test_no_bit_depends_on_the_adapters_of_other_rows_or_on_the_place():
    one, two, three = put(engine(), 3, 7, 8)
    together = engine().generate([ask(one), ask(two), ask(three), ask()])
    alone = [engine().generate([ask(of)])[0] for of in (one, two, three, None)]
    assert results(together) == results(alone)
    assert len({tuple(group[0].tokens) for group in together}) == 4
    (moved, *_) = put(engine(), 7)
    assert results(engine().generate([ask(moved)])) == results(alone[1:2])


def test_a_prompt_that_was_prefilled_with_one_adapter_is_found_with_it_alone():
    made = engine.__wrapped__()  # with nothing in its cache
    one, two = put(made, 3, 7)
    made.generate([ask(one)])
    before = made.prefilled_tokens
    made.generate([ask(one, key=2)])
    reused = made.prefilled_tokens - before
    made.generate([ask(two)])
    anew = made.prefilled_tokens - before - reused
    made.put_adapter(1, drawn(9), 0.5)
    made.generate([ask(Adapter("model 9", 1))])
    other = made.prefilled_tokens - before - reused - anew
    assert (reused, anew, other) == (0, len(PROMPT) - 1, len(PROMPT) - 1)


def test_adapters_stay_where_they_are_when_the_base_changes_or_sleeps():
    made = engine()
    (one,) = put(made, 3)
    before = results(made.generate([ask(one)]))
    made.update_weights(random_params(MODEL, 1), 2)
    other = results(made.generate([ask(one), ask()]))
    assert other[0] != other[2] != before[0] != other[0]
    made.sleep()
    made.update_weights(random_params(MODEL), 1)
    assert results(made.generate([ask(one)])) == before


def test_wrong_places_are_refused():
    with pytest.raises(ValueError, match="the engine has places from 1 to 3"):
        engine().submit([ask(Adapter("model", 4))])
    with pytest.raises(ValueError, match="adapters of rows are for an engine on one device"):
        NativeEngine(MODEL, make_mesh(devices=jax.devices()[:2]), lora=LORA, places=2)
