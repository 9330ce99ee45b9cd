"""Leave-one-out advantages."""

from typing import Any

import jax.numpy as jnp

from jaxrl.advantages.grpo import counted_rows
from jaxrl.advantages.row import Estimator
from jaxrl.array_ops import BoolB, FloatBT, IntB, MaskBT, assert_per_token, group_centred, group_sum


def rloo(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    loss_mask: MaskBT | None = None,
    valid_mask: BoolB | None = None,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Take the mean of a prompt's other samples as a sample's baseline: REINFORCE leave-one-out.

        s_i = sum_t r_it
        A_i = s_i - mean_{j in G, j != i} s_j = (s_i - mean_G s) n / (n - 1)

    Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740 (eq. 8). A group of one gets 0.

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
    count = group_sum(counted.astype(scores.dtype), index)
    others = jnp.maximum(count - 1, 1)
    centred = group_centred(scores, index, counted)
    advantages = (centred * count / others)[:, None] * response_mask
    return advantages, advantages


ROW = Estimator(
    rloo,
    lambda s, group: f"A = R - mean of the others in G, {group}",
    paper="https://arxiv.org/abs/2402.14740",
    alone="0",
)
