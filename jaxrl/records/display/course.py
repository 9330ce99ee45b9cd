"""How far a run is: the numbers that people watch, its pace, the time that is left."""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxrl.records.curve import Curve

# What people watch, and the metrics it is, the first that a run has; those of `jaxrl.sft` are last.
WATCHED = {
    "reward": ("reward/avg_raw_reward",),
    "eval": ("eval/all/avg_score", "eval/loss"),
    "loss": ("train/loss",),
    "KL": ("policy/policy_kl", "loss/avg_kl"),
    "entropy": ("policy/policy_entropy", "train/entropy"),
    "length": ("generate/avg_num_tokens",),
    "tok/s/device": (
        "trainer/tokens_per_second_per_gpu",
        "train/tokens_per_second_per_gpu",
    ),
}
TERMS = 4  # of a reward that has several, at most: there is little room
_TERM = re.compile(r"reward/(.+)/mean")
RECENT = 20  # steps that the pace is of


@dataclass
class Course:
    """Hold how far a run is.

    Attributes:
        name: of the run.
        total: steps; 0 for what has none, as an evaluation by itself.
        step: the last one that is done.
        series: what is watched, over the steps.
        terms: the same of the first reward terms, by name; see `terms_watched`.
        paces: seconds of the last steps that compiled nothing.
        beside: seconds before these, for evaluations and checkpoints, and of how many steps.
    """

    name: str
    total: int = 0
    step: int = 0
    series: dict[str, Curve] = field(default_factory=dict)
    terms: dict[str, Curve] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    paces: list[float] = field(default_factory=list)
    beside: tuple[float, int] = (0.0, 0)
    _line: float | None = None  # when the last step was recorded

    def begin(self, finished: int, total: int) -> None:
        """Begin after `finished` of `total` steps."""
        self.step, self.total = finished, total

    def read(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take what is watched from the numbers of a step, of an earlier start of the run, too."""
        for label, names in WATCHED.items():
            found = next((metrics[name] for name in names if name in metrics), None)
            if found is not None:
                _extend(self.series, label, step, float(found))
        for name, value in metrics.items():
            if term := _TERM.fullmatch(name):
                _extend(self.terms, term[1], step, float(value))

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of a step that has just been done."""
        self.read(step, metrics)
        now, self.step = self.clock(), step
        if (seconds := metrics.get("timing/step")) is not None:  # else an evaluation before all
            # One that compiled says nothing of the others: the first counts the warm-up before it.
            if not metrics.get("compile/seconds"):
                self.paces = [*self.paces, seconds][-RECENT:]
                if self._line is not None:
                    spent, steps = self.beside
                    self.beside = spent + max(now - self._line - seconds, 0.0), steps + 1
            self._line = now

    @property
    def pace(self) -> float | None:
        """Return the seconds of a step that compiles nothing, without what is between steps."""
        return sum(self.paces) / len(self.paces) if self.paces else None

    @property
    def left(self) -> float | None:
        """Return the seconds until the end, with the evaluations and checkpoints between steps."""
        if self.pace is None:
            return None
        spent, steps = self.beside
        return (self.total - self.step) * (self.pace + spent / max(steps, 1))

    def standing(self) -> list[str]:
        """Say how far the run is: "step 12 of 240", "0.52 s/step", "1:58 left"."""
        texts = [f"step {self.step} of {self.total}"] if self.total else []
        if self.pace is not None:
            texts.append(per_step(self.pace))
        if self.left is not None and self.step < self.total:
            texts.append(f"{clock_time(self.left)} left")
        return texts

    def ending(self, error: type[BaseException] | None, seconds: float) -> str:
        """Say how the run ended: "ended after 2:05, at step 240 of 240"."""
        how = "interrupted" if error is KeyboardInterrupt else "ended by an error"
        at = f", at step {self.step} of {self.total}" if self.total else ""
        return f"{how if error else 'ended'} after {clock_time(seconds)}{at}"

    def watched(self) -> dict[str, list[tuple[int, float]]]:
        """Return the points of what is watched and there, in the order of `WATCHED`."""
        return {label: self.series[label].points for label in WATCHED if label in self.series}

    def terms_watched(self) -> dict[str, list[tuple[int, float]]]:
        """Return the first few terms of a reward; none where it has but one, which it is then."""
        # another thread adds to it
        terms = [(name, curve.points) for name, curve in list(self.terms.items())]
        return dict(terms[:TERMS]) if len(terms) > 1 else {}


def _extend(series: dict[str, Curve], label: str, step: int, value: float) -> None:
    curve = series.get(label, Curve())
    curve.add(step, value)
    series[label] = curve  # not before it has a point: another thread draws it


def number(value: float) -> str:
    """Write a number in at most seven characters: 0.0123, 3.85, 4,312, 1.2e+06."""
    if not math.isfinite(value) or abs(value) >= 99_999.5:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def clock_time(seconds: float) -> str:
    """Write seconds as a clock does: 0:07, 12:30, 3:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def per_step(seconds: float) -> str:
    """Write the pace of a run: "0.52 s/step"."""
    return f"{seconds:.2f} s/step" if seconds < 10 else f"{seconds:,.0f} s/step"
