"""Group-relative advantages."""

from typing import Any

import chex
import jax.numpy as jnp

from jaxrl.array_ops import Array, group_centred, group_sum


def grpo(
    token_level_rewards: Array,
    response_mask: Array,
    index: Array,
    values: Array | None = None,
    config: Any = None,
    *,
    grpo_norm_by_std: bool = True,
    epsilon: float = 1e-6,
    **_: Any,
) -> tuple[Array, Array]:
    """GRPO with outcome rewards: a sequence's score against the other samples of its prompt.

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

    Returns:
        advantages [B, T], the same number on every response token, 0 elsewhere; returns, equal to
        them.
    """
    chex.assert_equal_shape([token_level_rewards, response_mask])
    scores = token_level_rewards.sum(-1)
    advantages = group_relative(scores, index, by_std=grpo_norm_by_std, epsilon=epsilon)
    advantages = advantages[:, None] * response_mask
    return advantages, advantages


def group_relative(scores: Array, index: Array, *, by_std: bool, epsilon: float) -> Array:
    """(scores - mean_G scores) / (std_G scores + epsilon): scores [B, ...], index [B]."""
    count = group_sum(jnp.ones_like(scores), index)
    alone = count == 1
    centred = jnp.where(alone, scores, group_centred(scores, index))
    variance = group_sum(jnp.square(centred), index) / jnp.maximum(count - 1, 1)
    std = jnp.where(alone, 1.0, jnp.sqrt(variance))
    return centred / (std + epsilon) if by_std else centred
