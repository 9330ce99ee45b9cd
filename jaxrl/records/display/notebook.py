"""The plot of a run in a notebook: it grows in place, with one line of what goes on below it."""

import html
import io
import time
from collections.abc import Callable
from typing import Any, Self

from IPython.display import HTML, Image, display

from jaxrl import activity
from jaxrl.records.display.course import Course
from jaxrl.records.display.plain import Ticking

DRAWN = {  # curves of a picture, by its title
    "reward": ("reward", "eval"),
    "loss": ("loss", "eval"),
    "KL": ("KL",),
    "entropy": ("entropy",),
    "length": ("length",),
}
DRAW_SECONDS = 4.0  # between pictures, at least: one takes 0.1 s


class Notebook(Ticking):
    """Keep a plot and a line in the output of the cell, and change them in place."""

    level = activity.TIDY
    takes_every_sample = True

    def __init__(self, course: Course, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(course)
        self.clock, self.ended = clock, ""
        self._line, self._sample, self._drawn = "", "", -DRAW_SECONDS

    def __enter__(self) -> Self:
        self._started = self.clock()
        self._plot: Any = display(HTML(""), display_id=True)
        self._status: Any = display(HTML(""), display_id=True)
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        super().__exit__(kind, *error)
        self.ended = self.course.ending(kind, self.clock() - self._started)
        self.tick()
        self._draw()

    def card(self, whole: str, folded: Callable[[int], str]) -> None:
        """Print the folded card."""
        activity.say(folded(100))

    def sample(self, text: str) -> None:
        """Keep a trajectory of the last step below the plot."""
        self._sample = text

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """Draw the curves anew where the last time is some seconds ago."""
        super().stepped(step, metrics)
        if self.clock() - self._drawn >= DRAW_SECONDS:
            self._draw()

    def tick(self) -> None:
        """Say what goes on."""
        parts = [*self.course.standing(), activity.described(activity.going_on())]
        line = self.ended or "; ".join(filter(None, parts))
        if (text := f"{line}\n{self._sample}") != self._line:
            self._line = text
            self._status.update(HTML(f"<pre>{html.escape(text)}</pre>"))

    def _draw(self) -> None:
        """Draw the curves anew; where that fails, the last picture stays and the run goes on."""
        try:
            self._draw_curves()
        except Exception as error:
            activity.warn(f"the plot could not be drawn: {error}")

    def _draw_curves(self) -> None:
        """Draw the curves of all steps so far."""
        series = self.course.watched()
        titles = [title for title in DRAWN if len(series.get(title, ())) > 1]
        if not titles:
            return
        self._drawn = self.clock()
        from matplotlib.figure import Figure  # pyplot has state, and in a notebook a backend

        figure = Figure(figsize=(3.2 * len(titles), 2.4), layout="constrained")
        panes = figure.subplots(1, len(titles), squeeze=False)[0]
        for axes, title in zip(panes, titles, strict=True):
            for name in DRAWN[title]:
                if points := series.get(name):
                    marker = "o" if name == "eval" else ""
                    axes.plot(*zip(*points, strict=True), label=name, marker=marker)
            axes.set(title=title, xlabel="step")
            axes.grid(alpha=0.3)
            if len(axes.lines) > 1:
                axes.legend()
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=80)
        self._plot.update(Image(picture.getvalue(), format="png"))
