"""Jobs of several real processes on this machine, for tests."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxrl.parallel.processes import ADDRESS, COUNT, INDEX
from jaxrl.rollout.remote.vllm_process import free_port
from tests import quick_compile

ROOT = Path(__file__).parents[1]


class Ended(NamedTuple):
    """A process that has ended."""

    status: int
    out: str
    error: str


def start(
    argv: Sequence[str], count: int, *, devices: int, environment: Mapping[str, str] | None = None
) -> list["subprocess.Popen[str]"]:
    """`python ARGV` in `count` processes of one job, each with so many host devices; a job of one
    process has no coordinator."""
    flags = f"--xla_force_host_platform_device_count={devices} {quick_compile.FLAGS}"
    shared = {**os.environ, "XLA_FLAGS": flags, **(environment or {})}
    address = f"127.0.0.1:{free_port()}"
    processes = []
    for index in range(count):
        own = {ADDRESS: address, COUNT: str(count), INDEX: str(index)} if count > 1 else {}
        processes.append(
            subprocess.Popen(
                [sys.executable, *argv],
                cwd=ROOT,
                env=shared | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes


def finish(processes: Sequence["subprocess.Popen[str]"], seconds: float = 300) -> list[Ended]:
    """Wait for all of them; those that do not end are killed, and the test fails."""
    try:
        said = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ended(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


def run(
    argv: Sequence[str], count: int, *, devices: int, environment: Mapping[str, str] | None = None
) -> list[Ended]:
    """`start` and `finish`."""
    return finish(start(argv, count, devices=devices, environment=environment))
