"""What this process is doing, and what it has to say; `records.display` shows it.

Any layer may tell: nothing here knows who shows it. Without a display, what is said is printed, and
nobody looks at what is being done, but `parallel.watchdog`, whether anything is.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

# How much is printed: warnings alone, what a person at a terminal wants, all that a log wants.
QUIET, TIDY, FULL = range(3)
_printed = SimpleNamespace(level=FULL)
_going_on: dict[int, "Activity"] = {}
_place = SimpleNamespace(step=0, phases=[], count=0, known=set())


@dataclass
class Activity:
    """Count what is done of something that takes long; whoever does it sets the fields.

    Attributes:
        what: "rollouts"; activities of one name that go on at a time are shown as one.
        done, total: 130 of 512; a total of 0 is not known.
        detail: the part of it that is being done.
        waiting: of those not done, how many wait for their reward.
        since: when it began, `time.monotonic`.
    """

    what: str
    total: int = 0
    done: int = 0
    detail: str = ""
    waiting: int = 0
    since: float = field(default_factory=time.monotonic)

    def next(self, detail: str) -> None:
        """Begin the next part; it counts from here on: "7 of 18" is that the seventh goes on."""
        self.detail, self.done = detail, self.done + 1


@contextlib.contextmanager
def doing(what: str, total: int = 0) -> Iterator[Activity]:
    """Tell that something goes on while the block runs."""
    activity = Activity(what, total)
    _going_on[id(activity)] = activity
    try:
        yield activity
    finally:
        del _going_on[id(activity)]


def going_on() -> list[Activity]:
    """Return what goes on now, the outermost first, as one per name."""
    merged: dict[str, Activity] = {}
    for one in list(_going_on.values()):
        same = merged.setdefault(one.what, Activity(one.what, since=one.since))
        same.total, same.done = same.total + one.total, same.done + one.done
        same.detail, same.waiting = one.detail, same.waiting + one.waiting
    return list(merged.values())


def described(activities: list[Activity]) -> str:
    """Say what goes on: "compiling update 256 x 12, 7 of 18"."""
    texts = []
    for one in activities:
        count = f"{one.done} of {one.total}" if one.total else ""
        name = f"{one.what} {one.detail}" if one.detail else one.what
        texts.append(f"{name}, {count}" if one.detail and count else f"{name} {count}".strip())
        if one.waiting:
            texts.append(f"rewards: {one.waiting} waiting")
    return "; ".join(texts)


# ---------------------------------------------------------------- where a run is


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Tell that a phase of a step goes on while the block runs."""
    _place.phases.append(name)
    progressed()
    try:
        yield
    finally:
        _place.phases.remove(name)
        _place.known.add(name)
        progressed()


def begin_step(step: int) -> None:
    """Tell that a step begins."""
    if _place.step:
        _place.known.add("")
    _place.step = step
    progressed()


def progressed() -> None:
    """Tell that something was done that no phase and no activity shows."""
    _place.count += 1


def place() -> str:
    """Say where the run is: "generate of step 3", the innermost phase."""
    name = kind() or "between phases"
    return f"{name} of step {_place.step}" if _place.step else name


def kind() -> str:
    """Return the name of the innermost phase; "" between phases."""
    return _place.phases[-1] if _place.phases else ""


def is_known(phase_name: str) -> bool:
    """Return whether such a phase has ended before, or, of "", a step."""
    return phase_name in _place.known


def progress() -> tuple[object, ...]:
    """Return what is another value whenever something was done."""
    goes_on = [(id(x), x.done, x.waiting, x.detail) for x in list(_going_on.values())]
    return _place.count, *goes_on


# ---------------------------------------------------------------- what is said


def show(level: int) -> None:
    """Print from now on what QUIET, TIDY or FULL stands for."""
    _printed.level = level


def say(text: str) -> None:
    """Print a message of use to whoever watches."""
    if _printed.level >= TIDY:
        print(text, flush=True)


def detail(text: str) -> None:
    """Print what only a log is for."""
    if _printed.level >= FULL:
        print(text, flush=True)


def warn(text: str) -> None:
    """Print what is wrong, or may be."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
