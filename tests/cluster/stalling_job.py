"""A step of a job in whose first attempt the last process stands still; argv: how, the attempt.

And callbacks: one that stands still once, one that takes its time.
"""

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxrl import activity
from jaxrl.parallel.processes import allgather, joined_main
from jaxrl.records.callbacks import CallbackInput, TrainingCallback, TrainingControl


def asleep() -> None:
    time.sleep(1000)


def reading() -> None:
    """In the system, without the interpreter's lock."""
    os.read(os.pipe()[0], 1)


def holding_the_lock() -> None:
    while True:  # a signal ends a pause
        ctypes.PyDLL(None).pause()


class StandsStillOnce(TrainingCallback):
    """In process 1, at the begin of step 4, where there is no file STOOD_STILL yet."""

    def on_step_start(self, trainer, callback_input: CallbackInput, control: TrainingControl):
        mark = Path(os.environ["STOOD_STILL"])
        if jax.process_index() == 1 and callback_input.global_step == 4 and not mark.exists():
            mark.touch()
            reading()


class TakesItsTime(TrainingCallback):
    """In each step."""

    def on_step_start(self, trainer, callback_input: CallbackInput, control: TrainingControl):
        time.sleep(1.0)


def main(argv: Sequence[str]) -> int:
    how, attempt = argv
    activity.begin_step(3)
    with activity.phase("sync_weights"):
        allgather("compiled")
    with activity.phase("generate"):
        if attempt == "1" and jax.process_index() == jax.process_count() - 1:
            globals()[how]()
        allgather("sampled")
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(joined_main(main, sys.argv[1:]))
