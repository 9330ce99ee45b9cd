"""Several engines as one: who gets what, and that nothing is lost between them."""

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxrl.parallel import engine_meshes
from jaxrl.rollout.native.balancer import Balancer
from jaxrl.rollout.native.engine import NativeEngine
from tests.rollout.test_engine import PROMPT, SMALL, make, request, shared, until_idle
from tests.rollout.test_native import LLAMA, flat, random_params, reserve


def balanced(engines=2, slots=2, lends=False, **options):
    """Engines that draw what they were given, or `lends`, see test_lending.py."""
    meshes = engine_meshes(jax.devices()[:engines], engines, 1)
    settings = {"max_num_seqs": slots, "steps_per_dispatch": 8, "shrink": False, **options}
    balancer = Balancer([NativeEngine(LLAMA, mesh, **settings) for mesh in meshes])
    balancer.update_weights(random_params(LLAMA), 1)
    for engine in balancer.engines:
        reserve(engine)
        if not lends:
            engine.offer = None
    return balancer


def prompts(number):
    rng = np.random.default_rng(3)
    return [tuple(rng.integers(1, 32, int(n)).tolist()) for n in rng.integers(20, 40, number)]


def test_samples_are_those_of_one_engine():
    asked = [request(prompt, (n, n + 100)) for n, prompt in enumerate(prompts(20))]
    expected = flat(shared().generate(asked))
    for ours, theirs in zip(flat(balanced().generate(asked)), expected, strict=True):
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-5)


def test_requests_go_where_least_is_in_flight():
    balancer = balanced()
    balancer.pause()
    sizes = [5, 1, 1, 1, 1, 1, 2]
    # 5 | 1 1 1 1 1 (a tie goes to the first engine, so the last 1 of 5 still goes right) then
    # 5 = 5: the 2 goes to the first
    futures = balancer.submit(
        [request(p, range(n)) for p, n in zip(prompts(7), sizes, strict=True)]
    )
    assert [len(engine._queue) for engine in balancer.engines] == [7, 5]
    balancer.resume()
    assert all(f.result(timeout=60).stop_reason == "length" for group in futures for f in group)
    assert balancer._in_flight == [0, 0]


def test_a_conversation_stays_with_its_prefix(monkeypatch):
    monkeypatch.setattr("jaxrl.rollout.native.programs.SHAPES", SMALL)
    balancer = balanced(enable_prefix_caching=True)
    first = [flat(balancer.generate([request(p)]))[0] for p in prompts(2)]
    computed = [engine.prefilled_tokens for engine in balancer.engines]
    turns = [(*p, *c.tokens, 3) for p, c in zip(prompts(2), first, strict=True)]
    balancer.generate([request(turn) for turn in reversed(turns)])
    new = [e.prefilled_tokens - n for e, n in zip(balancer.engines, computed, strict=True)]
    # whole pages of 16 are found, of all but the last drawn token; the new one is decoded
    found = [(len(turn) - 2) // 16 * 16 for turn in turns]
    assert sum(new) == sum(len(turn) - 1 - n for turn, n in zip(turns, found, strict=True))
    assert min(found) > 16


def test_a_prompt_may_be_longer_than_the_cache_so_far():
    balancer = balanced(enable_prefix_caching=True)  # nothing was warmed up
    (said,) = flat(balancer.generate([request()]))
    longer = (*PROMPT, *said.tokens, *range(1, 30), *range(1, 30))  # 110 of 96 positions
    (ours,) = flat(balancer.generate([request(longer)]))
    (expected,) = flat(make().generate([request(longer)]))  # the shared one keeps its length
    assert ours.tokens == expected.tokens


def test_a_conversation_stays_with_its_slot():
    balancer, overs, told = balanced(), [Future(), Future()], prompts(2)

    def prefilled():
        return [engine.prefilled_tokens for engine in balancer.engines]

    for _ in range(3):
        before = prefilled()
        asked = [
            dataclasses.replace(request(p), conversations=(over,))
            for p, over in zip(told, overs, strict=True)
        ]
        said = flat(balancer.generate(asked))
        told = [(*p, *c.tokens, 6) for p, c in zip(told, said, strict=True)]
        told, overs = told[::-1], overs[::-1]  # by what is in flight the engines would swap
    # one token a turn and engine: the one that was drawn last; the 6 is decoded
    assert [now - then for now, then in zip(prefilled(), before, strict=True)] == [1, 1]
    assert balancer._in_flight == [1, 1]  # each holds a slot
    for over in overs:
        over.cancel()
    assert (balancer._in_flight, balancer._home) == ([0, 0], {})


def test_an_engine_that_gets_nothing_is_not_waited_for():
    balancer = balanced()
    with ThreadPoolExecutor() as pool, balancer.engines[1]._held():  # as while it decodes a block
        asked = pool.submit(balancer.submit, [request()])
        (futures,) = asked.result(timeout=20)
    assert len(futures[0].result(timeout=60).tokens) == 12


def test_if_one_engine_takes_nothing_nothing_is_queued():
    balancer = balanced()
    balancer.pause()
    balancer.engines[1].sleep()
    with pytest.raises(RuntimeError, match="no weights"):
        balancer.submit([request(p, range(n)) for p, n in zip(prompts(3), (3, 2, 1), strict=True)])
    assert balancer._in_flight == [0, 0]
    balancer.sleep()  # refuses with samples in flight
    balancer.update_weights(random_params(LLAMA), 1)
    balancer.resume()
    assert len(flat(balancer.generate([request(keys=range(4))]))) == 4
    assert [engine.decoded_tokens for engine in balancer.engines] == [4 * 12, 0]


def test_what_ends_all_ends_all():
    balancer = balanced()
    balancer.pause()
    futures = flat(balancer.submit([request(p, range(3), max_tokens=40) for p in prompts(4)]))
    balancer.abort()
    assert [f.result(timeout=60).stop_reason for f in futures] == ["abort"] * 12
    for engine in balancer.engines:
        until_idle(engine)
    assert balancer._in_flight == [0, 0]
    balancer.sleep()
    balancer.update_weights(random_params(LLAMA, 1), 2)
    balancer.resume()
    assert flat(balancer.generate([request()]))[0].versions == [2] * 12


def test_a_request_that_can_never_be_served_queues_nothing():
    balancer = balanced(max_model_len=32)
    try:
        balancer.submit([request(PROMPT[:8]), request(PROMPT)])
    except ValueError as error:
        assert "max_model_len=32" in str(error)
    assert balancer._in_flight == [0, 0]
