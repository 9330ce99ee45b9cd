"""Our engine of JetStream's protocol, by hand and through the driver, against the native one."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl.parallel import make_mesh
from jaxrl.rollout.jetstream.driver import JetStreamDriver
from jaxrl.rollout.jetstream.engine import Sampler, TransformerEngine
from jaxrl.rollout.jetstream.protocol import JetStreamEngine, prefill_length
from jaxrl.rollout.protocol import Sampling
from tests.rollout.test_native import (
    LLAMA,
    assert_same,
    engine_of,
    flat,
    random_params,
    request,
    requests,
    with_stop,
)

SLOW = pytest.mark.slow  # programs of their own


LONG_PROMPT = [n * n % 31 for n in range(150)]  # of three pages, and two chunks


def make(slots=2, devices=1, **options):
    sizes = {"max_prefill_length": 256, "max_target_length": 200, "tokens_per_call": 4}
    mesh = make_mesh(devices=jax.devices()[:devices])
    return TransformerEngine(LLAMA, mesh, slots=slots, **sizes | options)


@functools.cache
def driver(slots=2, devices=1):
    made = JetStreamDriver(make(slots, devices), decode_text=lambda ids: " ".join(map(str, ids)))
    made.update_weights(random_params(LLAMA), 3)
    return made


def padded(prompt):
    return np.pad(np.array(prompt, np.int32), (0, prefill_length(len(prompt)) - len(prompt)))


# ------------------------------------------------------------------ the protocol by hand


def test_by_hand_a_group_draws_what_the_native_engine_draws():
    engine, prompt = make(), [3, 1, 4]
    assert isinstance(engine, JetStreamEngine)
    group = request(prompt, 1, 2, max_tokens=5)
    params = engine.load_params(random_params(LLAMA))
    sampler = Sampler(group.sampling, group.keys)
    prefix, first = engine.prefill_multisampling(
        params=params, padded_tokens=padded(prompt), true_length=3, sampler=sampler, num_samples=2
    )
    assert first.get_result_at_slot(0).lengths.tolist() == [1, 1]
    state = engine.bulk_insert(prefix, engine.init_decode_state(), [1, 0])
    tokens, log_probs = first.get_result_at_slot(0).tokens.tolist(), first.log_prob.tolist()
    state, result = engine.generate(params, state)
    drawn = result.convert_to_numpy().get_result_at_slots((1, 0))
    assert drawn.valid.tolist() == [[1] * 4] * 2 and drawn.lengths.tolist() == [5, 5]
    for row in (0, 1):
        tokens[row] += drawn.tokens[row].tolist()
        log_probs[row] += drawn.log_prob[row].tolist()
    expected = engine_of("llama").generate([group])[0]
    assert tokens == [c.tokens for c in expected]
    np.testing.assert_allclose(log_probs, [c.log_probs for c in expected], atol=1e-5)
    state, result = engine.generate(params, state)  # max_tokens=5
    assert not result.get_result_at_slots((0, 1)).valid.any()


def test_a_freed_slot_draws_nothing_until_it_is_filled():
    engine = make()
    params = engine.load_params(random_params(LLAMA))
    prefill = functools.partial(
        engine.prefill, params=params, padded_tokens=padded([5, 9]), true_length=2
    )
    state = engine.insert(prefill()[0], engine.init_decode_state(), slot=0)
    state = engine.insert(prefill()[0], state, slot=1)
    engine.free_resource(0)
    state, result = engine.generate(params, state)
    assert result.get_result_at_slots((0, 1)).valid[:, 0].tolist() == [0, 1]
    engine.free_resource(1)
    state = engine.insert(prefill()[0], state, slot=1)  # a new sample: freed no more
    state, result = engine.generate(params, state)
    assert result.get_result_at_slot(1).valid.tolist() == [[1] * 4]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("prompt", "known"),
    [([8, 9, 7, 9, 3, 2, 3], 4), (LONG_PROMPT, 70)],
    ids=["within a page", "over pages"],
)
def test_a_prompt_goes_on_from_an_existing_prefix(prompt, known):
    engine = make()
    params = engine.load_params(random_params(LLAMA))
    sampler = Sampler(Sampling(4, temperature=0.0), ((7, 1),))

    def prefill(tokens, **options):
        given = {"padded_tokens": padded(tokens), "true_length": len(tokens)}
        return engine.prefill(params=params, sampler=sampler, **given, **options)

    whole, head = prefill(prompt), prefill(prompt[:known])[0]

    class Existing:
        cache, common_prefix_tokens = head, prompt[:known]

    rest = prefill(prompt[known:], existing_prefix=Existing)
    later = (
        engine.generate(params, engine.insert(prefix, engine.init_decode_state(), slot=1))[1]
        for prefix, _ in (whole, rest)
    )
    for a, b in ((whole[1], rest[1]), later):
        assert a.data.tolist() == b.data.tolist()
        np.testing.assert_allclose(a.log_prob, b.log_prob, atol=1e-5)


def test_what_the_engine_refuses():
    engine = make()
    given = {"padded_tokens": padded([1]), "true_length": 1}
    with pytest.raises(RuntimeError, match="no weights"):
        engine.prefill(params=engine.load_params(), **given)
    params = engine.load_params(random_params(LLAMA))
    with pytest.raises(TypeError, match="sampler=<built-in function max>"):
        engine.prefill(params=params, sampler=max, **given)
    with pytest.raises(ValueError, match="a prompt of 0 tokens"):
        engine.prefill(params=params, padded_tokens=padded([1]), true_length=0)
    prefix, _ = engine.prefill(params=params, **given)
    with pytest.raises(ValueError, match="2 slots for a prefix of 1 samples"):
        engine.bulk_insert(prefix, engine.init_decode_state(), [0, 1])
    with pytest.raises(ValueError, match="longer than JetStream's longest prefill, 32768"):
        make(max_prefill_length=40_000)


# ------------------------------------------------------------------ the driver


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"top_k": 5, "repetition_penalty": 1.3, "min_tokens": 2}, marks=SLOW),
    ],
)
def test_the_driver_draws_what_the_native_engine_draws(options):
    found = driver().generate(requests(**options))
    assert_same(found, engine_of("llama").generate(requests(**options)))
    assert all(c.versions == [3] * 10 for c in flat(found))


def test_a_group_is_prefilled_once_and_waits_until_it_fits():
    engine = driver()
    before = engine.prefills
    group = request([3, 1, 4], 1, 2)
    completions = engine.generate([group, group, group])
    assert engine.prefills == before + 3
    assert_same(completions, [engine_of("llama").generate([group])[0]] * 3)


def test_a_group_larger_than_all_slots_comes_in_pieces():
    group = request([3, 1, 4], *range(5))
    assert_same(driver().generate([group]), engine_of("llama").generate([group]))


def test_a_prompt_of_several_pages():
    asked = [request(LONG_PROMPT, 1, 2), request(LONG_PROMPT[:64], 3)]
    other = engine_of("llama", max_num_seqs=3)  # the shared one keeps its length
    assert_same(driver().generate(asked), other.generate(asked))


def test_stop_ids_and_stop_strings():
    whole = flat(engine_of("llama").generate([request([3, 1, 4], 1)]))[0]
    stop = with_stop(request([3, 1, 4], 1), whole.tokens[3])
    assert_same(driver().generate([stop]), engine_of("llama").generate([stop]))
    string = f"{whole.tokens[1]} {whole.tokens[2]}"
    sampling = dataclasses.replace(request([3], 1).sampling, stop=(string,))
    asked = dataclasses.replace(request([3, 1, 4], 1), sampling=sampling)
    (completion,) = flat(driver().generate([asked]))
    assert (completion.stop_string, completion.stop_reason) == (string, "stop")
    assert completion.tokens == whole.tokens[:3]


@SLOW
def test_slots_over_eight_devices():
    assert_same(driver(8, 8).generate(requests()), engine_of("llama").generate(requests()))


@SLOW
def test_the_loop_of_the_docs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "jetstream.md").read_text()
    (loop,) = [part.split("```")[0] for part in page.split("```python\n") if "bulk_insert(" in part]
    exec(loop, {})
    assert capsys.readouterr().out == "(2, 1) (2, 1)\n"
