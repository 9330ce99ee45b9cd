"""DCPO's clip: wider bounds for tokens that were improbable."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, safe_exp, zero_masked
from jaxrl.losses.regular import clipped_surrogate
from jaxrl.losses.row import Loss, Problem, hyperparameters


def dcpo(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
    *,
    ratio_max: float = 10.0,
) -> tuple[FloatBT, dict[str, Array]]:
    """Clip by bounds that depend on the old probability of the token (dynamic adaptive clipping).

        r_t  = pi_theta(a_t | s_t) / q_t,  q_t = pi_old(a_t | s_t)
        low  = 1/2 + 1/2 sqrt(max(1 - 4 eps_low / q_t, 0))
        high = min(1/2 + 1/2 sqrt(1 + 4 eps_high / q_t), ratio_max)
        L_t  = -min(r_t A_t, clip(r_t, low, high) A_t);  at most -ratio_max A_t where A_t < 0

    Yang et al., 2025, https://arxiv.org/abs/2509.02333 (eq. 4 and 8), averaged over each sequence
    (loss_reduction "sequence_mean", up to a constant). The paper has eps_low = 0.16 and
    eps_high = 0.2. Its smoothed advantages, which remember the rewards of each prompt, are an
    estimator's and not part of the loss. The log ratio and log q are clamped to +-20 before exp.

    Args:
        log_probs, old_log_probs, advantages: [B, T] float.
        config: uses eps_clip_low, eps_clip_high, bounds of |r - 1| pi_theta.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: not used; the caller corrects.
        ratio_max: largest upper bound, and bound of the loss where A < 0; > 1.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": [B, T] 0/1 of the first clip only}.
    """
    assert_per_token(log_probs, old_log_probs, advantages)
    log_probs, old_log_probs, advantages = zero_masked(
        loss_mask, log_probs, old_log_probs, advantages
    )
    ratio, inverse_q = safe_exp(log_probs - old_log_probs), safe_exp(-old_log_probs)
    low = (1 + jnp.sqrt(jnp.maximum(1 - 4 * config.eps_clip_low * inverse_q, 0))) / 2
    high = (1 + jnp.sqrt(1 + 4 * config.eps_clip_high * inverse_q)) / 2
    high = jnp.minimum(high, ratio_max)
    loss, clipped = clipped_surrogate(ratio, advantages, 1 - low, high - 1)
    bounded = jnp.minimum(loss, -ratio_max * advantages)
    return jnp.where(advantages < 0, bounded, loss), {"clip_ratio": clipped}


def _formula(config: Any) -> str:
    largest = hyperparameters(dcpo, config)["ratio_max"]
    return (
        f"-min(r A, clip(r, 1/2 + sqrt(1 - {4 * config.eps_clip_low:g}/q)/2, "
        f"1/2 + sqrt(1 + {4 * config.eps_clip_high:g}/q)/2) A), r <= {largest:g}"
    )


def _check(config: Any) -> Iterable[Problem]:
    if not hyperparameters(dcpo, config)["ratio_max"] > 1:
        yield "policy_loss_kwargs.ratio_max", "must be > 1, e.g. 10.0"


ROW = Loss(
    dcpo,
    _formula,
    paper="https://arxiv.org/abs/2509.02333",
    ratio=lambda c: ["r = exp(log_probs - {anchor}_log_probs), q = exp({anchor}_log_probs)"],
    usual_reduction="sequence_mean",
    plain_at_one=True,
    check=_check,
)
