"""Group-relative advantages."""

from typing import Any

import jax.numpy as jnp

from jaxrl.advantages.row import Estimator, check_group_epsilon, relative
from jaxrl.array_ops import (
    Array,
    BoolB,
    FloatBT,
    IntB,
    MaskBT,
    assert_per_token,
    group_centred,
    group_std,
    group_sum,
)


def grpo(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    grpo_norm_by_std: bool = True,
    epsilon: float = 1e-6,
    loss_mask: MaskBT | None = None,
    valid_mask: BoolB | None = None,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Compare a sequence's score with the other samples of its prompt: GRPO with outcome rewards.

        s_i = sum_t r_it
        A_i = (s_i - mean_G s) / (std_G s + epsilon)        std with n - 1; without it: Dr. GRPO

    Shao et al., 2024, https://arxiv.org/abs/2402.03300 (sec. 4.1.2); without the standard
    deviation: Liu et al., 2025, https://arxiv.org/abs/2503.20783. A group of one has mean 0 and std
    1: it keeps its score.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index: [B] int group ids in [0, B).
        values, config: not used.
        grpo_norm_by_std: divide by the group's standard deviation.
        loss_mask, valid_mask: which rows count, see `counted_rows`; the others get 0.

    Returns:
        advantages [B, T], the same number on every response token, 0 elsewhere; returns, equal to
        them.
    """
    assert_per_token(token_level_rewards, mask=response_mask)
    scores = token_level_rewards.sum(-1)
    counted = counted_rows(response_mask, loss_mask, valid_mask)
    advantages = group_relative(scores, index, counted, by_std=grpo_norm_by_std, epsilon=epsilon)
    advantages = advantages[:, None] * response_mask
    return advantages, advantages


def counted_rows(
    response_mask: MaskBT, loss_mask: MaskBT | None, valid_mask: BoolB | None
) -> BoolB:
    """Return the rows [B] bool whose scores are evidence about their prompt.

    The score 0 of a trajectory whose environment failed says nothing: it has no part in mean and
    deviation of its group. A truncated response that is masked was judged, and counts (DAPO).

    Args:
        response_mask: [B, T].
        loss_mask: [B, T] or None.
        valid_mask: [B] not 0 where the row counts; None: where its loss mask is not all 0.
    """
    if valid_mask is not None:
        return jnp.asarray(valid_mask) != 0
    if loss_mask is not None:
        return (jnp.asarray(loss_mask) != 0).any(-1)
    return jnp.ones(response_mask.shape[0], bool)


def group_relative(
    scores: Array, index: IntB, counted: BoolB, *, by_std: bool, epsilon: float
) -> Array:
    """Return (scores - mean_G) / (std_G + epsilon): scores [B, ...], index and counted [B]."""
    counted = jnp.broadcast_to(counted.reshape(-1, *[1] * (scores.ndim - 1)), scores.shape)
    alone = group_sum(jnp.ones_like(scores), index) == 1  # by itself, not left by others
    centred = jnp.where(alone & counted, scores, group_centred(scores, index, counted))
    std = jnp.where(alone, 1.0, group_std(centred, index, counted))
    return centred / (std + epsilon) if by_std else centred


ROW = Estimator(
    grpo,
    lambda s, group: f"A = {relative(s)}, {group}",
    paper="https://arxiv.org/abs/2402.03300",
    alone="the reward itself",
    check=check_group_epsilon,
)
