"""Generalised advantage estimation, for a critic."""

from typing import Any

import jax.numpy as jnp

from jaxrl.advantages.row import Estimator
from jaxrl.array_ops import (
    Array,
    FloatBT,
    IntB,
    MaskBT,
    assert_per_token,
    discounted_sums,
    step_ids,
    sum_by_step,
    whiten,
)


def gae(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    loss_mask: MaskBT | None = None,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Sum the critic's one-step errors with exponential weights, normalised over the batch (GAE).

        delta_t = r_t + gamma V_t' - V_t          t' the next token that the policy sampled, V = 0
        G_t     = delta_t + gamma lambd G_t'      after the last
        returns = G + V
        A       = (G - mean G) / sqrt(var G + 1e-8)      over all sampled tokens, var with n - 1

    Schulman et al., 2016, https://arxiv.org/abs/1506.02438 (eq. 16). Observation tokens are passed
    over: they take no step of gamma, their values are not asked for, and what is earned on them
    counts for the token before. With fewer than two tokens in the batch all advantages are 0.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index, config: not used.
        values: [B, T] of the state before each token.
        gamma, lambd: discounts per sampled token.
        loss_mask: [B, T] tokens that the policy sampled; None = the whole response.

    Returns:
        advantages and returns [B, T], 0 outside the mask.

    Raises:
        ValueError: no values.
    """
    if values is None:
        raise ValueError("advantage estimator 'gae' needs the values of a critic, got None")
    assert_per_token(token_level_rewards, values, mask=response_mask)
    mask = response_mask if loss_mask is None else loss_mask * response_mask
    rewards = jnp.where(response_mask != 0, token_level_rewards, 0)
    sums, returns = error_sums(rewards, mask, values, gamma=gamma, lambd=lambd)
    return whiten(sums, mask), returns


def error_sums(
    rewards: FloatBT, mask: MaskBT, values: FloatBT, *, gamma: float, lambd: Array | float
) -> tuple[FloatBT, FloatBT]:
    """Return G and G + V of `gae`, [B, T], 0 outside the mask of sampled tokens; lambd [] or [B].

    Args:
        rewards: [B, T], 0 outside the response.
    """
    ids = step_ids(mask)
    rewards = sum_by_step(rewards, ids)
    state_values = sum_by_step(jnp.where(mask != 0, values, 0), ids)
    next_values = jnp.pad(state_values[:, 1:], ((0, 0), (0, 1)))
    sums = discounted_sums(rewards + gamma * next_values - state_values, gamma * lambd)
    sums, returns = (
        jnp.take_along_axis(x, ids, axis=-1) * mask for x in (sums, sums + state_values)
    )
    return sums, returns


ROW = Estimator(
    gae,
    lambda s, group: (
        f"A = normalised G_t = d_t + {s['gamma'] * s['lambd']:g} G_t+1, "
        f"d_t = r_t + {s['gamma']:g} V_t+1 - V_t"
    ),
    paper="https://arxiv.org/abs/1506.02438",
    per_token=True,
    needs_values=True,
    normalises=True,
)
