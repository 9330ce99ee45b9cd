"""Discounted returns, normalised over the batch."""

from typing import Any

import jax.numpy as jnp

from jaxrl.advantages.row import Estimator
from jaxrl.array_ops import (
    FloatBT,
    IntB,
    MaskBT,
    assert_per_token,
    discounted_sums,
    step_ids,
    sum_by_step,
    whiten,
)


def reinforce_plus_plus(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    gamma: float = 1.0,
    loss_mask: MaskBT | None = None,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Take the batch as the baseline, without groups or a critic: REINFORCE++.

        R_t = r_t + gamma R_t'          t' the next token that the policy sampled
        A   = (R - mean R) / sqrt(var R + 1e-8)       over all sampled tokens, var with n - 1

    Hu et al., 2025, https://arxiv.org/abs/2501.03262. Observation tokens are passed over: they
    take no step of gamma, and what is earned on them counts for the token before. With fewer than
    two tokens in the batch all advantages are 0.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index, values, config: not used.
        gamma: discount per sampled token.
        loss_mask: [B, T] tokens that the policy sampled; None = the whole response.

    Returns:
        advantages and returns R [B, T], 0 outside the mask.
    """
    assert_per_token(token_level_rewards, mask=response_mask)
    mask = response_mask if loss_mask is None else loss_mask * response_mask
    ids = step_ids(mask)
    rewards = sum_by_step(jnp.where(response_mask != 0, token_level_rewards, 0), ids)
    returns = jnp.take_along_axis(discounted_sums(rewards, gamma), ids, axis=-1) * mask
    return whiten(returns, mask), returns


ROW = Estimator(
    reinforce_plus_plus,
    lambda s, group: (
        f"A = (R_t - mean R_t) / std R_t over the batch, R_t = r_t + {s['gamma']:g} R_t+1"
    ),
    paper="https://arxiv.org/abs/2501.03262",
    per_token=True,
    normalises=True,
)
