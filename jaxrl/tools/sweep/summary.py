"""Summaries of a sweep: means, intervals and comparisons as a table, and as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxrl.files import replaced
from jaxrl.tools.sweep.comparisons import against_first
from jaxrl.tools.sweep.units import Outcome
from jaxrl.training.eval_metrics import interval


@dataclass(frozen=True)
class Interval:
    """Hold a mean over seeds, and the ends of its 95 % interval; of one seed there are none."""

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        ends = "" if self.low is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.mean:.3f}{ends}"


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
    def scores(self) -> list[float]:
        """Return those of the runs that did not fail."""
        return [x.score for x in self.outcomes if x.score is not None]

    @property
    def failures(self) -> list[str]:
        """Return the runs that failed, and why."""
        return [f"seed {x.seed}: {x.error}" for x in self.outcomes if x.error]


def over_seeds(values: Sequence[float]) -> Interval:
    """Return the mean of values and Student's interval around it, as evaluations have it."""
    x = np.asarray(values, np.float64)
    low, high = interval(x, share=False, samples=1) or (None, None)
    return Interval(float(x.mean()), low, high)


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
        over_seeds(scores) if scores else None,
        over_seeds(known) if known else None,
        outcomes,
    )


def table(summaries: Sequence[Summary]) -> str:
    """Return the methods as a Markdown table, the best mean score first.

    Args:
        summaries: the first is what the others are compared with.
    """
    first, found = summaries[0].method, against_first({x.method: x.scores for x in summaries})
    lines = [
        "| method | lr | runs | reward of the last fifth, 95 % | evaluation, 95 % | "
        f"p of the reward against `{first}` | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for x in ranked(summaries):
        failed = "; ".join(x.failures).replace("|", "/")
        runs, score, evaluation = len(x.outcomes), x.score or "", x.evaluation or ""
        p = _shown(found[x.method]) if x.method in found else ""
        lines.append(
            f"| `{x.method}` | {x.lr:g} | {runs} | {score} | {evaluation} | {p} | {failed} |"
        )
    lines += [
        "",
        f"Intervals: Student's t over seeds. p: Welch's t of the rewards, {len(found)} comparisons "
        f"with `{first}`, corrected for their number by Holm's rule.",
    ]
    return "\n".join(lines)


def _shown(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


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
        if x.score.low is not None:
            scores.plot([x.score.low, x.score.high], [place, place], color=color, lw=2)
        scores.plot(x.score.mean, place, "o", color=color)
        scores.plot(x.scores, [place] * len(x.scores), "|", color="0.4", ms=7)
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
