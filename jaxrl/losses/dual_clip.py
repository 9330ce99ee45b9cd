"""PPO with a second clip that bounds the loss of tokens with negative advantage."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, safe_exp, zero_masked
from jaxrl.losses.regular import clipped_surrogate
from jaxrl.losses.row import Loss, Problem, odd_bounds, surrogate


def dual_clip(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Bound PPO's loss where A < 0: it is at most -c A, however large the ratio (dual-clip PPO).

        L_t = clipped surrogate of PPO
        L_t = min(L_t, -c A_t)    where A_t < 0

    Ye et al., 2020, https://arxiv.org/abs/1912.09729 (eq. 8).

    Args:
        log_probs, old_log_probs, advantages: [B, T] float.
        config: uses eps_clip_low, eps_clip_high and clip_ratio_c (c > 1).
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: not used; the caller corrects.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": [B, T] 0/1 of the first clip only}.
    """
    assert_per_token(log_probs, old_log_probs, advantages)
    log_probs, old_log_probs, advantages = zero_masked(
        loss_mask, log_probs, old_log_probs, advantages
    )
    ratio = safe_exp(log_probs - old_log_probs)
    loss, clipped = clipped_surrogate(ratio, advantages, config.eps_clip_low, config.eps_clip_high)
    bounded = jnp.minimum(loss, -config.clip_ratio_c * advantages)
    return jnp.where(advantages < 0, bounded, loss), {"clip_ratio": clipped}


def _check(config: Any) -> Iterable[Problem]:
    if config.clip_ratio_c <= 1:
        yield "clip_ratio_c", "must be > 1, e.g. 3.0"


ROW = Loss(
    dual_clip,
    lambda c: f"{surrogate(c)}, l = min(l, -{c.clip_ratio_c:g} A) where A < 0",
    paper="https://arxiv.org/abs/1912.09729",
    plain_at_one=True,
    check=_check,
    odd=odd_bounds,
)
