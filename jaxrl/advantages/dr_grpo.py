"""Group-relative advantages without the division by the standard deviation."""

from typing import Any

from jaxrl.advantages.grpo import grpo
from jaxrl.advantages.row import Estimator
from jaxrl.array_ops import BoolB, FloatBT, IntB, MaskBT


def dr_grpo(
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
    """Compute `grpo` with grpo_norm_by_std false, whatever the config says: GRPO done right.

        A_i = s_i - mean_G s          s_i = sum_t r_it

    Liu et al., 2025, https://arxiv.org/abs/2503.20783 (sec. 3.2). The paper's other half is the
    loss: loss_reduction "seq_mean_token_sum_norm", no division by the length of a response.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index: [B] int group ids in [0, B).
        values, config: not used.
        loss_mask, valid_mask: which rows count, see `counted_rows`; the others get 0.

    Returns:
        advantages [B, T], the same number on every response token, 0 elsewhere; returns, equal to
        them.
    """
    return grpo(
        token_level_rewards,
        response_mask,
        index,
        grpo_norm_by_std=False,
        loss_mask=loss_mask,
        valid_mask=valid_mask,
    )


ROW = Estimator(
    dr_grpo,
    lambda s, group: f"A = R - mean_G R, {group}",
    paper="https://arxiv.org/abs/2503.20783",
    alone="the reward itself",
)
