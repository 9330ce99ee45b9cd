"""CE-GPPO: tokens beyond the clip keep a bounded gradient."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, safe_exp, zero_masked
from jaxrl.losses.row import Loss, Problem, hyperparameters, odd_bounds


def ce_gppo(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
    *,
    beta_1: float = 0.75,
    beta_2: float = 1.0,
) -> tuple[FloatBT, dict[str, Array]]:
    """Let tokens that PPO clips keep a bounded gradient (CE-GPPO), which steers the entropy.

        r_t = pi_theta(a_t | s_t) / pi_old(a_t | s_t)
        L_t = -beta_1 (1 - eps_low) / sg[r_t] r_t A_t     where r_t < 1 - eps_low and A_t < 0
        L_t = -beta_2 (1 + eps_high) / sg[r_t] r_t A_t    where r_t > 1 + eps_high and A_t > 0
        L_t = -r_t A_t                                    elsewhere

    Su et al., 2025, https://arxiv.org/abs/2509.20712 (eq. 8). With beta_1 = beta_2 = 0 the gradient
    is PPO's. The authors' code bounds the loss by -3 A where A < 0 too, as 'dual_clip' does; the
    paper does not. The log ratio is clamped to +-20 before exp.

    Args:
        log_probs, old_log_probs, advantages: [B, T] float.
        config: uses eps_clip_low, eps_clip_high, offsets from 1.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: not used; the caller corrects.
        beta_1, beta_2: scale the gradient below and above the clip; 0 or more.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": [B, T] 0/1 beyond the clip}.
    """
    assert_per_token(log_probs, old_log_probs, advantages)
    log_probs, old_log_probs, advantages = zero_masked(
        loss_mask, log_probs, old_log_probs, advantages
    )
    ratio = safe_exp(log_probs - old_log_probs)
    low, high = 1 - config.eps_clip_low, 1 + config.eps_clip_high
    below, above = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    # r / sg[r] without a division: 1, with the gradient of the log-prob
    one = 1 + log_probs - jax.lax.stop_gradient(log_probs)
    weight = jnp.where(below, beta_1 * low * one, jnp.where(above, beta_2 * high * one, ratio))
    return -weight * advantages, {"clip_ratio": below | above}


def _formula(config: Any) -> str:
    low, high = 1 - config.eps_clip_low, 1 + config.eps_clip_high
    p = hyperparameters(ce_gppo, config)
    return (
        f"-w A, w = {p['beta_1']:g} x {low:g} r/sg[r] where r < {low:g}, A < 0; "
        f"{p['beta_2']:g} x {high:g} r/sg[r] where r > {high:g}, A > 0; else r"
    )


def _check(config: Any) -> Iterable[Problem]:
    p = hyperparameters(ce_gppo, config)
    for name in ("beta_1", "beta_2"):
        if not p[name] >= 0:
            yield f"policy_loss_kwargs.{name}", "must be 0 or more, e.g. 0.75 and 1.0"


ROW = Loss(
    ce_gppo,
    _formula,
    paper="https://arxiv.org/abs/2509.20712",
    plain_at_one=True,
    check=_check,
    odd=odd_bounds,
)
