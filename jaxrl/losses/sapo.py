"""SAPO: a smooth gate in place of the clip."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, safe_exp, zero_masked
from jaxrl.losses.row import Loss, Problem


def sapo(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Let the gradient fade as the ratio leaves 1: soft adaptive policy optimization.

        r_t   = pi_theta(a_t | s_t) / pi_old(a_t | s_t)
        tau_t = tau_pos where A_t > 0, else tau_neg
        L_t   = -(4 / tau_t) sigmoid(tau_t (r_t - 1)) A_t

    Gao et al., 2025, https://arxiv.org/abs/2511.20347. At r = 1 the gradient is -A; the
    value is -2 A / tau. The paper averages over sequences (loss_reduction "sequence_mean"). The log
    ratio is clamped to +-20 before exp.

    Args:
        log_probs, old_log_probs, advantages: [B, T] float.
        config: uses sapo.tau_pos and sapo.tau_neg, both > 0.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: not used; the caller corrects.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": 0}: nothing is clipped.
    """
    assert_per_token(log_probs, old_log_probs, advantages)
    log_probs, old_log_probs, advantages = zero_masked(
        loss_mask, log_probs, old_log_probs, advantages
    )
    ratio = safe_exp(log_probs - old_log_probs)
    tau = jnp.where(advantages > 0, config.sapo.tau_pos, config.sapo.tau_neg)
    loss = -(4 / tau) * jax.nn.sigmoid(tau * (ratio - 1)) * advantages
    return loss, {"clip_ratio": jnp.zeros(())}


def _check(config: Any) -> Iterable[Problem]:
    for side in ("tau_pos", "tau_neg"):
        if not getattr(config.sapo, side) > 0:
            yield f"sapo.{side}", "must be > 0, e.g. 1.0"


ROW = Loss(
    sapo,
    lambda c: (
        f"-4/tau sigmoid(tau (r - 1)) A, tau = {c.sapo.tau_pos:g} where A > 0, "
        f"else {c.sapo.tau_neg:g}"
    ),
    paper="https://arxiv.org/abs/2511.20347",
    usual_reduction="sequence_mean",
    plain_at_one=True,
    check=_check,
)
