"""Advantages relative to a mean weighted by length."""

from typing import Any

from jaxrl.advantages.grpo import counted_rows
from jaxrl.advantages.row import Estimator
from jaxrl.array_ops import BoolB, FloatBT, IntB, MaskBT, assert_per_token, group_centred


def opo(
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
    """Weigh the scores of a group by length in its baseline: on-policy RL with optimal baseline.

        A_i = s_i - sum_{j in G} l_j s_j / sum_{j in G} l_j          s_i = sum_t r_it

    with l_j sampled tokens. Hao et al., 2025, https://arxiv.org/abs/2505.23585: the baseline of
    least variance if the gradients of tokens are independent and of one size, so that the square of
    a sample's is proportional to its length. A sample whose tokens are all masked has no gradient,
    and no weight. A group of one gets 0; verl gives it its score.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index: [B] int group ids in [0, B).
        values, config: not used.
        loss_mask: [B, T] tokens that the policy sampled; None = the whole response.
        valid_mask: [B] which rows count, see `counted_rows`; the others get 0.

    Returns:
        advantages [B, T], the same number on every response token, 0 elsewhere; returns, equal to
        them.
    """
    assert_per_token(token_level_rewards, mask=response_mask)
    sampled = response_mask if loss_mask is None else loss_mask * response_mask
    lengths = sampled.sum(-1) * counted_rows(response_mask, loss_mask, valid_mask)
    advantages = group_centred(token_level_rewards.sum(-1), index, lengths)
    advantages = advantages[:, None] * response_mask
    return advantages, advantages


ROW = Estimator(
    opo,
    lambda s, group: f"A = R - sum_G l R / sum_G l, l = sampled tokens, {group}",
    paper="https://arxiv.org/abs/2505.23585",
    per_token=True,
    alone="0",
)
