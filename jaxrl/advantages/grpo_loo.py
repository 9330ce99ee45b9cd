"""Leave-one-out advantages over a leave-one-out deviation."""

from typing import Any

import jax.numpy as jnp

from jaxrl.advantages.grpo import counted_rows
from jaxrl.advantages.row import Estimator, check_small_epsilon
from jaxrl.array_ops import BoolB, FloatBT, IntB, MaskBT, assert_per_token, group_centred, group_sum


def grpo_loo(
    token_level_rewards: FloatBT,
    response_mask: MaskBT,
    index: IntB,
    values: FloatBT | None = None,
    config: Any = None,
    *,
    grpo_norm_by_std: bool = True,
    epsilon: float = 1e-6,
    loss_mask: MaskBT | None = None,
    valid_mask: BoolB | None = None,
    **_: Any,
) -> tuple[FloatBT, FloatBT]:
    """Compare a sample with mean and deviation of the others of its prompt: NeMo-RL's GRPO.

        A_i = (s_i - mean_O s) / (std_O s + epsilon) if std_O s > 0, else s_i - mean_O s

    with O the other samples in G, s_i = sum_t r_it, std with n - 1 of them. The leave-one-out mean
    is that of Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740 (`rloo`); the division is
    NeMo-RL's default, `normalize_rewards`. The others of one right sample among wrong ones do not
    vary, so it gets 1; one other alone, in a group of two, does not either. A sum of squares around
    mean_O below 1e-5 of that around mean_G counts as 0, since rounding leaves as much of a 0. A
    group of one gets 0.

    Args:
        token_level_rewards, response_mask: [B, T] float.
        index: [B] int group ids in [0, B).
        values, config: not used.
        grpo_norm_by_std: divide by the standard deviation of the others.
        loss_mask, valid_mask: which rows count, see `counted_rows`; the others get 0.

    Returns:
        advantages [B, T], the same number on every response token, 0 elsewhere; returns, equal to
        them.
    """
    assert_per_token(token_level_rewards, mask=response_mask)
    scores = token_level_rewards.sum(-1)
    counted = counted_rows(response_mask, loss_mask, valid_mask)
    n = group_sum(counted.astype(scores.dtype), index)
    centred = group_centred(scores, index, counted)
    relative = centred * n / jnp.maximum(n - 1, 1)
    squares = group_sum(jnp.square(centred), index)
    of_others = squares - centred * relative  # around their own mean
    varies = (n > 2) & (of_others > 1e-5 * squares) & grpo_norm_by_std
    std = jnp.sqrt(jnp.where(varies, of_others, 1) / jnp.maximum(n - 2, 1))
    advantages = jnp.where(varies, relative / (std + epsilon), relative)
    advantages = advantages[:, None] * response_mask
    return advantages, advantages


ROW = Estimator(
    grpo_loo,
    lambda s, group: (
        f"A = (R - mean_O R) / (std_O R + {s['epsilon']}), not divided where std_O R = 0, O the "
        f"others in G, {group}"
        if s["grpo_norm_by_std"]
        else f"A = R - mean of the others in G, {group}"
    ),
    paper="https://arxiv.org/abs/2402.14740",
    alone="0",
    check=check_small_epsilon,
)
