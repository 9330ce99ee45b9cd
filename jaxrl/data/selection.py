"""Which rows to learn from: prompts whose samples differ, responses that are not too long."""

from collections.abc import Hashable, Sequence

import numpy as np

Rewards = Sequence[float | Sequence[float]] | np.ndarray


def zero_variance_groups(
    rewards: Rewards,
    groups: Sequence[Hashable] | np.ndarray,
    loss_masks: Sequence[Sequence[float]] | np.ndarray | None = None,
    tol: float = 1e-6,
) -> np.ndarray:
    """Mark the rows [B] bool of prompts whose samples all earned the same: they teach nothing.

    A sample's reward is the sum of its token rewards. Rows with nothing to learn from (loss mask
    all 0) are no evidence; a prompt with fewer than two other rows is never among the result.

    Args:
        rewards: a number per row, or its token rewards.
        groups: [B] prompt of each row: ids or uids, in any order.
        loss_masks: per row; None = all rows count.
        tol: rewards that differ by at most this are the same.
    """
    scores = np.array([float(np.sum(reward)) for reward in rewards])
    counts = np.ones(len(scores), bool)
    if loss_masks is not None:
        counts = np.array([bool(np.any(mask)) for mask in loss_masks])
    count, group = _group_numbers(groups)
    number = np.bincount(group[counts], minlength=count)
    highest, lowest = np.full(count, -np.inf), np.full(count, np.inf)
    np.maximum.at(highest, group[counts], scores[counts])
    np.minimum.at(lowest, group[counts], scores[counts])
    return ((number > 1) & (highest - lowest <= tol))[group]


def filter_rows(
    zero_variance: np.ndarray, groups: Sequence[Hashable] | np.ndarray, room: int
) -> np.ndarray:
    """Keep the rows of the first `room` prompts whose rewards differ: dynamic sampling "filter".

    Yu et al., 2025, https://arxiv.org/abs/2503.14476 (sec. 3.2): batches are drawn until there are
    enough such prompts.

    Args:
        zero_variance: [B] bool, `zero_variance_groups`.
        groups: [B] prompt of each row.
        room: prompts still wanted.
    """
    total, group = _group_numbers(groups)
    chosen = [g for g in range(total) if not zero_variance[group == g].any()]
    return np.flatnonzero(np.isin(group, chosen[:room]))


def replace_rows(
    zero_variance: np.ndarray,
    groups: Sequence[Hashable] | np.ndarray,
    min_replace_ratio: float,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Let random prompts whose rewards differ stand in for the others: dynamic sampling "replace".

    Args:
        zero_variance: [B] bool, `zero_variance_groups`.
        groups: [B] prompt of each row.
        min_replace_ratio: least fraction of prompts whose rewards differ.
        rng: draws the stand-ins.

    Returns:
        The source row of each new row, and its group: fresh ids 0, 1, 2 ..., so that a prompt that
        stands in twice is two groups. None where too few differ: draw another batch.
    """
    total, group = _group_numbers(groups)
    good = [g for g in range(total) if not zero_variance[group == g].any()]
    if len(good) < max(min_replace_ratio * total, 1):
        return None
    sources = [g if g in good else good[rng.integers(len(good))] for g in range(total)]
    rows = [np.flatnonzero(group == g) for g in sources]
    return np.concatenate(rows), np.repeat(np.arange(len(rows)), [len(r) for r in rows])


def soft_overlong_punishment(
    lengths: Sequence[int] | np.ndarray, max_length: int, buffer_length: int, penalty_factor: float
) -> np.ndarray:
    """Return what a response [B] loses for ending within `buffer_length` tokens of `max_length`.

        over       = (length - (max_length - buffer_length)) / buffer_length
        punishment = penalty_factor clip(over, 0, 1)

    Yu et al., 2025, https://arxiv.org/abs/2503.14476 (eq. 13).

    Args:
        lengths: [B] response lengths in tokens.
        max_length: length of the longest response.
        buffer_length: tokens over which the punishment grows, > 0.
        penalty_factor: punishment at `max_length`.

    Raises:
        ValueError: buffer_length not in (0, max_length].
    """
    if not 0 < buffer_length <= max_length:
        raise ValueError(
            f"overlong_buffer.len={buffer_length} must be in (0, max_generate_length={max_length}]"
        )
    over = (np.asarray(lengths) - (max_length - buffer_length)) / buffer_length
    return penalty_factor * np.clip(over, 0.0, 1.0)


def _group_numbers(groups: Sequence[Hashable] | np.ndarray) -> tuple[int, np.ndarray]:
    """Return how many groups there are, and the number [B] of each row's, by first appearance."""
    numbers: dict[Hashable, int] = {}
    group = np.array([numbers.setdefault(g, len(numbers)) for g in groups], int)
    return len(numbers), group
