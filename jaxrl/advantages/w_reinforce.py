"""Right samples a little, wrong ones in full."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxrl.advantages.grpo import counted_rows
from jaxrl.advantages.row import Estimator, Problem, Settings
from jaxrl.array_ops import BoolB, FloatBT, IntB, MaskBT, assert_per_token


def w_reinforce(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    positive_weight: float = 0.1,
    threshold: float = 0.0,
    loss_mask: MaskBT | None = None,
    valid_mask: BoolB | None = None,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Learn from wrong samples in full, and little from right ones: W-REINFORCE.

        A_i = positive_weight if s_i > threshold, else -1          s_i = sum_t r_it

    Zhu et al., 2025, https://arxiv.org/abs/2506.01347, where positive_weight is lambda; with 0 it
    is negative sample reinforcement (NSR). There is no baseline: equal scores do not give 0.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index, values, config: not used.
        positive_weight: advantage of a right sample.
        threshold: a sample is right if its score is larger.
        loss_mask, valid_mask: which rows count, see `counted_rows`; the others get 0.

    Returns:
        advantages [B, T], the same number on every response token, 0 elsewhere; returns, equal to
        them.
    """
    assert_per_token(token_level_rewards, mask=response_mask)
    scores = token_level_rewards.sum(-1)
    counted = counted_rows(response_mask, loss_mask, valid_mask)
    advantages = jnp.where(counted, jnp.where(scores > threshold, positive_weight, -1.0), 0)
    advantages = advantages[:, None] * response_mask
    return advantages, advantages


def _check(s: Settings) -> Iterable[Problem]:
    if not s["positive_weight"] >= 0:
        yield "positive_weight", "must not be negative: right samples would be punished; e.g. 0.1"


ROW = Estimator(
    w_reinforce,
    lambda s, group: f"A = {s['positive_weight']:g} if R > {s['threshold']:g}, else -1",
    paper="https://arxiv.org/abs/2506.01347",
    check=_check,
)
