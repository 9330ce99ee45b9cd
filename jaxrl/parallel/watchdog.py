"""Notice a run that stands still, and print the stacks of all threads of its processes.

A thread of each process looks whether anything was done: a phase began or ended, a trajectory came,
a program was compiled (`jaxrl.activity`). A process that waits for another does nothing itself, so
the processes count together, in the coordinator's table. All of them notice it within one look.

How long a run may do nothing follows from the run itself: `limit`. In a job it is the longest of
its processes' limits, for who waits in a short phase may wait for one that compiles.

Under the launcher, which starts the job again, the process then ends. Else it says where it is, at
twice the time again, and goes on waiting: nobody would start it. Whatever holds the interpreter's
lock stops this thread, too. Where the process is to end each look therefore puts off a timer of
`faulthandler`, which needs no lock, and prints the stacks; the launcher ends the process. In a job
the other processes notice it before, unless a limit is given: the timer is set to an hour.
"""

import contextlib
import faulthandler
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import jax

from jaxrl import activity
from jaxrl.cli import STALLED
from jaxrl.parallel.compilation import COMPILED
from jaxrl.parallel.jax_internals import COMPILER_FILE, global_state

SIGN = "stalled: "  # before what a process says of itself; `cluster.supervise` looks for it
KEY, LIMITS = "jaxrl/progress", "jaxrl/limits/"
LOOKS, SECONDS_BETWEEN = 20, 2.0  # within a limit that is given, and at most between two
STAY_SECONDS = 15.0  # for the others, which end when this process is gone, to say where they are
# How often the longest silence of its kind a phase may be silent, and for how many seconds in any
# case; and where nothing foretells how long.
TIMES, LEAST_SECONDS, FIRST_SECONDS = 10, 300.0, 3600.0
MARGIN_SECONDS = 60.0  # beyond a limit that the run itself keeps
# Phases whose next silence no earlier one foretells: storage is written to beside the steps, and it
# is waited for where it takes longer than they do.
STORAGE = "save_checkpoints", "save_hf_model"
CALLBACKS = "on_"  # their phases begin with it; what one does now and then may take long
# Phases that may wait for what is sampled.
SAMPLING = "generate", "eval", "sync_weights", "init_weight_sync_state"
# `waits`: see `watched`; `on`: a thread watches; `compiled`: programs, since this was imported.
_state = SimpleNamespace(waits=0.0, on=False, compiled=0)


def limit(given: float | None, longest: float | None, waits: float = 0.0) -> float:
    """Return the seconds in which nothing is done after which a run stands still.

    Args:
        given: `trainer.cluster.stall_seconds`; None = it follows from the others.
        longest: silence of earlier phases of this kind; None = they foretell nothing: there was
            none, something compiles, storage is written to, or callbacks are called.
        waits: longest wait that the run ends by itself.
    """
    if given is not None:
        return given
    own = FIRST_SECONDS if longest is None else max(LEAST_SECONDS, TIMES * longest)
    return max(own, waits and waits + MARGIN_SECONDS)


def start(given: float | None) -> None:
    """Watch this process from now on; it ends with status `STALLED` where it stands still.

    Args:
        given: see `limit`.
    """
    _start(given, ends=True)


@contextlib.contextmanager
def watched(given: float | None, waits: float | None) -> Iterator[None]:
    """Have a run that stands still while the block runs say so, unless `start` has it end.

    Args:
        given: see `limit`; 0 = it is not watched.
        waits: longest wait for what is sampled that the run ends by itself; None = any.
    """
    _state.waits = FIRST_SECONDS if waits is None else waits
    if _state.on or given == 0:
        yield
        return
    stop = _start(given, ends=False)
    try:
        yield
    finally:
        stop.set()
        _state.on = False


def _start(given: float | None, *, ends: bool) -> threading.Event:
    stop, _state.on = threading.Event(), True
    arguments = given, ends, stop
    threading.Thread(target=_watch, args=arguments, name="watchdog", daemon=True).start()
    return stop


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    if event == COMPILED:
        _state.compiled += 1
        activity.progressed()


def _watch(given: float | None, ends: bool, stop: threading.Event) -> None:
    jax.monitoring.register_event_duration_secs_listener(_listen)
    try:
        _look_until(stop, given, ends)
    finally:
        jax.monitoring.unregister_event_duration_listener(_listen)


def _look_until(stop: threading.Event, given: float | None, ends: bool) -> None:
    pause = SECONDS_BETWEEN if given is None else min(given / LOOKS, SECONDS_BETWEEN)
    job, longest, silent, said = _Job(), dict[str, float](), 0.0, 1
    last, compiled = time.monotonic(), _state.compiled
    while not stop.is_set():
        kind = activity.kind()
        own = _limit_of(kind, given, longest)
        if ends:
            # its clock goes on while this process is stopped, so it is late where no limit is given
            late = own if given is not None else max(own, FIRST_SECONDS)
            faulthandler.dump_traceback_later(late + pause, file=2)
        stop.wait(pause)
        now = time.monotonic()
        if not job.progressed(own):
            # a process that was itself stopped has not seen that nothing was done
            silent += min(now - last, 2 * pause)
        else:
            if compiled == _state.compiled:  # else it has waited for that
                longest[kind] = max(longest.get(kind, 0.0), silent)
            if said > 1:
                activity.warn(f"the run goes on: {activity.place()}, after {silent:.0f} s")
            silent, said, compiled = 0.0, 1, _state.compiled
        last = now
        if silent >= own * said and silent >= job.limit(own) * said:
            _say(silent, given, own)
            said *= 2
            if ends:
                time.sleep(STAY_SECONDS)
                os._exit(STALLED)


def _limit_of(kind: str, given: float | None, longest: Mapping[str, float]) -> float:
    """Return the limit in a phase as this process is now, see `limit`."""
    own_pace = kind in STORAGE or kind.startswith(CALLBACKS)
    foretold = not own_pace and activity.is_known(kind) and not _compiles()
    waits = _state.waits if kind in SAMPLING else 0.0
    return limit(given, longest.get(kind, 0.0) if foretold else None, waits)


def _compiles() -> bool:
    """Return whether a thread is in JAX's compiler, which tells only once it is done."""
    stacks = map(traceback.walk_stack, sys._current_frames().values())
    frames = (frame for stack in stacks for frame, _ in stack)
    return any(frame.f_code.co_filename.endswith(COMPILER_FILE) for frame in frames)


class _Job:
    """Tell whether any process has done something since the last time, and their limit."""

    def __init__(self) -> None:
        self._own: object = None
        self._total = ""
        self._told = 0.0
        self._alone = global_state.client is None

    def progressed(self, own_limit: float) -> bool:
        client, own = global_state.client, activity.progress()
        if self._alone:
            before, self._own = self._own, own
            return before != own
        if client is None:  # the process ends, and has left the job
            return True
        try:
            if own_limit != self._told:
                name = f"{LIMITS}{global_state.process_id}"
                client.key_value_set(name, str(own_limit), allow_overwrite=True)
                self._told = own_limit
            if own != self._own:
                self._own, self._total = own, str(client.key_value_increment(KEY, 1))
                return True
            before, self._total = self._total, client.key_value_try_get(KEY)
        except jax.errors.JaxRuntimeError:  # the coordinator is gone; the others will notice
            return False
        return before != self._total

    def limit(self, own: float) -> float:
        """Return the longest limit of the processes, that of this one among them."""
        client = global_state.client
        if self._alone or client is None:
            return own
        try:
            return max([own, *(float(text) for _, text in client.key_value_dir_get(LIMITS))])
        except jax.errors.JaxRuntimeError:
            return own


def _say(silent: float, given: float | None, own: float) -> None:
    """Print in one piece where this process is."""
    goes_on = activity.described(activity.going_on())
    seconds = f"None, here {own:.0f}" if given is None else f"{given:g}"
    about = (
        f"process {global_state.process_id or 0} on {socket.gethostname()}: {activity.place()}, "
        f"nothing done for {silent:.0f} s (trainer.cluster.stall_seconds={seconds})"
    )
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stacks:
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        text = f"\n{SIGN}{about}{goes_on and f'; {goes_on}'}\n{stacks.read()}"
    sys.stderr.write(text)
    sys.stderr.flush()
