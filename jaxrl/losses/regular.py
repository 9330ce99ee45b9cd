"""PPO's clipped surrogate, the default loss."""

from typing import Any

import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, clamp, safe_exp, zero_masked
from jaxrl.losses.row import Loss, odd_bounds, surrogate


def clipped_surrogate(
    ratio: FloatBT, advantages: FloatBT, eps_low: Array | float, eps_high: Array | float
) -> tuple:
    """Return -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) and where the clip acted [B, T]."""
    objective = ratio * advantages
    clipped_objective = clamp(ratio, 1 - eps_low, 1 + eps_high) * advantages
    return -jnp.minimum(objective, clipped_objective), clipped_objective < objective


def regular(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Clip the PPO surrogate by separate bounds ("clip-higher" when eps_clip_high > eps_clip_low).

        r_t = pi_theta(a_t | s_t) / pi_old(a_t | s_t)
        L_t = -min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)

    Schulman et al., 2017, https://arxiv.org/abs/1707.06347 (eq. 7); separate bounds: DAPO,
    https://arxiv.org/abs/2503.14476 (eq. 10). The log ratio is clamped to +-20 before exp.

    Args:
        log_probs, old_log_probs, advantages: [B, T] float.
        config: uses eps_clip_low, eps_clip_high, offsets from 1.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: not used; the caller corrects.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": [B, T] 0/1 where clipping took effect}.
    """
    assert_per_token(log_probs, old_log_probs, advantages)
    log_probs, old_log_probs, advantages = zero_masked(
        loss_mask, log_probs, old_log_probs, advantages
    )
    ratio = safe_exp(log_probs - old_log_probs)
    loss, clipped = clipped_surrogate(ratio, advantages, config.eps_clip_low, config.eps_clip_high)
    return loss, {"clip_ratio": clipped}


ROW = Loss(
    regular,
    surrogate,
    paper="https://arxiv.org/abs/1707.06347",
    odd=odd_bounds,
)
