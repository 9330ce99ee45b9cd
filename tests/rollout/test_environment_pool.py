"""Where calls of environments and rewards are made: side by side, or one after the other."""

import asyncio
import functools
import itertools
import logging
import threading
from types import SimpleNamespace

import pytest

from jaxrl.config import load_config_file
from jaxrl.rollout.conversations.conversation import ConversationGenerator, sample_key
from jaxrl.rollout.conversations.environment_pool import EnvironmentPool
from jaxrl.rollout.conversations.reward_terms import RewardTerms
from jaxrl.rollout.generator import generate_now
from jaxrl.rollout.protocol import Sampling
from jaxrl.train import BasePPOExp
from tests.rollout.scripted import ScriptedEngine, make_prompt
from tests.rollout.test_multi_turn import END, TOKENIZER
from tests.test_train import QUICKSTART

HERE = __name__
ROWS = 4
together = threading.Barrier(ROWS)  # passed when as many wait for it
arrived: list[str] = []


def waits_for_all(action):
    """Comes back when the rewards of all rows are under way."""
    together.wait(timeout=20)
    return 1.0


async def waits_in_the_loop(action):
    arrived.append(action)
    async with asyncio.timeout(20):
        while len(arrived) < ROWS:
            await asyncio.sleep(0)
    return 1.0


def logged(function):
    @functools.wraps(function)
    def wrapper(**keywords):
        return function(**keywords)

    return wrapper


@logged
async def awaited(*, action):
    return 2.0


def judged(function, pool):
    prompts = [make_prompt(TOKENIZER, "12", f"0:{i}", "single_turn") for i in range(ROWS)]
    generator = ConversationGenerator(
        ScriptedEngine(lambda prompt, key: [3, END]),
        TOKENIZER,
        pool=pool,
        reward_terms=RewardTerms({}, [f"{HERE}:{function}"]),
    )
    keys, sampling = [sample_key(i) for i in range(ROWS)], Sampling(8, stop_token_ids=(END,))
    return generate_now(generator, {"prompts": prompts, "keys": keys, "sampling": sampling})


def test_rewards_of_the_recipe_that_people_copy_run_side_by_side():
    """Those of README's command: the quickstart's settings, an environment of microseconds."""
    pool = BasePPOExp(load_config_file(QUICKSTART)).get_generator(None, TOKENIZER).pool
    assert judged("waits_for_all", pool)["rewards"] == [1.0] * ROWS


@pytest.mark.parametrize("workers", [0, ROWS])
def test_coroutines_run_side_by_side_in_any_pool(workers):
    arrived.clear()
    assert judged("waits_in_the_loop", EnvironmentPool(workers))["rewards"] == [1.0] * ROWS


@pytest.mark.parametrize("workers", [0, ROWS])
def test_a_decorated_coroutine_is_awaited(workers):
    assert judged("awaited", EnvironmentPool(workers))["rewards"] == [2.0] * ROWS


def test_instant_calls_need_no_thread():
    async def threads(workers):
        pool = EnvironmentPool(workers)
        instant = await pool.run(threading.get_ident, instant=True)
        return instant, await pool.run(threading.get_ident)

    here = threading.get_ident()
    assert asyncio.run(threads(0)) == (here, here)
    instant, other = asyncio.run(threads(2))
    assert instant == here != other


@pytest.mark.parametrize(
    ("seconds", "calls", "told"),
    [
        # every fifth call judges: of 1,000 calls 200 * 0.006 s = 1.2 s, more than 1 s
        ([0.006, 0, 0, 0, 0], 1000, "0.006 s each"),
        ([0.004, 0, 0, 0, 0], 100_000, None),
        ([1.0, 0, 0, 0, 0], 16, "1 s each"),  # the fourth of them
        ([30.0] + [0] * 99, 300, None),  # an import, now and then
    ],
)
def test_slow_calls_one_after_the_other_are_told_of_once(monkeypatch, caplog, seconds, calls, told):
    now, left = [0.0], itertools.cycle(seconds)
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("jaxrl.rollout.conversations.environment_pool.time", clock)

    def call():
        now[0] += next(left)

    async def run():
        pool = EnvironmentPool(0)
        for _ in range(calls):
            await pool.run(call)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    said = [record.getMessage() for record in caplog.records]
    if told is None:
        assert said == []
    else:
        (line,) = said
        assert told in line and "max_env_workers=0. Set it to 32" in line
