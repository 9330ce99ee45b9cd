"""Supervise a job: all its processes run, or all are ended and started again.

A process that died ends the attempt, for the others cannot go on without it; so does one that says
that the job stands still (`parallel.watchdog`). The next one goes on from the newest checkpoint.
What a user must mend is not tried again. A signal to the launcher ends the job; one that a process
gets alone, as of a host that is preempted, ends the attempt.
"""

import contextlib
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from jaxrl.cli import CRASHED, DONE, FAILED, INTERRUPTED, REFUSED, STALLED, TERMINATED
from jaxrl.cluster.host import Report
from jaxrl.files import as_path, missing_packages_named

FINAL = DONE, FAILED, REFUSED  # of a process; another attempt would end in the same way
LOST = -1  # status of a process whose host does not answer any more
POLL_SECONDS, MOST_BACKOFF_SECONDS = 1.0, 300.0
SETTLE_SECONDS = 3.0  # for others to say why, once one has ended
STEP_PREFIX = "global_step_"  # of jaxrl.records.checkpoint_folders
# What a process says of a job that stands still: `parallel.watchdog`, and faulthandler's timer.
STALL = re.compile(r"^(?:stalled: (?P<where>.*)|Timeout \(\d+:\d\d:\d\d.*)$", re.MULTILINE)
THREAD = re.compile(r"^(?:Current t|T)hread 0x.*\n(?P<innermost>.*)$", re.MULTILINE)


class HostLost(Exception):
    """Signal that a host went away before its processes were started."""


class Attempt(Protocol):
    """Hold all processes of a job, started once."""

    def poll(self, seconds: float) -> list[Report]:
        """Return news, after `seconds` at the latest; LOST is the status where a host is gone."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to all that are alive."""
        ...

    def stop(self) -> None:
        """Kill all that are alive, return when they are dead."""
        ...


def newest_step(folder: str) -> int:
    """Return the newest step of the checkpoints in a folder, local or in a bucket; 0 if none."""
    path = as_path("trainer.ckpt_path", folder)
    with missing_packages_named("trainer.ckpt_path", folder):
        if not path.exists():
            return 0
        numbers = [p.name.removeprefix(STEP_PREFIX) for p in path.glob(f"{STEP_PREFIX}*")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


@dataclass
class Restarts:
    """Decide how often, how late and from where a job is started again.

    Attributes:
        most: restarts in a row without a new checkpoint.
        backoff_seconds: before the first of them; it doubles.
        newest: step of the newest checkpoint.
        resume_mode: what the user asked for.
    """

    most: int
    backoff_seconds: float
    newest: Callable[[], int]
    resume_mode: str | None
    in_a_row: int = 0
    _at_first: int = field(init=False)
    _at_last: int = field(init=False)

    def __post_init__(self) -> None:
        self._at_first = self._at_last = self.newest()

    def next(self) -> float | None:
        """Return the seconds until the next attempt, or None: give up."""
        with contextlib.suppress(OSError):  # a bucket or file system that is away for a moment
            reached = self.newest()
            if reached > self._at_last:
                self.in_a_row = 0
            self._at_last = reached
        if self.in_a_row >= self.most:
            return None
        self.in_a_row += 1
        return min(self.backoff_seconds * 2 ** (self.in_a_row - 1), MOST_BACKOFF_SECONDS)

    def mode(self) -> str | None:
        """Return the resume_mode to try next: "latest" once this job has a checkpoint of its own.

        Before that the first attempt's: "from_path" is read again, and with "none" a folder of
        another run is still refused.
        """
        return "latest" if self._at_last > self._at_first else self.resume_mode

    def described(self) -> str:
        """Say which restart it is, and from where."""
        start = f"after step {self._at_last}" if self._at_last else "from the beginning"
        return f"restart {self.in_a_row} of {self.most} in a row, {start}"


class Console:
    """Print what processes print: the first's as it comes, lines of the others with their names.

    A line that was already shown is shown once: all processes say the same of a wrong config.

    Attributes:
        stacks: what processes of a job that stands still say, which is not printed.
        asked: processes that were asked for them; what they say is that.
    """

    def __init__(self, labels: dict[int, str]) -> None:
        self._labels, self._rest = labels, dict.fromkeys(labels, "")
        self._shown: set[str] = set()
        self.stacks: dict[int, str] = {}
        self.asked: set[int] = set()

    def show(self, report: Report) -> None:
        """Print what is new; an unfinished line of another process waits for its end."""
        label, ended = self._labels[report.index], report.status is not None
        text = self._without_stacks(report.index, self._rest.pop(report.index, "") + report.text)
        lines = re.findall(r"[^\n]*\n|[^\n]+", text)
        if label and not ended and lines and not lines[-1].endswith("\n"):
            self._rest[report.index] = lines.pop()
        for line in lines:
            self._line(label, line)
        sys.stdout.flush()

    def _without_stacks(self, index: int, text: str) -> str:
        """Return what comes before the stacks of a process, and keep these."""
        if self.asked and index in self.stacks and index not in self.asked:  # it says it again
            return ""
        sign = STALL.search(text)
        begin = sign.start() if sign else len(text)
        if index in self.stacks or index in self.asked:
            begin = 0
        if begin == len(text):
            return text
        self.stacks[index] = self.stacks.get(index, "") + text[begin:]
        return text[:begin]

    def _line(self, label: str, line: str) -> None:
        plain = line.strip().rpartition("\r")[2]  # of a progress bar the last state
        if plain.startswith("[Gloo] "):  # of every connection, and of no use
            return
        known = plain in self._shown
        self._shown.add(plain)
        if not label and not (known and plain.startswith("error: ")):
            sys.stdout.write(line)
        elif label and plain and not known:
            print(f"{label} {plain}")


class Interrupted(Exception):
    """Signal that the launcher was asked to end; `args[0]` is the number of the signal."""


def supervise(
    start: Callable[[str | None], tuple[Attempt, dict[int, str]]], restarts: Restarts
) -> int:
    """Run a job to its end; return its exit status.

    Args:
        start: given a resume_mode, starts all processes; with a label for the lines of each, ""
            for none.
    """
    with _signals():
        while True:
            try:
                status, why = _attempt(start, restarts.mode())
            except Interrupted as interrupt:
                return 128 + interrupt.args[0]
            if status in FINAL:
                return _say(why, status) if why else status
            seconds = restarts.next()
            if seconds is None:
                again = f"after {restarts.in_a_row} restarts in a row without a new checkpoint"
                return _say(f"{why}; gave up {again} (trainer.cluster.max_restarts)", CRASHED)
            _say(f"{why}; {restarts.described()}, in {seconds:g} s")
            try:
                time.sleep(seconds)
            except Interrupted as interrupt:
                return 128 + interrupt.args[0]


def _attempt(
    start: Callable[[str | None], tuple[Attempt, dict[int, str]]], mode: str | None
) -> tuple[int, str]:
    """Run an attempt; return the status of the job, and why it ended."""
    try:
        attempt, labels = start(mode)
    except HostLost as error:
        return CRASHED, str(error)
    console = Console(labels)
    running = set(labels)
    try:
        return _outcome(_decisive(attempt, console, running))
    except Interrupted as interrupt:
        name = signal.Signals(interrupt.args[0]).name
        _say(f"{name}: passed on to all processes, waiting for their end; once more kills them")
        _end_gently(attempt, console, running, interrupt.args[0])
        raise
    finally:
        attempt.stop()


def _decisive(attempt: Attempt, console: Console, running: set[int]) -> Report | None:
    """Wait for the report that ends the attempt and return it, None if all ended well.

    That of the first, unless another process says why: what the user must mend makes others crash.
    Where the job stands still its status is STALLED, and its text says where.
    """
    failed: list[Report] = []
    deadline = math.inf
    while running and time.monotonic() < deadline:
        news = _news(attempt, console, running)
        if console.stacks:
            return _stalled(attempt, console, running)
        failed += [report for report in news if report.status not in (None, DONE)]
        if any(report.status in FINAL for report in failed):
            break
        if failed:
            deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
    final = [report for report in failed if report.status in FINAL]
    return next(iter(final + failed), None)


def _stalled(attempt: Attempt, console: Console, running: set[int]) -> Report:
    """Wait for the stacks of all processes, and print them.

    One that holds the interpreter's lock cannot say by itself where it is: it is asked.
    """
    _settle(attempt, console, running)  # whole: other launchers' processes end with these
    if silent := running - set(console.stacks):
        console.asked = silent
        attempt.signal(signal.SIGUSR1)
        _settle(attempt, console, running)
    for index, text in sorted(console.stacks.items()):
        _say(f"the stacks of process {index}:\n{text.rstrip()}")
    return Report(min(console.stacks), _where(console.stacks, silent), STALLED)


def _settle(attempt: Attempt, console: Console, running: set[int]) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while running and time.monotonic() < deadline:
        _news(attempt, console, running)


def _where(stacks: dict[int, str], silent: set[int]) -> str:
    """Say in which process the job stands still, and where that is."""
    found = {index: STALL.search(text) for index, text in sorted(stacks.items())}
    said = {index: sign["where"] for index, sign in found.items() if sign and sign["where"]}
    if unable := [index for index in sorted({*stacks, *silent}) if index not in said]:
        odd = f"process {unable[0]} holds the lock of its interpreter, or does not run"
    elif busy := [index for index in said if not _waits_for_others(stacks[index])]:
        return f"the job stands still: {said[busy[0]]}"
    else:
        odd = "every process waits for its devices"
    return f"the job stands still: {'; '.join([odd, *list(said.values())[:1]])}"


def _waits_for_others(stacks: str) -> bool:
    """Return whether the main thread, the last of the stacks, waits for devices, in JAX."""
    innermost = [thread["innermost"] for thread in THREAD.finditer(stacks)]
    return bool(innermost) and "/jax/" in innermost[-1]


def _news(attempt: Attempt, console: Console, running: set[int]) -> list[Report]:
    """Show and return what news there is; processes that ended run no more."""
    with _whole():
        reports = attempt.poll(POLL_SECONDS)
        for report in reports:
            console.show(report)
            if report.status is not None:
                running.discard(report.index)
    return reports


def _outcome(first: Report | None) -> tuple[int, str]:
    if first is None:
        return DONE, ""
    assert first.status is not None
    if first.status == STALLED and first.text:
        return STALLED, first.text
    ended = f"ended with status {first.status}"
    if first.status == LOST:
        ended = "was lost with its host"
    elif first.status in (INTERRUPTED, TERMINATED):
        ended = f"was ended by {signal.Signals(first.status - 128).name}"
    elif first.status > 128 or first.status < 0:
        ended = f"was killed by signal {first.status - 128 if first.status > 0 else -first.status}"
    return first.status, f"process {first.index} {ended}"


def _end_gently(attempt: Attempt, console: Console, running: set[int], number: int) -> None:
    """Let the processes end by themselves, after the step that they do, however long it takes.

    After a second signal the rest is killed, and so it is once one of them fails or stands still.
    """
    with contextlib.suppress(Interrupted):
        attempt.signal(number)
        _decisive(attempt, console, running)


_late: list[list[int]] = []  # signals that came in the `_whole` blocks that run


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """Raise `Interrupted` at the end of the block for a signal that comes while it runs.

    In the midst of `Popen.poll` it would leave the lock of that process held, for which whoever
    ends the process waits for ever.
    """
    received: list[int] = []
    _late.append(received)
    try:
        yield
    finally:
        _late.remove(received)
    if received:
        raise Interrupted(received[0])


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Raise `Interrupted` for SIGINT and SIGTERM while the block runs; see `_whole`."""

    def interrupt(number: int, _: object) -> None:
        if _late:
            _late[-1].append(number)
        else:
            raise Interrupted(number)

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str, status: int = DONE) -> int:
    print(f"launch: {text}", file=sys.stderr, flush=True)
    return status
