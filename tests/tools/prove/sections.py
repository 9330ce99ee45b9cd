"""Sections for the tests of `prove`: each ends in another way, and says so in the folder."""

import dataclasses
import os
import signal
import time
from pathlib import Path

from jaxrl.tools.prove.section import Machine, Result, contents_hash

MACHINE = Machine(
    platform="tpu",
    device="TPU of the tests",
    number=1,
    memory=None,
    flops=1e12,
    bandwidth=1e9,
    source="the tests",
    known=True,
    contents="0123456789ab",
)


def machine():
    return MACHINE, Result(True, "1 x TPU of the tests")


def machine_with_sources():
    """The machine where jaxrl is the folder that the test names."""
    contents = contents_hash(Path(os.environ["SOURCES"]))
    return dataclasses.replace(MACHINE, contents=contents), Result(True)


def passes(task):
    count = Path(os.environ["COUNT"])
    count.write_text(count.read_text() + task.mode + "\n")
    return Result(True, "all of it", rows=[{"mfu": 0.25, "seconds": 0.125}], seconds=1e6)


def skips(task):
    return Result(None, reason="there is one device", missing=["the others"])


def raises(task):
    raise RuntimeError(f"no room in {task.folder}\nand more")


def dies(task):
    print("reached the end of the memory")
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps(task):
    Path(os.environ["COUNT"]).write_text(str(os.getpid()))
    time.sleep(300)
