"""Advantages relative to the success rate."""

from typing import Any

import jax.numpy as jnp

from jaxrl.advantages.grpo import counted_rows
from jaxrl.advantages.row import Estimator, check_small_epsilon
from jaxrl.array_ops import BoolB, FloatBT, IntB, MaskBT, assert_per_token, group_centred, group_sum


def maxrl(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    epsilon: float = 1e-6,
    loss_mask: MaskBT | None = None,
    valid_mask: BoolB | None = None,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Divide by the group's mean, not its standard deviation as GRPO does: maximum-likelihood RL.

        s_i = sum_t r_it
        A_i = (s_i - mean_G s) / (mean_G s + epsilon) where mean_G s > 0, else 0

    Tajwar et al., 2026, https://arxiv.org/abs/2602.02710. For rewards of 0 and 1, whose mean is the
    success rate: the rarer the success, the larger its advantage. Other rewards have no success
    rate: with a negative mean the division would turn the sign around, so that the best sample of
    the group were made less likely, and around 0 it explodes. Hence 0 where the mean is not
    positive, as in prime-rl. A group of one keeps its score.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index: [B] int group ids in [0, B).
        values, config: not used.
        loss_mask, valid_mask: which rows count, see `counted_rows`; the others get 0.

    Returns:
        advantages [B, T], the same number on every response token, 0 elsewhere; returns, equal to
        them.
    """
    assert_per_token(token_level_rewards, mask=response_mask)
    scores = token_level_rewards.sum(-1)
    counted = counted_rows(response_mask, loss_mask, valid_mask)
    alone = group_sum(jnp.ones_like(scores), index) == 1  # by itself, not left by others
    count = group_sum(counted.astype(scores.dtype), index)
    mean = group_sum(jnp.where(counted, scores, 0), index) / jnp.maximum(count, 1)
    relative = group_centred(scores, index, counted) / (mean + epsilon)
    size = group_sum(jnp.where(counted, jnp.abs(scores), 0), index) / jnp.maximum(count, 1)
    relative = jnp.where(mean > 1e-5 * size, relative, 0)  # size: a mean of 0 may be rounded up
    relative = jnp.where(alone & counted, scores, relative)
    advantages = relative[:, None] * response_mask
    return advantages, advantages


ROW = Estimator(
    maxrl,
    lambda s, group: (
        f"A = (R - mean_G R) / (mean_G R + {s['epsilon']}), 0 if mean_G R <= 0, {group}"
    ),
    paper="https://arxiv.org/abs/2602.02710",
    binary_rewards=True,
    alone="the reward itself",
    check=check_small_epsilon,
)
