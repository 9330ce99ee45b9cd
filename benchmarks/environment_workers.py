"""Calls of environments in Ray actors against threads: how many a second, and what one costs.

    python -m benchmarks.environment_workers            # threads, 1, 2 and 4 workers
    python -m benchmarks.environment_workers --workers 8 16 --work 50000
    python -m benchmarks.environment_workers --smoke    # few calls; the figures mean nothing

Claim: where environments compute in Python, threads make as many calls a second as one core can,
whatever their number, and two workers on two cores more. A call of an environment that does nothing
costs a worker less than 3 ms: environments that need less than that are better in threads.

Conversations of several turns go on side by side, through `Session`, as in a run. An environment
adds up numbers in a loop; calls are its steps. Workers are started before the clock is.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import roofline
from jaxrl.cluster import initialize_ray
from jaxrl.cluster.environment_workers import EnvironmentWorkers
from jaxrl.config import TrainConfig
from jaxrl.envs import Env
from jaxrl.rollout.conversations.environment_pool import EnvironmentPool
from jaxrl.rollout.conversations.session import Session
from jaxrl.types import Prompt

CALLS_AT_A_TIME = 32


class AddingEnv(Env):
    """Adds up `work` numbers in every step."""

    def step(self, action: str) -> Any:
        """The sum is the reward."""
        total = 0
        for i in range(self.extras["work"]):
            total += i
        return {"observations": [], "reward": float(total), "done": False, "metadata": {}}


def sessions(pool: EnvironmentPool, count: int, work: int) -> list[Session]:
    """Conversations with one environment each."""
    env_class = f"{AddingEnv.__module__}:AddingEnv"
    extras = {"work": work}
    return [Session(Prompt(f"0:{i}", [], (), env_class, extras), pool, None) for i in range(count)]


async def _talk(session: Session, turns: int) -> None:
    for _ in range(turns):
        await session.step("some words", ["some", " words"], stopped=True)


async def seconds(pool: EnvironmentPool, conversations: int, turns: int, work: int) -> float:
    """Wall time of all steps of all conversations, side by side."""
    talks = sessions(pool, conversations, work)
    await asyncio.gather(*(talk.open(turns) for talk in talks))
    started = time.perf_counter()
    await asyncio.gather(*(_talk(talk, turns) for talk in talks))
    ended = time.perf_counter()
    await asyncio.gather(*(talk.close() for talk in talks))
    return ended - started


def measure(pool: EnvironmentPool, conversations: int, turns: int, work: int) -> dict[str, float]:
    """Calls a second that work, and milliseconds of one that does nothing, one after the other."""
    asyncio.run(seconds(pool, conversations, 1, 1))  # actors start, modules are imported
    taken = asyncio.run(seconds(pool, conversations, turns, work))
    alone = asyncio.run(seconds(pool, 1, turns * 4, 1))
    calls = conversations * turns
    return {"calls_per_second": calls / taken, "milliseconds_alone": alone / (turns * 4) * 1e3}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="few short calls, one worker")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--turns", type=int, default=32)
    parser.add_argument("--work", type=int, default=200_000, help="numbers that a call adds up")
    parser.add_argument("--json", type=Path, default=Path("environment_workers.json"))
    arguments = parser.parse_args(argv)
    shape = arguments.conversations, arguments.turns, arguments.work
    if arguments.smoke:
        arguments.workers, shape = [1], (2, 2, 100)
    load = roofline.machine_load()
    initialize_ray(TrainConfig(), address="local", include_dashboard=False)
    pools: dict[str, EnvironmentPool] = {"threads": EnvironmentPool(CALLS_AT_A_TIME)}
    pools |= {f"{n} workers": EnvironmentWorkers(n, CALLS_AT_A_TIME) for n in arguments.workers}
    rows = {}
    for name, pool in pools.items():
        rows[name] = row = measure(pool, *shape)
        times = row["calls_per_second"] / rows["threads"]["calls_per_second"]
        told = f"{row['calls_per_second']:8.1f} calls/s ({times:.2f} x)"
        print(f"{name:12}{told}, {row['milliseconds_alone']:.2f} ms for nothing", flush=True)
    print(f"{os.cpu_count()} cores, {shape[0]} conversations of {shape[1]} calls; load {load}")
    report = {"benchmark": "environment_workers", "rows": rows, "load": load}
    arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
