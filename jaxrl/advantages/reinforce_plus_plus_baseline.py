"""Group-relative advantages, normalised over the batch."""

from typing import Any

from jaxrl.advantages.grpo import counted_rows
from jaxrl.advantages.row import Estimator
from jaxrl.array_ops import BoolB, FloatBT, IntB, MaskBT, assert_per_token, group_centred, whiten


def reinforce_plus_plus_baseline(
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
    """Subtract the mean of the group, then normalise over the batch: REINFORCE++ with baseline.

        d_i = s_i - mean_G s                                    s_i = sum_t r_it
        A_i = (d_i - mean d) / sqrt(var d + 1e-8)       over all sampled tokens, var with n - 1

    Hu et al., 2025, https://arxiv.org/abs/2501.03262 (with baseline). Where lengths differ the mean
    over tokens is not 0, and then a group whose scores are all equal does not get 0 either. A group
    of one has d = 0; in verl d is its score.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index: [B] int group ids in [0, B).
        values, config: not used.
        loss_mask: [B, T] tokens that the policy sampled; None = the whole response.
        valid_mask: [B] which rows count, see `counted_rows`; the others get 0.

    Returns:
        advantages [B, T], the same number on every sampled token, 0 elsewhere; returns, equal to
        them.
    """
    assert_per_token(token_level_rewards, mask=response_mask)
    sampled = response_mask if loss_mask is None else loss_mask * response_mask
    counted = counted_rows(response_mask, loss_mask, valid_mask)
    centred = group_centred(token_level_rewards.sum(-1), index, counted)
    mask = sampled * counted[:, None]
    advantages = whiten(centred[:, None] * mask, mask)
    return advantages, advantages


ROW = Estimator(
    reinforce_plus_plus_baseline,
    lambda s, group: f"A = (d - mean d) / std d over the batch, d = R - mean_G R, {group}",
    paper="https://arxiv.org/abs/2501.03262",
    per_token=True,
    normalises=True,
    alone="0",
)
