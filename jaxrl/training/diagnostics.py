"""Statistics of a batch that predict collapse: groups without differences, right against wrong.

"Correct" is a trajectory that earned more than 0, as in pass@n.
"""

from collections.abc import Sequence

import numpy as np

from jaxrl.data.columns import trajectory_numbers
from jaxrl.data.selection import zero_variance_groups
from jaxrl.types import GeneratorOutput, TrainBatch

Metrics = dict[str, float]


def group_metrics(scores: np.ndarray, uids: Sequence[str]) -> Metrics:
    """Return the share of prompts whose samples all earned the same; none for single samples.

    Args:
        scores: [B] of each trajectory; uids: [B] its prompt.
    """
    extremes = {
        "reward/max_raw_reward": float(scores.max()),
        "reward/min_raw_reward": float(scores.min()),
    }
    _, group = np.unique(np.asarray(uids), return_inverse=True)
    number = np.bincount(group)
    if number.max() < 2:
        return extremes
    mean = np.bincount(group, scores) / number
    deviation = np.sqrt(np.bincount(group, np.square(scores - mean[group])) / number)
    same = np.zeros(len(number), bool)
    same[group] = zero_variance_groups(scores, group)
    return extremes | {
        "reward/group_std": float(deviation.mean()),
        "reward/zero_variance_ratio": float(same.mean()),
        "reward/all_correct_ratio": float((same & (mean > 0)).mean()),
        "reward/none_correct_ratio": float((same & (mean <= 0)).mean()),
    }


def length_metrics(output: GeneratorOutput, scores: np.ndarray) -> Metrics:
    """Return the longest response and the share that ended by itself, rewarded and not.

    Args:
        scores: [rows].
    """
    lengths = np.array([len(tokens) for tokens in output["response_ids"]])
    stopped = np.array([reason == "stop" for reason in output["stop_reasons"]])
    metrics = {}
    for name, rows in {"non_zero": scores > 0, "zero": scores <= 0}.items():
        if rows.any():
            metrics[f"generate/max_tokens_{name}_rewards"] = float(lengths[rows].max())
            metrics[f"generate/stop_ratio_{name}_rewards"] = float(stopped[rows].mean())
    return metrics


def advantages_by_correctness(batch: TrainBatch, scores: np.ndarray) -> Metrics:
    """Return mean and deviation of sampled tokens' advantages, over all and by correctness.

    Args:
        batch: with advantages.
        scores: [B] rewards before the KL is taken off; of a trajectory with several rows the last
            row's counts.
    """
    mask, advantages = np.asarray(batch.loss_mask) != 0, np.asarray(batch.advantages)
    if batch.is_last_step is not None:
        scores = scores[batch.is_last_step][trajectory_numbers(batch.is_last_step)]
    correct = (scores > 0)[:, None]
    metrics = {}
    for name, rows in {"": mask, "_correct": mask & correct, "_incorrect": mask & ~correct}.items():
        if rows.any():
            metrics[f"loss/advantage_mean{name}"] = float(advantages[rows].mean())
            metrics[f"loss/advantage_std{name}"] = float(advantages[rows].std())
            metrics[f"loss/advantage_abs_max{name}"] = float(np.abs(advantages[rows]).max())
    return metrics
