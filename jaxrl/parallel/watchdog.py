"""End a job that stands still, with the stacks of all threads of its processes.

A thread of each process looks whether anything was done: a phase began or ended, a trajectory came,
a program was compiled (`jaxrl.activity`). A process that waits for another does nothing itself, so
the processes count together, in the coordinator's table. All of them notice it within one look.

Whatever holds the interpreter's lock stops this thread, too. Each look therefore puts off a timer
of `faulthandler`, which needs no lock, and prints the stacks; the launcher ends the process.
"""

import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from typing import Any

import jax
from jax._src.distributed import global_state  # no public way to the coordinator's table

from jaxrl import activity
from jaxrl.cli import STALLED
from jaxrl.parallel.compilation import COMPILED

SIGN = "stalled: "  # before what a process says of itself; `cluster.supervise` looks for it
KEY = "jaxrl/progress"
LOOKS, SECONDS_BETWEEN = 20, 2.0  # within the limit, and at most between two
STAY_SECONDS = 15.0  # for the others, which end when this process is gone, to say where they are


def start(seconds: float) -> None:
    """Watch this process of a job from now on; a signal SIGUSR1 has it print its stacks.

    It ends with status `STALLED`, but where something holds the interpreter's lock.

    Args:
        seconds: in which the job does nothing.
    """
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    jax.monitoring.register_event_duration_secs_listener(_listen)
    threading.Thread(target=_watch, args=(seconds,), name="watchdog", daemon=True).start()


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    if event == COMPILED:
        activity.progressed()


def _watch(seconds: float) -> None:
    pause = min(seconds / LOOKS, SECONDS_BETWEEN)
    job, still, last = _Job(), 0.0, time.monotonic()
    while still < seconds:
        faulthandler.dump_traceback_later(seconds + pause, file=2)
        time.sleep(pause)
        now = time.monotonic()
        # a process that was itself stopped has not seen that nothing was done
        still = 0.0 if job.progressed() else still + min(now - last, 2 * pause)
        last = now
    _say(still, seconds)
    time.sleep(STAY_SECONDS)
    os._exit(STALLED)


class _Job:
    """Tell whether any process has done something since the last time."""

    def __init__(self) -> None:
        self._own: object = None
        self._total = ""

    def progressed(self) -> bool:
        client, own = global_state.client, activity.progress()
        if client is None:  # the process ends, and has left the job
            return True
        try:
            if own != self._own:
                self._own, self._total = own, str(client.key_value_increment(KEY, 1))
                return True
            before, self._total = self._total, client.key_value_try_get(KEY)
        except jax.errors.JaxRuntimeError:  # the coordinator is gone; the others will notice
            return False
        return before != self._total


def _say(still: float, seconds: float) -> None:
    """Print in one piece where this process is."""
    goes_on = activity.described(activity.going_on())
    about = (
        f"process {global_state.process_id} on {socket.gethostname()}: {activity.place()}, nothing "
        f"done for {still:.0f} s (trainer.cluster.stall_seconds={seconds:g})"
    )
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stacks:
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        text = f"\n{SIGN}{about}{goes_on and f'; {goes_on}'}\n{stacks.read()}"
    sys.stderr.write(text)
    sys.stderr.flush()
