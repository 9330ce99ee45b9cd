"""How the trainer waits for a coroutine, also where an event loop runs already, as in Jupyter."""

import asyncio
import signal
import threading

import pytest

from jaxrl.rollout.generator import run_now


async def answer():
    await asyncio.sleep(0)
    return threading.current_thread().name


async def from_a_cell(work):
    """A cell of a notebook runs in the loop of its kernel."""
    return run_now(work)


def test_a_coroutine_runs_in_this_thread_or_in_one_of_its_own():
    here = threading.current_thread().name
    assert run_now(answer()) == here
    assert asyncio.run(from_a_cell(answer())) == "jaxrl-rollouts"
    assert "jaxrl-rollouts" not in {thread.name for thread in threading.enumerate()}


def test_an_interrupted_cell_ends_what_it_waits_for():
    ended = []

    async def long():
        try:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    loop = asyncio.new_event_loop()  # unlike asyncio.run it leaves the handler of SIGINT alone
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(from_a_cell(long()))
    finally:
        signal.signal(signal.SIGINT, before)
        loop.close()
    assert ended == ["cancelled"]
    assert "jaxrl-rollouts" not in {thread.name for thread in threading.enumerate()}
