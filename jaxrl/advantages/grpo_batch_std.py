"""Group-relative advantages over the deviation of the batch."""

from typing import Any

import jax.numpy as jnp

from jaxrl.advantages.grpo import counted_rows
from jaxrl.advantages.row import Estimator, check_epsilon
from jaxrl.array_ops import BoolB, FloatBT, IntB, MaskBT, assert_per_token, group_centred, group_std


def grpo_batch_std(
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
    """Divide by the standard deviation of all scores of the batch, not of a group: Lite PPO.

        A_i = (s_i - mean_G s) / (std_batch s + epsilon)          s_i = sum_t r_it, std with n - 1

    Liu et al., 2025, https://arxiv.org/abs/2508.08221; with loss_reduction "token_mean". This is
    TRL's scale_rewards="batch", whose epsilon is 1e-4. Differences between prompts are part of this
    deviation; `reinforce++_baseline` divides by that of s - mean_G s. A group of one gets 0.

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
    batch = jnp.zeros_like(index)
    std = group_std(group_centred(scores, batch, counted), batch, counted)
    advantages = group_centred(scores, index, counted) / (std + epsilon)
    advantages = advantages[:, None] * response_mask
    return advantages, advantages


ROW = Estimator(
    grpo_batch_std,
    lambda s, group: f"A = (R - mean_G R) / (std R of the batch + {s['epsilon']}), {group}",
    paper="https://arxiv.org/abs/2508.08221",
    alone="0",
    check=check_epsilon,
)
