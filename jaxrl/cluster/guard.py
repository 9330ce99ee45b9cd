"""Stand between the launcher and a process of a job: nothing of the job outlives either.

`child.py` runs it as `guard.py LIFELINE COMMAND...`. LIFELINE is a file descriptor that the
launcher never writes to: when it is closed, as the system does for a launcher that was killed, the
command and all that it started are killed. They are killed too when the command itself ends. A
signal is passed on. The exit status is that of the command, 128 + n if signal n ended it.

What the command started and left behind becomes a child of this program (Linux), which finds it so
even in a session of its own.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

KILLED = 137  # status of this program when its lifeline was cut
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of prctl


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    lifeline, command = int(argv[0]), list(argv[1:])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    received: list[int] = []
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in signals:  # before there is a command they are kept
        signal.signal(number, lambda n, _: received.append(n))
    child = subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=_die_with_guard,  # noqa: PLW1509  # there is no thread yet
    )

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # what it started is its own to end
            os.kill(child.pid, number)

    for number in signals:
        signal.signal(number, pass_on)
    for number in received:
        pass_on(number, None)
    threading.Thread(target=_end_with, args=(lifeline, child.pid), daemon=True).start()
    status = child.wait()
    kill_all(child.pid)
    return status if status >= 0 else 128 - status


def _die_with_guard() -> None:
    """Have the command, before it begins, killed when the guard is (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end_with(lifeline: int, group: int) -> None:
    os.read(lifeline, 1)
    kill_all(group)
    os._exit(KILLED)


def kill_all(group: int) -> None:
    """Kill a process group, and every descendant of this process, until none is alive."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    while alive := descendants(os.getpid()):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def descendants(root: int) -> list[int]:
    """Return the ids of the living processes below one, where the system has /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = stat.read_text(errors="replace", encoding="utf-8")
            state, parent = text.rpartition(")")[2].split()[:2]  # after the name, in brackets
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, queue = [], [root]
    while queue:
        queue += (below := children.get(queue.pop(), []))
        found += below
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
