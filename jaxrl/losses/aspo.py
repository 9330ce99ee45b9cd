"""ASPO: the importance weight turned around where the advantage is positive."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, safe_exp, zero_masked
from jaxrl.losses.row import Loss, Problem, odd_bounds


def aspo(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Weigh good tokens by 1 / r, so that those that lag behind learn more (asymmetric weights).

        r_t = pi_theta(a_t | s_t) / pi_old(a_t | s_t)
        w_t = 0 where PPO clips: r_t > 1 + eps_high, A_t > 0 or r_t < 1 - eps_low, A_t < 0
        w_t = min(1 / r_t, c) elsewhere where A_t > 0,  min(r_t, c) where A_t < 0
        L_t = -sg[w_t] A_t log pi_theta(a_t | s_t)

    Wang et al., 2025, https://arxiv.org/abs/2510.06062 (sec. 6, eq. 3). L has the gradient of the
    paper's ratio pi_old pi_theta / sg[pi_theta^2], and the form of its soft clip at c. c = 3 is
    from the authors' code, which also has wider bounds for tokens of high entropy; the paper has
    not. The log ratio is clamped to +-20 before exp.

    Args:
        log_probs, old_log_probs, advantages: [B, T] float.
        config: uses eps_clip_low, eps_clip_high and clip_ratio_c (c > 1).
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: not used; the caller corrects.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": [B, T] 0/1 where w is 0}.
    """
    assert_per_token(log_probs, old_log_probs, advantages)
    log_probs, old_log_probs, advantages = zero_masked(
        loss_mask, log_probs, old_log_probs, advantages
    )
    log_ratio = jax.lax.stop_gradient(log_probs) - old_log_probs
    ratio, good = safe_exp(log_ratio), advantages > 0
    above, below = ratio > 1 + config.eps_clip_high, ratio < 1 - config.eps_clip_low
    clipped = (good & above) | ((advantages < 0) & below)
    weight = jnp.minimum(jnp.where(good, safe_exp(-log_ratio), ratio), config.clip_ratio_c)
    return -jnp.where(clipped, 0, weight) * advantages * log_probs, {"clip_ratio": clipped}


def _formula(config: Any) -> str:
    low, high, c = 1 - config.eps_clip_low, 1 + config.eps_clip_high, config.clip_ratio_c
    return (
        f"-sg[w] A log_probs, w = min(1/r, {c:g}) where A > 0, r <= {high:g}; min(r, {c:g}) where "
        f"A < 0, r >= {low:g}; else 0"
    )


def _check(config: Any) -> Iterable[Problem]:
    if config.clip_ratio_c <= 1:
        yield "clip_ratio_c", "must be > 1, e.g. 3.0"


ROW = Loss(
    aspo,
    _formula,
    paper="https://arxiv.org/abs/2510.06062",
    plain_at_one=True,
    check=_check,
    odd=odd_bounds,
)
