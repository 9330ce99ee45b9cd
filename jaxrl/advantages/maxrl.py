"""Advantages relative to the success rate."""

from typing import Any

import chex
import jax.numpy as jnp

from jaxrl.array_ops import Array, group_centred, group_sum


def maxrl(
    token_level_rewards: Array,
    response_mask: Array,
    index: Array,
    values: Array | None = None,
    config: Any = None,
    *,
    epsilon: float = 1e-6,
    **_: Any,
) -> tuple[Array, Array]:
    """Maximum-likelihood RL: GRPO divided by the mean instead of the standard deviation.

        s_i = sum_t r_it
        A_i = (s_i - mean_G s) / (mean_G s + epsilon)

    Tajwar et al., 2026, https://arxiv.org/abs/2602.02710. For rewards of 0 and 1: the rarer the
    success, the larger its advantage. A mean near 0 or negative makes no sense. A group of one
    keeps its score; a group of zeros gets 0.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index: [B] int group ids in [0, B).
        values, config: not used.

    Returns:
        advantages [B, T], the same number on every response token, 0 elsewhere; returns, equal to
        them.
    """
    chex.assert_equal_shape([token_level_rewards, response_mask])
    scores = token_level_rewards.sum(-1)
    count = group_sum(jnp.ones_like(scores), index)
    mean = group_sum(scores, index) / count
    relative = jnp.where(count > 1, group_centred(scores, index) / (mean + epsilon), scores)
    advantages = relative[:, None] * response_mask
    return advantages, advantages
