"""What it costs to run a program in the sandbox.

    python -m benchmarks.sandbox             # 20 programs, and 20 inputs of one program
    python -m benchmarks.sandbox --smoke     # one of each; the figures mean nothing

Claim: a program in the sandbox costs at most 0.15 s of CPU more than the same program without one,
and a further input of a program at most 0.05 s more.

The program prints what it reads. Without the sandbox it is a plain `subprocess.run` of the same
Python. CPU time is of this process and all it starts, by the kernel's count.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrl.envs.sandbox import sandbox

PROGRAM = "print(input())"
PROGRAM_BOUND, INPUT_BOUND = 0.15, 0.05


def cost(call: Callable[[], None], count: int) -> dict[str, float]:
    """Seconds for each of `count` units of a call: by the clock, and of CPU."""
    start, cpu = time.perf_counter(), _cpu_seconds()
    call()
    wall = time.perf_counter() - start
    return {"wall_seconds": wall / count, "cpu_seconds": (_cpu_seconds() - cpu) / count}


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def measure(count: int) -> dict[str, dict[str, float]]:
    """The cost of a program without and with a sandbox, and of an input of a running sandbox."""
    sandbox.require()
    plain = [sys.executable, "-s", "-B", "-c", PROGRAM]

    def outside() -> None:
        for i in range(count):
            subprocess.run(plain, input=str(i), text=True, capture_output=True, check=True)

    def inside() -> None:
        for i in range(count):
            assert sandbox.run(PROGRAM, str(i)).stdout == f"{i}\n"

    def inputs() -> None:
        results = sandbox.run_each(PROGRAM, [str(i) for i in range(count)])
        assert [result.stdout for result in results] == [f"{i}\n" for i in range(count)]

    calls = {"outside": outside, "sandbox": inside, "input": inputs}
    return {name: cost(call, count) for name, call in calls.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, and writes JSON where --json says so."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20, help="programs, and inputs")
    parser.add_argument("--smoke", action="store_true", help="one of each")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    found = measure(1 if given.smoke else given.count)
    print(f"{'one':10}{'wall ms':>10}{'CPU ms':>10}")
    for name, costs in found.items():
        wall, cpu = (1000 * costs[f"{kind}_seconds"] for kind in ("wall", "cpu"))
        print(f"{name:10}{wall:10.1f}{cpu:10.1f}")
    cpu = {name: costs["cpu_seconds"] for name, costs in found.items()}
    more = cpu["sandbox"] - cpu["outside"], cpu["input"] - cpu["outside"]
    holds = more[0] <= PROGRAM_BOUND and more[1] <= INPUT_BOUND
    print(f"more than outside: {1000 * more[0]:.1f} ms a program, {1000 * more[1]:.1f} ms an input")
    if given.json:
        given.json.write_text(json.dumps({"costs": found, "holds": holds}) + "\n")
    if given.smoke:
        return 0
    print("the claim holds" if holds else "the claim does not hold")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
