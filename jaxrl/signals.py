"""What SIGTERM and Ctrl-C do while a run goes on: it ends with the step that is being done.

A handler only sets a flag and says so. Whoever runs the steps looks at the flag where the processes
of a job meet anyway, writes a checkpoint, and raises `Ended` once all is closed. A second signal
does what it did before the run took it, and so does the first before the first step has begun.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

# In which SIGTERMs are one: systemd and Slurm send theirs to the launcher, which passes it on, and
# to its processes. Who presses Ctrl-C twice means it.
SAME_SECONDS = 5.0
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_replaceable: list[Any] = [signal.SIG_DFL, signal.default_int_handler]  # by `Ending`


class Ended(BaseException):
    """Say that a signal has ended a run after a step, in all processes of its job.

    Attributes:
        status: that of the command at its end, 128 and the number of the signal.
    """

    status: int


class Interrupted(Ended, KeyboardInterrupt):
    """Say that Ctrl-C has; a `KeyboardInterrupt`, as everywhere."""

    status = 128 + signal.SIGINT


class Terminated(Ended, SystemExit):
    """Say that SIGTERM has: a script that does not catch it ends with its status."""

    status = code = 128 + signal.SIGTERM


class Ending:
    """Have a signal ask for the end of the run that goes on in this context.

    In the main thread alone, and a signal for which the program has a handler of its own is left to
    that one. At the end of the context the handlers are what they were.

    Args:
        first: step that begins.
        total: the last one of the run.
        saves: a checkpoint is written then.
    """

    def __init__(self, first: int, total: int, *, saves: bool) -> None:
        self._number: int | None = None  # of the signal that came
        self._since = 0.0
        self._last, self._total = first, total  # the step after which it ends, at most
        self._how = "with a checkpoint" if saves else "without one (trainer.ckpt_interval=-1)"
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _NAMES:
                if _is_replaceable(signal.getsignal(number)):
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._take:
                signal.signal(number, handler)
        self._before = {}

    def asked_by(self, step: int) -> int | None:
        """Return the number of the signal that came until now, near the end of a step, if any."""
        self._last = min(step + 1, self._total)  # for one that comes from here on
        return self._number

    def leave(self, step: int, number: int | None) -> None:
        """Raise `Ended` if a signal came, to this process or, as `number` says, to another one."""
        if number := number or self._number:
            kind = Interrupted if number == signal.SIGINT else Terminated
            raise kind(f"{_NAMES[signal.Signals(number)]}: ended after step {step}")

    def _take(self, number: int, frame: object) -> None:
        forked = os.getpid() != self._process  # a child inherits the handler, and has no run
        if self._number is None and not forked:
            self._number, self._since = number, time.monotonic()
            name = _NAMES[signal.Signals(number)]
            line = f"{name}: ends after step {self._last} {self._how}; once more ends it at once\n"
            with contextlib.suppress(OSError):  # no `print`: it may have been interrupted itself
                os.write(2, line.encode())
            return
        again = number == self._number == signal.SIGTERM
        if forked or not again or time.monotonic() - self._since > SAME_SECONDS:
            self.__exit__()
            signal.raise_signal(number)


def _is_replaceable(handler: Any) -> bool:
    """Return whether a handler is the system's, Python's or jaxrl's own; or Ray's, which exits."""
    return handler in _replaceable or (getattr(handler, "__module__", "") or "").startswith("ray.")


@contextlib.contextmanager
def before_sigterm(leave: Callable[[], None]) -> Iterator[None]:
    """Call a function before SIGTERM ends the process, unless something else takes that signal.

    As every handler in Python it runs between two lines: a compilation is waited for.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    ours = os.getpid()  # a forked child has the handler, too, and the terminal is not its own

    def end(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):
            if os.getpid() == ours:
                leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    _replaceable.append(end)
    try:
        yield
    finally:
        _replaceable.remove(end)
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
