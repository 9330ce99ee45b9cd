"""BAPO: bounds of the clip that balance the good tokens of a minibatch with the bad ones."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import (
    Array,
    FloatBT,
    FloatScalar,
    MaskBT,
    assert_per_token,
    safe_exp,
    zero_masked,
)
from jaxrl.losses.regular import clipped_surrogate
from jaxrl.losses.row import PER_TOKEN, Loss, Problem, hyperparameters


def bapo(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
    *,
    rho: float = 0.4,
    low_min: float = 0.6,
    low_max: float = 0.9,
    low_step: float = 0.02,
    high_min: float = 1.2,
    high_max: float = 3.0,
    high_step: float = 0.05,
) -> tuple[FloatBT, dict[str, Array]]:
    """Widen the clip until good tokens have their share of the loss (balanced policy optimization).

        r_t = pi_theta(a_t | s_t) / pi_old(a_t | s_t)
        o_t = min(r_t A_t, clip(r_t, low, high) A_t),  L_t = -o_t
        share of the good tokens = sum over A_t > 0 of pi_old |o_t| / sum over all of pi_old |o_t|
        low, high = low_min, high_min; while the share is below rho: high += high_step up to
                    high_max, then low += low_step up to low_max

    Xi et al., 2025, https://arxiv.org/abs/2510.18927 (eq. 8, algorithm 1); the sums are over the
    minibatch. The share is written as in the version of ICLR 2026: the first one takes the absolute
    value of the sums. The authors' code has no pi_old in it, raises low first, and compares good to
    bad. A step of low cannot raise the share, it takes the gradient from bad tokens. The log ratio
    is clamped to +-20 before exp.

    Args:
        log_probs, old_log_probs, advantages: [B, T] float, the whole minibatch.
        config: not used.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: not used.
        rho: the share that good tokens are to have, in [0, 1].
        low_min, low_max, low_step, high_min, high_max, high_step: bounds of r and their steps.

    Returns:
        loss [B, T], unmasked and unreduced; metrics: clip_ratio [B, T] (0/1 where clipping took
        effect), bapo/low, bapo/high [].
    """
    assert_per_token(log_probs, old_log_probs, advantages)
    log_probs, old_log_probs, advantages = zero_masked(
        loss_mask, log_probs, old_log_probs, advantages
    )
    ratio = safe_exp(log_probs - old_log_probs)
    fixed, weight = jax.lax.stop_gradient(ratio), jnp.exp(old_log_probs)
    wider, narrower = steps(high_min, high_max, high_step), steps(low_min, low_max, low_step)

    def bounds(step: Array) -> tuple[FloatScalar, FloatScalar]:
        low = low_min + low_step * jnp.maximum(step - wider, 0)
        return low, high_min + high_step * jnp.minimum(step, wider)

    def too_small(step: Array) -> Array:
        low, high = bounds(step)
        loss, _ = clipped_surrogate(fixed, advantages, 1 - low, high - 1)
        part = weight * jnp.abs(loss)  # of the masked it is 0, as their advantage is
        return jnp.where(advantages > 0, part, 0).sum() < rho * part.sum()

    step = jax.lax.while_loop(
        lambda step: (step < wider + narrower) & too_small(step),
        lambda step: step + 1,
        jnp.zeros((), jnp.int32),
    )
    low, high = bounds(step)
    loss, clipped = clipped_surrogate(ratio, advantages, 1 - low, high - 1)
    return loss, {"clip_ratio": clipped, "bapo/low": low, "bapo/high": high}


def steps(least: float, most: float, size: float) -> int:
    """Return how many steps of a size fit between two bounds; rounding takes none away."""
    return int((most - least) / size + 1e-6)


def _formula(config: Any) -> str:
    p = hyperparameters(bapo, config)
    return (
        f"-min(r A, clip(r, low, high) A), low in [{p['low_min']:g}, {p['low_max']:g}], high in "
        f"[{p['high_min']:g}, {p['high_max']:g}]: |l| of A > 0 at least {p['rho']:g} of all"
    )


def _check(config: Any) -> Iterable[Problem]:
    p = hyperparameters(bapo, config)
    if not 0 <= p["rho"] <= 1:
        yield "policy_loss_kwargs.rho", "must be in [0, 1], e.g. 0.4"
    if not 0 <= p["low_min"] <= p["low_max"] <= 1:
        fix = f"must be between 0 and low_max={p['low_max']:g}, and that at most 1"
        yield "policy_loss_kwargs.low_min", fix
    if not 1 <= p["high_min"] <= p["high_max"]:
        fix = f"must be between 1 and high_max={p['high_max']:g}"
        yield "policy_loss_kwargs.high_min", fix
    for name in ("low_step", "high_step"):
        if not p[name] > 0:
            yield f"policy_loss_kwargs.{name}", "must be > 0, e.g. 0.05"


ROW = Loss(
    bapo,
    _formula,
    paper="https://arxiv.org/abs/2510.18927",
    ratio=lambda c: [PER_TOKEN],
    uncorrected="it chooses its bounds by its own statistics of the minibatch",
    whole_batch=True,
    plain_at_one=True,
    check=_check,
)
