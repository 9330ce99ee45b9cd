"""Group-relative advantages, scaled by what groups without a difference lose."""

from typing import Any

import jax.numpy as jnp

from jaxrl.advantages.grpo import counted_rows
from jaxrl.advantages.row import Estimator
from jaxrl.array_ops import BoolB, FloatBT, IntB, MaskBT, assert_per_token, group_centred, group_sum


def gpg(
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
    """Scale up what is left of a batch by the samples without a gradient: group policy gradient.

        A_i = B / (B - M) (s_i - mean_G s)          s_i = sum_t r_it

    with B samples, M of them in groups whose scores are all equal. Chu et al., 2025,
    https://arxiv.org/abs/2504.02546 (F_norm = 1, alpha = B / (B - M)); its loss is policy_loss_type
    "gpg", the log-prob. verl divides B by the number of scores that are not 0, as if B - M were the
    right samples. A group of one gets 0.

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
    centred = group_centred(scores, index, counted)
    differs = group_sum((centred != 0).astype(scores.dtype), index) > 0
    advantages = centred * counted.sum() / jnp.maximum((differs & counted).sum(), 1)
    advantages = advantages[:, None] * response_mask
    return advantages, advantages


ROW = Estimator(
    gpg,
    lambda s, group: (
        f"A = B / (B - M) (R - mean_G R), M of B samples in groups of equal rewards, {group}"
    ),
    paper="https://arxiv.org/abs/2504.02546",
    alone="0",
)
