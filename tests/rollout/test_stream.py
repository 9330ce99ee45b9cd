"""Rollouts ahead of the trainer: admission, order, resume, failures; the generator is a fake."""

import asyncio
import random
import threading
import time
from contextlib import closing

import pytest

from jaxrl.rollout.conversations.loop_thread import LoopThread
from jaxrl.rollout.conversations.stream import Held, RolloutStream, Unit


class Samplers:
    """A generator whose groups end when the test says so; an output is the group's ordinal."""

    def __init__(self):
        self.begun, self.waiting = [], {}  # (ordinal, step then); ordinal: its future

    async def __call__(self, ordinal, step):
        self.begun.append((ordinal, step))
        self.waiting[ordinal] = asyncio.get_running_loop().create_future()
        return await self.waiting[ordinal]

    def end(self, thread, ordinal, error=None):
        async def tell():
            future = self.waiting.pop(ordinal)
            future.set_exception(error) if error else future.set_result(ordinal)

        thread.run(tell())
        settle(thread)


def settle(thread):
    """What was called in the loop before has happened, and what that set off."""
    for _ in range(5):
        thread.run(asyncio.sleep(0))


@pytest.fixture
def thread():
    with closing(LoopThread("test-rollouts")) as opened:
        yield opened


def stream(thread, samplers, **settings):
    given = {"groups": 2, "ahead": 1, "steps": 5, "step": 1, "held": Held(0), "workers": 4}
    made = RolloutStream(samplers, thread, **{**given, **settings})
    settle(thread)
    return made


def test_groups_are_trained_as_they_are_finished_and_sorted_within_a_batch(thread):
    samplers = Samplers()
    rollouts = stream(thread, samplers)
    assert samplers.begun == [(0, 1), (1, 1), (2, 1), (3, 1)]  # (1 + 1) x 2
    for ordinal in (3, 1, 2):
        samplers.end(thread, ordinal)
    assert rollouts.waiting() == 3
    assert rollouts.take() == [Unit(1, 1), Unit(3, 3)]
    assert rollouts.held() == Held(4, [0], [Unit(2, 2)])
    assert len(samplers.begun) == 4  # the step is the same
    rollouts.advance(2)
    settle(thread)
    assert samplers.begun[4:] == [(4, 2), (5, 2)]
    samplers.end(thread, 0)
    assert rollouts.take() == [Unit(0, 0), Unit(2, 2)]


def test_whole_batches_one_after_the_other_and_none_beyond_the_run(thread):
    samplers = Samplers()
    rollouts = stream(thread, samplers, unit=2, workers=1, steps=2)
    assert samplers.begun == [(0, 1)]
    samplers.end(thread, 0)
    assert samplers.begun == [(0, 1), (2, 1)]
    samplers.end(thread, 2)
    rollouts.drain()
    assert rollouts.take() == [Unit(0, 0)]
    rollouts.advance(2)
    settle(thread)
    assert len(samplers.begun) == 2  # there is no third step
    rollouts.drain()
    assert rollouts.held() == Held(4, [], [Unit(2, 2)])


def test_the_drain_waits_for_what_the_old_weights_are_to_sample(thread):
    samplers = Samplers()
    rollouts = stream(thread, samplers, unit=2, workers=1, ahead=2)
    drained = threading.Event()
    waiter = threading.Thread(target=lambda: (rollouts.drain(), drained.set()))
    waiter.start()
    for ordinal in (0, 2, 4):
        assert not drained.is_set()
        samplers.end(thread, ordinal)
    waiter.join(10)
    assert drained.is_set()
    assert samplers.begun == [(0, 1), (2, 1), (4, 1)]


@pytest.mark.parametrize("seed", range(5))
def test_admission_never_exceeds_the_rule_and_the_sum_is_every_group_once(thread, seed):
    """Random ends and steps; accepted + running <= (s + t) P at every moment."""
    rng, samplers = random.Random(seed), Samplers()
    groups, ahead, steps, workers = 3, rng.randrange(4), 6, rng.choice([3, 5, 12])
    rollouts = stream(thread, samplers, groups=groups, ahead=ahead, steps=steps, workers=workers)
    ended, trained, busiest = 0, [], 0
    for step in range(1, steps + 1):
        rollouts.advance(step)
        settle(thread)
        while rollouts.waiting() < groups or (samplers.waiting and rng.random() < 0.7):
            assert len(samplers.waiting) <= workers
            assert ended + len(samplers.waiting) <= (ahead + step) * groups
            busiest = max(busiest, len(samplers.waiting))
            assert samplers.waiting, "a trainer that waits for nothing"
            samplers.end(thread, rng.choice(sorted(samplers.waiting)))
            ended += 1
        trained += [unit.ordinal for unit in rollouts.take()]
    assert sorted(trained) == list(range(groups * steps))
    assert all(ordinal < (ahead + step) * groups for ordinal, step in samplers.begun)
    assert busiest == min(workers, (ahead + 1) * groups)  # the rule is also used to the full
    assert rollouts.held() == Held(groups * steps)


def test_a_resumed_stream_hands_out_first_what_was_in_flight(thread):
    samplers = Samplers()
    held = Held(9, [3, 5], [Unit(6, 6), Unit(4, 4), Unit(7, 7)])
    rollouts = stream(thread, samplers, step=3, ahead=2, held=held)
    # trained 4, waiting 3: (2 + 3) x 2 - 7 = 3 may be in flight, though there are 4 workers
    assert samplers.begun == [(3, 3), (5, 3), (9, 3)]
    assert rollouts.held() == Held(10, [3, 5, 9], held.finished)
    assert rollouts.take() == [Unit(4, 4), Unit(6, 6)]
    one = stream(thread, samplers := Samplers(), step=3, held=held, workers=1)
    assert samplers.begun == [(3, 3)]  # 4 + 3 + 1 = (1 + 3) x 2
    assert one.held() == Held(9, [3, 5], held.finished)


def test_what_a_sampler_raises_ends_the_wait_with_its_own_traceback(thread):
    samplers = Samplers()
    rollouts = stream(thread, samplers)
    samplers.end(thread, 1)
    samplers.end(thread, 0, ZeroDivisionError("of the environment"))
    for call in (rollouts.take, rollouts.drain):
        with pytest.raises(ZeroDivisionError, match="of the environment") as caught:
            call()
        assert "__call__" in [entry.name for entry in caught.traceback]
    rollouts.advance(2)
    settle(thread)
    assert len(samplers.begun) == 4  # nothing more is begun
    assert rollouts.held() == Held(4, [0, 2, 3], [Unit(1, 1)])


def test_of_several_errors_the_first_is_raised(thread):
    """Those after it may be what it led to."""
    samplers = Samplers()
    rollouts = stream(thread, samplers)
    samplers.end(thread, 2, ZeroDivisionError("of the environment"))
    samplers.end(thread, 0, RuntimeError("of the engine"))
    with pytest.raises(ZeroDivisionError):
        rollouts.take()


def test_closing_the_thread_cancels_what_is_in_flight():
    ended = []

    async def sample(ordinal, step):
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(ordinal)

    thread = LoopThread("test-rollouts")
    stream(thread, sample)
    thread.close()
    thread.close()
    assert sorted(ended) == [0, 1, 2, 3]
    assert "test-rollouts" not in [t.name for t in threading.enumerate()]


def test_idle_time_is_that_in_which_nothing_is_in_flight(thread):
    samplers = Samplers()
    rollouts = stream(thread, samplers, steps=1, ahead=0)
    rollouts.take_idle_seconds()
    samplers.end(thread, 0)
    assert rollouts.take_idle_seconds() == 0.0
    samplers.end(thread, 1)
    time.sleep(0.05)
    assert rollouts.take_idle_seconds() >= 0.05
