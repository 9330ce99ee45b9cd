"""The panel of a run on a terminal."""

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel as Box
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxrl import activity
from jaxrl.records.display.course import Course, clock_time, number
from jaxrl.records.display.plain import Display, harmless, is_terminal
from jaxrl.signals import before_sigterm

BLOCKS = "▁▂▃▄▅▆▇█"
ALARMS = 3  # that stay in the panel
LABEL = 20  # columns of the name of a curve: those of rewards are the user's
WIDEST = 110  # columns: beyond them a curve is hard to follow
KEYS = "s: a sample, Ctrl-C: stop"


class Sparkline:
    """Draw a curve of one line, as wide as there is room; a column is the mean of its steps."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it, if the terminal has the characters."""
        width = 0 if options.ascii_only else options.max_width
        yield Text(drawn(self.values, width), style="cyan", no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Take the room that others leave."""
        return Measurement(0, options.max_width)


def drawn(values: list[float], width: int) -> str:
    """Return a curve in at most `width` characters; its lowest value is the lowest block."""
    given = np.asarray(values, float)
    finite = np.isfinite(given)
    if width < 1 or not finite.any():
        return ""
    halves = np.where(finite, given, given[finite].min()) / 2  # a float may not hold high - low
    heights = halves - halves.min()
    heights = (len(BLOCKS) - 1) * (heights / (heights.max() or 1.0))
    columns = min(width, len(values))
    starts = np.arange(columns) * len(values) // columns
    sums = np.add.reduceat(heights, starts).tolist()
    counts = np.add.reduceat(finite.astype(int), starts).tolist()
    return "".join(BLOCKS[round(x / n)] if n else " " for x, n in zip(sums, counts, strict=True))


class Panel(Display):
    """Keep one panel at the end of the terminal; what is printed meanwhile stands above it."""

    level = activity.TIDY
    takes_every_sample = True

    def __init__(
        self,
        course: Course,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(course)
        if console is None:  # what rewards print is shown as it is: "[/INST]" is no markup
            console = Console(markup=False, emoji=False, highlight=False)
        self.console = console
        self.clock, self.ended, self._started = clock, "", clock()
        self._alarms: list[str] = []
        self._box = Box("")
        self._sample = Text("there is no sample yet: they come with the first step")

    def __enter__(self) -> Self:
        self._started = self.clock()
        self._live = Live(
            console=self.console,
            get_renderable=self.panel,
            refresh_per_second=2,
            redirect_stderr=is_terminal(sys.stderr),  # else it is a log
            vertical_overflow="crop",
        )
        self._keys = Keys({"s": lambda: self.console.print(self._sample)})
        self._live.start(refresh=True)
        try:
            self._keys.__enter__()
        except BaseException:
            self._live.stop()
            raise
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.ended = self.course.ending(kind, self.clock() - self._started)
        try:
            self._keys.__exit__()
        finally:
            self._stop()
            super().__exit__(kind, *error)

    def _stop(self) -> None:
        """Draw the panel for the last time; a terminal that is gone is no error of the run."""
        try:
            self._live.stop()
        except Exception as error:
            with contextlib.suppress(OSError, ValueError):  # stderr may be gone with it
                activity.warn(f"the panel could not be ended: {error}")

    def card(self, whole: str, folded: Callable[[int], str]) -> None:
        """Print the folded card above the panel."""
        self.console.print(Text(folded(self.console.width)))

    def sample(self, text: str) -> None:
        """Keep a trajectory of the last step until somebody asks for it."""
        self._sample = Text(harmless(text))
        self._sample.highlight_regex(r"(?m)^given \|.*$", "dim")

    def alarm(self, text: str) -> None:
        """Print an alarm above the panel, and keep its first words in it."""
        self.console.print(Text(text, style="bold red"))
        self._alarms = [*self._alarms, text.partition(". Try")[0]][-ALARMS:]

    # ---------------------------------------------------------------- how it looks

    def panel(self) -> Box:
        """Return the panel as it is now, or as it last could be drawn: no error ends a run here."""
        with contextlib.suppress(Exception):
            self._box = self._drawn()
        return self._box

    def _drawn(self) -> Box:
        course, going_on = self.course, activity.going_on()
        rows: list[Any] = [self._bar(going_on), self._numbers()]
        rows += [Text(text, style="bold red") for text in self._alarms]
        rows.append(self._now(going_on))
        return Box(
            Group(*rows),
            title=Text(course.name, style="bold"),
            title_align="left",
            subtitle=None if self.ended else Text(KEYS, style="dim"),
            subtitle_align="right",
            box=box.ROUNDED,
            width=min(self.console.width, WIDEST),
        )

    def _bar(self, going_on: list[activity.Activity]) -> Table:
        course = self.course
        done, total = course.step, course.total
        if not total:  # no steps: the outermost of what goes on
            counted = next((one for one in going_on if one.total), activity.Activity(""))
            done, total = counted.done, counted.total
        grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
        grid.add_column(ratio=1, min_width=4)
        grid.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total or 1, done, complete_style="cyan", finished_style="green")
        grid.add_row(bar, Text(", ".join(course.standing())))
        return grid

    def _numbers(self) -> Table:
        grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, justify="right", min_width=7)
        grid.add_column(ratio=1, no_wrap=True)
        for label, points in self.course.watched().items():
            grid.add_row(*_row(label, points, "bold"))
            if label == "reward":
                for name, of_term in self.course.terms_watched().items():
                    grid.add_row(*_row(f"  {name}", of_term, ""))
        return grid

    def _now(self, going_on: list[activity.Activity]) -> Table:
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        grid.add_column(no_wrap=True, justify="right")
        if self.ended:
            grid.add_row(Text(self.ended), "")
        else:
            since = going_on[-1].since if going_on else self._started
            grid.add_row(
                Text(activity.described(going_on), style="green"),
                Text(clock_time(max(time.monotonic() - since, 0)), style="dim"),
            )
        return grid


def _row(label: str, points: list[tuple[int, float]], style: str) -> tuple[Text, Text, Sparkline]:
    values, shown = [value for _, value in points], Text(label)
    shown.truncate(LABEL, overflow="ellipsis")
    return shown, Text(number(values[-1]), style=style), Sparkline(values)


class Keys:
    """Call what a key stands for while the block runs; without a terminal there are no keys.

    Args:
        actions: by key.
    """

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self.actions = actions
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._reading())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        if sys.platform == "win32" or not is_terminal(sys.stdin):
            yield
            return
        import termios  # not on Windows
        import tty

        terminal = sys.stdin.fileno()
        if not _in_foreground(terminal):  # the shell's: a job that changes it is stopped
            yield
            return
        before = termios.tcgetattr(terminal)

        def restore() -> None:
            if _in_foreground(terminal):
                termios.tcsetattr(terminal, termios.TCSANOW, before)

        def leave() -> None:
            restore()
            os.write(terminal, b"\x1b[?25h\n")  # the cursor, which the panel hides

        try:
            tty.setcbreak(terminal, termios.TCSANOW)
            with before_sigterm(leave), self._listening(terminal):
                yield
        finally:
            restore()

    @contextlib.contextmanager
    def _listening(self, terminal: int) -> Iterator[None]:
        end, ended = os.pipe()
        thread = threading.Thread(target=self._read, args=(terminal, end), daemon=True)
        thread.start()
        try:
            yield
        finally:
            os.close(ended)  # wakes the thread
            thread.join()
            os.close(end)

    def _read(self, terminal: int, end: int) -> None:
        while True:
            ready, _, _ = select.select([terminal, end], [], [])
            if end in ready:
                return
            if not _in_foreground(terminal):
                time.sleep(1)
                continue
            key = os.read(terminal, 1).decode(errors="ignore")
            if not key:
                return
            if action := self.actions.get(key):
                action()


def _in_foreground(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
