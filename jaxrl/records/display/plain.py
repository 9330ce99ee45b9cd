"""What a run shows where nobody watches: nothing, or the lines of a log."""

import threading
import time
from collections.abc import Callable
from typing import Any, Self

from jaxrl import activity, cli
from jaxrl.records.display.course import Course, number

STEP_SECONDS = 5.0  # between lines of steps, at least
STILL_SECONDS = 30.0  # after which a log that stands still says what goes on
_CONTROLS = [code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"]
_WRITTEN_OUT = {code: f"\\x{code:02x}" for code in _CONTROLS}


class Display:
    """Show nothing but warnings and alarms; other displays are made of this one.

    A context while the run goes on.

    Attributes:
        course: what is to be shown; the recorder keeps it up to date by `stepped`.
    """

    level = activity.QUIET
    takes_every_sample = False  # else as often as the config says

    def __init__(self, course: Course) -> None:
        self.course = course
        activity.show(self.level)

    def __enter__(self) -> Self:
        self._warnings = cli.plain_warnings()  # of scripts too: else they stand in the panel
        self._warnings.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End what is shown."""
        self._warnings.__exit__(None, None, None)

    def card(self, whole: str, folded: Callable[[int], str]) -> None:
        """Show what will be done: whole, or folded to so many columns."""

    def sample(self, text: str) -> None:
        """Show a trajectory of the last step."""
        activity.say(harmless(text))

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """Take the numbers of a step."""
        self.course.add(step, metrics)

    def alarm(self, text: str) -> None:
        """Show an alarm: in every display."""
        print(text, flush=True)


def harmless(text: str) -> str:
    """Write out control characters but line ends and tabs: models must not steer a terminal."""
    return text.translate(_WRITTEN_OUT)


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; one that is closed or None is not."""
    return not getattr(stream, "closed", stream is None) and stream.isatty()


class Ticking(Display):
    """Look from time to time what goes on, in a thread.

    Attributes:
        seconds: between two looks.
    """

    seconds = 1.0

    def __enter__(self) -> Self:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ticks, name="display", daemon=True)
        self._thread.start()
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        super().__exit__(kind, *error)

    def _ticks(self) -> None:
        while not self._ended.wait(self.seconds):
            self.tick()

    def tick(self) -> None:
        """Look what goes on."""
        raise NotImplementedError


class Plain(Ticking):
    """Print lines: of a step at most every few seconds, and what goes on where it takes long."""

    level = activity.FULL

    def __init__(self, course: Course, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(course)
        self.clock, self._line, self._shown = clock, clock() - STEP_SECONDS, -1
        self._turn = threading.Lock()  # a line at a time

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        super().__exit__(kind, *error)
        if self._shown != self.course.step and self.course.series:
            self._print(self.step_line())

    def card(self, whole: str, folded: Callable[[int], str]) -> None:
        """Print the whole card: a log is where one looks later."""
        print(whole, flush=True)

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """Print the line of a step where the last one is some seconds ago."""
        super().stepped(step, metrics)
        if self.course.watched() and self.clock() - self._line >= STEP_SECONDS:
            self._print(self.step_line())

    def tick(self) -> None:
        """Print what goes on, if for long nothing was printed."""
        going_on = activity.going_on()
        if going_on and self.clock() - self._line >= STILL_SECONDS:
            at = f"after step {self.course.step} of {self.course.total}: " * bool(self.course.total)
            self._print(f"{at}{activity.described(going_on)}")

    def step_line(self) -> str:
        """Return "step 12 of 240: reward 0.43, entropy 3.85; 0.52 s/step, 1:58 left"."""
        course = self.course
        self._shown = course.step
        numbers = ", ".join(f"{name} {number(at[-1][1])}" for name, at in course.watched().items())
        standing, *pace = course.standing()
        return "; ".join((f"{standing}: {numbers}", *([", ".join(pace)] if pace else ())))

    def _print(self, line: str) -> None:
        with self._turn:
            print(line, flush=True)
            self._line = self.clock()
