"""An engine whose samples wait lends some to one that is idle, and no bit depends on it."""

import contextlib
import dataclasses
import functools
import random
import threading
from concurrent.futures import Future

import pytest

from tests.rollout.test_balancer import balanced, prompts
from tests.rollout.test_engine import make, request, until_idle
from tests.rollout.test_native import LLAMA, flat, random_params

LONG, SHORT = 40, 4
pair = functools.partial(balanced, lends=True)  # two engines of two slots


@functools.cache
def alone():
    return make(2)  # the same shapes


def uneven(keys=(1, 2)):
    """Return requests of which the first and the third go to one engine, and wait there."""
    lengths = LONG, SHORT, LONG
    return [request(p, keys, max_tokens=n) for p, n in zip(prompts(3), lengths, strict=True)]


def submit_to_idle(balancer, requests):
    """Let the second engine come to its end before the first begins."""
    balancer.pause()
    futures = balancer.submit(requests)
    balancer.engines[1].resume()
    results(futures[1:2])
    balancer.engines[0].resume()
    return futures


def results(futures):
    return [future.result(timeout=60) for future in flat(futures)]


def same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.log_probs == theirs.log_probs


def decoded(balancer):
    return [engine.decoded_tokens for engine in balancer.engines]


def test_an_idle_engine_draws_what_waits_at_another():
    balancer, asked = pair(), uneven()
    found = results(submit_to_idle(balancer, asked))
    assert decoded(balancer) == [2 * LONG, 2 * SHORT + 2 * LONG]
    first, second, third = (len(r.prompt_tokens) - 1 for r in asked)  # each prompt once
    assert [e.prefilled_tokens for e in balancer.engines] == [first, second + third]
    assert (balancer.lent, balancer._in_flight, balancer._home) == (2, [0, 0], {})
    same(found, flat(alone().generate(asked)))


def test_without_lending_it_would_wait():
    balancer = pair()
    for engine in balancer.engines:
        engine.offer = None
    results(submit_to_idle(balancer, uneven()))
    assert decoded(balancer) == [4 * LONG, 2 * SHORT]


def test_of_requests_that_are_too_large_the_newest_is_parted():
    balancer = pair()
    asked = [request(prompts(1)[0], range(6), max_tokens=LONG)]
    same(results(submit_to_idle(balancer, asked)), flat(alone().generate(asked)))
    assert balancer.lent >= 2
    assert min(decoded(balancer)) >= 2 * LONG
    assert sum(decoded(balancer)) == 6 * LONG


def test_whole_requests_go_before_parts_of_one():
    engine = make(2)
    engine.pause()
    sizes = 2, 3, 1, 2
    groups = engine.submit([request(p, range(n)) for p, n in zip(prompts(4), sizes, strict=True)])

    def spared(most):
        with engine._held():
            return [sample.future for sample in engine.spare(most, lambda _: True)]

    assert spared(4) == groups[2] + groups[3]
    assert spared(2) == groups[0]
    assert spared(2) == groups[1][1:]  # it does not fit
    assert [sample.future for sample in engine._queue] == groups[1][:1]
    engine.abort()


def test_what_must_stay_stays():
    engine, conversations = make(2), [Future(), Future(), Future()]
    kept, *new = conversations
    (said,) = flat(engine.generate([dataclasses.replace(request(), conversations=(kept,))]))
    engine.pause()
    turn = request((*request().prompt_tokens, *said.tokens, 3))
    groups = engine.submit(
        [
            dataclasses.replace(turn, conversations=(kept,)),
            dataclasses.replace(request(prompts(1)[0], (1, 2)), conversations=tuple(new)),
            request(prompts(2)[1], (1, 2, 3)),
        ]
    )
    groups[2][1].cancel()
    with engine._held():
        assert engine.spare(1, lambda sample: sample.conversation is not None) == []
        spared = [sample.future for sample in engine.spare(9, lambda _: True)]
    assert spared == [*groups[1], groups[2][0], groups[2][2]]
    engine.abort()
    for conversation in conversations:
        conversation.cancel()


def test_a_sample_that_has_made_room_stays():
    engine = make(2)
    engine.pause()
    engine.submit([request(keys=(1, 2), max_tokens=LONG)])
    with engine._held():
        engine._turn()
        engine._land()
        engine._suspend(1)
        assert engine._queue[0].tokens
        assert engine.spare(2, lambda _: True) == []
    engine.abort()


def test_a_conversation_that_is_lent_stays_where_it_went():
    balancer, overs = pair(), [Future() for _ in range(6)]
    asked = [
        dataclasses.replace(r, conversations=tuple(overs[2 * n : 2 * n + 2]))
        for n, r in enumerate(uneven())
    ]
    futures = submit_to_idle(balancer, asked)
    said = results(futures)
    assert (balancer.lent, balancer._in_flight) == (2, [2, 4])
    before = [engine.prefilled_tokens for engine in balancer.engines]
    turn = request((*asked[2].prompt_tokens, *said[4].tokens, 3))
    results(balancer.submit([dataclasses.replace(turn, conversations=(overs[4],))]))
    after = [engine.prefilled_tokens for engine in balancer.engines]
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 1]  # what was drawn last
    for over in overs:
        over.cancel()
    assert (balancer._in_flight, balancer._home) == ([0, 0], {})


def lent_to_one_that_sleeps_in(monkeypatch):
    """Return a balancer whose second engine has two samples of the first, and has not noticed."""
    balancer = pair()
    monkeypatch.setattr(balancer.engines[1], "awake", lambda: None)
    futures = submit_to_idle(balancer, uneven())
    results(futures[:2])
    assert (balancer.lent, balancer._in_flight) == (2, [0, 2])
    return balancer, futures[2]


def test_a_sample_that_is_lent_can_be_cancelled(monkeypatch):
    balancer, (first, second) = lent_to_one_that_sleeps_in(monkeypatch)
    assert first.cancel()
    assert balancer._in_flight == [0, 1]
    balancer.engines[1].resume()
    assert len(second.result(timeout=60).tokens) == LONG
    assert decoded(balancer) == [2 * LONG, 2 * SHORT + LONG]


def test_what_ends_all_ends_what_is_lent(monkeypatch):
    balancer, futures = lent_to_one_that_sleeps_in(monkeypatch)
    balancer.pause()
    with pytest.raises(RuntimeError, match="samples are in flight"):
        balancer.sleep()
    balancer.update_weights(random_params(LLAMA), 1)  # the first one sleeps
    balancer.abort()
    assert [future.result(timeout=60).stop_reason for future in futures] == ["abort"] * 2
    for engine in balancer.engines:
        until_idle(engine)
    assert (balancer._in_flight, balancer._home) == ([0, 0], {})
    balancer.sleep()


def test_an_engine_that_was_never_asked_makes_room():
    balancer = pair()
    asked = [request(prompts(1)[0], (1, 2, 3, 4), max_tokens=100)]
    same(results(submit_to_idle(balancer, asked)), flat(alone().generate(asked)))
    assert decoded(balancer) == [200, 200]


@pytest.mark.parametrize(
    "why", ["nothing", "paused", "asleep", "older", "apart", "coming", "busy", "shrinks"]
)
def test_an_engine_that_cannot_begin_takes_nothing(why):
    balancer = pair(shrink=None, ahead=False) if why == "shrinks" else pair()
    giver, taker = balancer.engines
    giver.pause()
    balancer.submit([request(keys=(1, 2))])
    if why == "paused":
        taker.pause()
    elif why == "asleep":
        taker.sleep()
    elif why == "older":
        taker.update_weights(random_params(LLAMA), 0)
    elif why == "coming":
        balancer._coming[1] = 2
    elif why == "busy":
        taker.pause()
        taker.submit([request()])
        taker._paused = False
    with giver._held(), balancer._apart() if why == "apart" else contextlib.nullcontext():
        balancer.lend(0)
    assert balancer.lent == (2 if why == "nothing" else 0)
    balancer.abort()


def test_engines_that_lend_to_each_other_never_stand_still():
    balancer, draw = pair(3), random.Random(0)
    asked = [
        request(p, range(10 * n, 10 * n + draw.randint(1, 4)), max_tokens=draw.choice((2, 9, 30)))
        for n, p in enumerate(prompts(60))
    ]
    expected = flat(alone().generate(asked))
    futures = [[] for _ in asked]

    def submit(numbers):
        for n in numbers:
            (futures[n],) = balancer.submit([asked[n]])
            if n % 7 == 0:
                futures[n][0].cancel()

    many = request(prompts(1)[0], range(700, 712), max_tokens=LONG)  # two can be drawn at once
    (samples,) = balancer.submit([many])
    samples[0].result(timeout=60)
    assert balancer.lent > 0  # the others had nothing to do; from here on it depends on the clock
    threads = [threading.Thread(target=submit, args=(range(i, 60, 3),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        balancer.pause()
        balancer.update_weights(random_params(LLAMA), 1)  # the same
        balancer.resume()
    for thread in threads:
        thread.join(timeout=60)
    left = [n for n, future in enumerate(flat(futures)) if not future.cancelled()]
    assert len(left) >= len(expected) - 9
    same([flat(futures)[n].result(timeout=60) for n in left], [expected[n] for n in left])
    same([sample.result(timeout=60) for sample in samples], flat(alone().generate([many])))
    assert (balancer._in_flight, balancer._home) == ([0, 0, 0], {})
