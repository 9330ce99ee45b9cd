"""What an evaluation says of a policy: mean scores, pass@k, and how sure they are.

The prompts are a sample of those that could have been asked, and the samples of one prompt resemble
each other: the prompt is the unit that counts (clusters of "Adding Error Bars to Evals",
arXiv:2411.00640, equation 4).
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

Interval = tuple[float, float]
LEVEL = 0.95
METHOD = (
    "95 %, clustered by prompt: Student's t over the prompts' means, cut to [0, 1] where all "
    "scores are in it; of shares (scores of 0 and 1, pass@k) Wilson's interval with the effective "
    "sample size p (1 - p) / se^2"
)


def pass_at_k(passed: np.ndarray, k: int) -> np.ndarray:
    """Estimate the probability that one of k samples of a prompt passes, without bias.

    1 - C(n - c, k) / C(n, k) for c passing samples of n: the share of the subsets of k that hold
    one which passed (Chen et al., "Evaluating Large Language Models Trained on Code",
    arXiv:2107.03374, equation 1).

    Args:
        passed: [P, n] bool, samples of each prompt.
        k: at least 1, at most n.

    Returns:
        [P] float64.

    Raises:
        ValueError: k is out of range.
    """
    n = passed.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples per prompt: k must be between 1 and {n}")
    failed = n - passed.sum(1, keepdims=True)
    i = np.arange(1, n + 1)
    return 1.0 - np.where(i > failed, 1.0 - k / i, 1.0).prod(1)  # 0 where failed < k: i = k is in


def interval(values: np.ndarray, *, share: bool, samples: int) -> Interval | None:
    """Return the interval of `LEVEL` around the mean over prompts; None for a single prompt.

    What is drawn may be something else, such as seeds of runs.

    Args:
        values: [P], each prompt's estimate.
        share: they are probabilities. Wilson's interval then stays in [0, 1] and keeps a width
            where all prompts agree, which Student's does not. The effective sample size is at most
            the number of samples, and that of prompts where all or none passed.
        samples: of a prompt.
    """
    prompts = len(values)
    if prompts < 2:
        return None
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(prompts)
    t = float(stdtrit(prompts - 1, (1 + LEVEL) / 2))
    if not share:
        return mean - t * error, mean + t * error
    variance, most = mean * (1 - mean), prompts * samples
    size = min(variance / error**2, most) if error else (most if variance else prompts)
    center = (mean + t * t / (2 * size)) / (1 + t * t / size)
    half = t / (1 + t * t / size) * math.sqrt(variance / size + t * t / (4 * size**2))
    return max(center - half, 0.0), min(center + half, 1.0)


def default_ks(samples: int) -> list[int]:
    """Return 1, 2, 4, 8, ... below the number of samples, and that number."""
    return [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]


def eval_metrics(scores: np.ndarray, ks: Sequence[int]) -> dict[str, float]:
    """Return mean score and pass@k, with the ends of intervals.

    The ends of `<name>` are `<name>_ci_low` and `<name>_ci_high`.

    A sample passes if its score is above 0, as in SkyRL.

    Args:
        scores: [P, n] of n samples of each prompt.
        ks: of pass@k, each at most n.
    """
    samples = scores.shape[1]
    binary = bool(np.isin(scores, (0.0, 1.0)).all())
    estimates = {"avg_score": (scores.mean(1), binary)}
    estimates |= {f"pass_at_{k}": (pass_at_k(scores > 0, k), True) for k in ks}
    metrics: dict[str, float] = {}
    for name, (values, share) in estimates.items():
        metrics[name] = float(values.mean())
        if ends := interval(values, share=share, samples=samples):
            if ((scores >= 0) & (scores <= 1)).all():
                ends = max(ends[0], 0.0), min(ends[1], 1.0)
            metrics |= {f"{name}_ci_low": ends[0], f"{name}_ci_high": ends[1]}
    return metrics
