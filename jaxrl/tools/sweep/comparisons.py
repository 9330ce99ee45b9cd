"""Whether methods differ from the first one by more than their seeds do."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import stdtr

Scores = Sequence[float]


def against_first(scores: Mapping[str, Scores]) -> dict[str, float]:
    """Return p of each method's difference from the first one, corrected for their number.

    Args:
        scores: of the runs of each method, by its name; of fewer than two nothing is known.

    Returns:
        By name; {} where nothing is known of the first.
    """
    first, *others = scores
    if len(scores[first]) < 2:
        return {}
    known = [name for name in others if len(scores[name]) > 1]
    found = holm([welch(scores[name], scores[first]) for name in known])
    return dict(zip(known, found, strict=True))


def welch(one: Scores, other: Scores) -> float:
    """Return the two-sided p of the difference of two means, whose variances need not be equal.

        t = (mean x - mean y) / sqrt(u + v)        u = var x / n, v = var y / m, var with n - 1
        degrees of freedom (u + v)^2 / (u^2 / (n - 1) + v^2 / (m - 1))

    Welch, 1947, https://doi.org/10.1093/biomet/34.1-2.28. Each has two values or more; where none
    of them varies, p is 1 for equal means, else 0.
    """
    x, y = (np.asarray(values, np.float64) for values in (one, other))
    u, v = (float(values.var(ddof=1)) / len(values) for values in (x, y))
    difference = abs(float(x.mean() - y.mean()))
    if not u + v:
        return float(difference == 0)
    freedom = (u + v) ** 2 / (u**2 / (len(x) - 1) + v**2 / (len(y) - 1))
    return float(2 * stdtr(freedom, -difference / math.sqrt(u + v)))


def holm(ps: Sequence[float]) -> list[float]:
    """Return p of each comparison such that the first false finding among them has that p.

    Holm, 1979, https://www.jstor.org/stable/4615733: the smallest is multiplied by their number,
    the next by one less, and so on; none is below a smaller one.
    """
    corrected, least = [0.0] * len(ps), 0.0
    for place, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        corrected[i] = least = max(least, min(1.0, (len(ps) - place) * ps[i]))
    return corrected
