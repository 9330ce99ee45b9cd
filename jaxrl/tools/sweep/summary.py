"""Summaries of a sweep: means with bootstrap intervals as a table, and as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxrl.files import replaced
from jaxrl.tools.sweep.units import Outcome

RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """Hold a mean over seeds, and the interval that holds 95 % of the means of resampled seeds."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Summary:
    """Hold what is known of a method.

    Attributes:
        lr: that its runs had.
        tuned: mean score of the tuning seeds at each learning rate, by it; {} = not tuned.
        score: mean reward of the last fifth of the steps; None = every run failed.
        evaluation: of the last evaluations; None = there was none.
        outcomes: of its runs.
    """

    method: str
    lr: float
    tuned: Mapping[float, float]
    score: Interval | None
    evaluation: Interval | None
    outcomes: Sequence[Outcome]

    @property
    def failures(self) -> list[str]:
        """Return the runs that failed, and why."""
        return [f"seed {x.seed}: {x.error}" for x in self.outcomes if x.error]


def bootstrap(values: Sequence[float]) -> Interval:
    """Return the mean of values and its percentile bootstrap interval, 95 %.

    Efron, 1979, https://doi.org/10.1214/aos/1176344552. Drawn with a fixed seed: the same values
    have the same interval. Of few values it is too narrow, as percentiles of them are.
    """
    x = np.asarray(values, np.float64)
    drawn = np.random.default_rng(0).integers(len(x), size=(RESAMPLES, len(x)))
    low, high = np.percentile(x[drawn].mean(1), [2.5, 97.5])
    return Interval(float(x.mean()), float(low), float(high))


def best_lr(outcomes: Sequence[Outcome]) -> tuple[float, dict[float, float]]:
    """Return the learning rate with the best mean score, and the means by learning rate.

    A run that failed has the score of a run that earns nothing, 0: what diverges is not chosen. Of
    equal means the smallest rate is.
    """
    scores: dict[float, list[float]] = {}
    for x in outcomes:
        scores.setdefault(x.lr, []).append(0.0 if x.score is None else x.score)
    means = {lr: float(np.mean(values)) for lr, values in sorted(scores.items())}
    return max(means, key=lambda lr: means[lr]), means


def summary(method: str, outcomes: Sequence[Outcome], tuned: Mapping[float, float]) -> Summary:
    """Return what the runs of a method show."""
    scores = [x.score for x in outcomes if x.score is not None]
    evaluations = [x.evaluation for x in outcomes if x.score is not None]
    known = [x for x in evaluations if x is not None]
    return Summary(
        method,
        outcomes[0].lr,
        dict(tuned),
        bootstrap(scores) if scores else None,
        bootstrap(known) if known else None,
        outcomes,
    )


def table(summaries: Sequence[Summary]) -> str:
    """Return the methods as a Markdown table, the best mean score first."""
    lines = [
        "| method | lr | runs | reward of the last fifth, 95 % | evaluation, 95 % | failed |",
        "|---|---|---|---|---|---|",
    ]
    for x in ranked(summaries):
        failed = "; ".join(x.failures).replace("|", "/")
        runs, score, evaluation = len(x.outcomes), x.score or "", x.evaluation or ""
        lines.append(f"| `{x.method}` | {x.lr:g} | {runs} | {score} | {evaluation} | {failed} |")
    return "\n".join(lines)


def ranked(summaries: Sequence[Summary]) -> list[Summary]:
    """Return the methods by mean score, the best first, the failed last, equal ones by name."""
    return sorted(
        summaries, key=lambda x: (x.score is None, -(x.score.mean if x.score else 0.0), x.method)
    )


def picture(summaries: Sequence[Summary], path: Path, title: str) -> None:
    """Draw the scores of all runs, with means and intervals, and the mean curves of the methods."""
    from matplotlib.figure import Figure  # pyplot has state, and in a notebook a backend

    shown = [x for x in ranked(summaries) if x.score is not None]
    figure = Figure(figsize=(13, 1.5 + 0.28 * max(len(shown), 8)))
    scores, curves = figure.subplots(1, 2, width_ratios=[1.2, 1])
    for place, x in enumerate(shown):
        assert x.score is not None
        color = f"C{place % 10}"
        scores.plot([x.score.low, x.score.high], [place, place], color=color, lw=2)
        scores.plot(x.score.mean, place, "o", color=color)
        own = [o.score for o in x.outcomes if o.score is not None]
        scores.plot(own, [place] * len(own), "|", color="0.4", ms=7)
        steps = min(len(o.rewards) for o in x.outcomes if o.score is not None)
        mean = np.mean([o.rewards[:steps] for o in x.outcomes if o.score is not None], axis=0)
        curves.plot(np.arange(1, steps + 1), mean, color=color, lw=1)
    scores.set_yticks(range(len(shown)), [f"{x.method}, lr {x.lr:g}" for x in shown], fontsize=7)
    scores.invert_yaxis()
    scores.set_xlabel("reward of the last fifth of the steps: runs, mean, 95 %")
    curves.set_xlabel("step")
    curves.set_ylabel("mean reward")
    scores.set_title(title.replace("$", r"\$"), fontsize=9)
    with replaced(path) as new:
        figure.savefig(new, dpi=130, bbox_inches="tight", format=path.suffix[1:])
