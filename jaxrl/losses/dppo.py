"""DPPO: a trust region on the divergence, not on the ratio."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import Array, BoolBT, FloatBT, MaskBT, assert_per_token, safe_exp, zero_masked
from jaxrl.losses.row import PER_TOKEN, Loss, Problem


def dppo(
    log_probs: FloatBT,
    old_log_probs: FloatBT | None,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Drop a token where its step leaves the region in A's direction (divergence PPO).

        r_t = pi_theta(a_t | s_t) / pi_mu(a_t | s_t)      mu = the rollout policy if known, else old
        L_t = -r_t A_t, but 0 where A_t > 0, p > q and D > delta_high
                           or where A_t < 0, p < q and D > delta_low
        binary_tv: D = |p - q|,  binary_kl: D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    with p, q the probabilities of a_t under theta and mu. Qi et al., 2026,
    https://arxiv.org/abs/2602.04879. The bounds are of the divergence: 0.2 is usual for
    binary_tv, 0.05 for binary_kl. 1e-8 is added to 1 - q and 1 - p, and the log ratio is clamped to
    +-20 before exp.

    Args:
        log_probs, advantages: [B, T] float.
        old_log_probs: [B, T]; may be None where rollout_log_probs are given.
        config: uses dppo.dppo_type, dppo.delta_low, dppo.delta_high.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: [B, T] or None.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": [B, T] 0/1 dropped tokens}.

    Raises:
        ValueError: unknown dppo_type, or neither anchor is given.
    """
    anchor = old_log_probs if rollout_log_probs is None else rollout_log_probs
    if anchor is None:
        raise ValueError("policy loss 'dppo' needs rollout_log_probs or old_log_probs, got None")
    assert_per_token(log_probs, anchor, advantages)
    log_probs, anchor, advantages = zero_masked(loss_mask, log_probs, anchor, advantages)
    dropped = outside_trust_region(jax.lax.stop_gradient(log_probs), anchor, advantages, config)
    loss = -safe_exp(log_probs - anchor) * advantages
    return jnp.where(dropped, 0, loss), {"clip_ratio": dropped}


def outside_trust_region(
    log_probs: FloatBT, anchor: FloatBT, advantages: FloatBT, config: Any
) -> BoolBT:
    """Return which tokens [B, T] the advantage would push further out of the region."""
    bounds, p, q = config.dppo, jnp.exp(log_probs), jnp.exp(anchor)
    if bounds.dppo_type == "binary_tv":
        divergence = jnp.maximum(p - q, q - p)
    elif bounds.dppo_type == "binary_kl":
        others = jnp.log((1 - q + 1e-8) / (1 - p + 1e-8))
        divergence = q * (anchor - log_probs) + (1 - q) * others
    else:
        raise ValueError(
            f"Invalid DPPO type '{bounds.dppo_type}'. Must be 'binary_tv' or 'binary_kl'"
        )
    up = (advantages > 0) & (p > q) & (divergence > bounds.delta_high)
    return up | ((advantages < 0) & (p < q) & (divergence > bounds.delta_low))


def _formula(config: Any) -> str:
    c = config.dppo
    divergence = {"binary_tv": "|p - q|", "binary_kl": "KL of the binary q, p"}[c.dppo_type]
    return (
        f"-r A; 0 where {divergence} > {c.delta_high:g} (A > 0, p > q) or {c.delta_low:g} "
        "(A < 0, p < q)"
    )


def _check(config: Any) -> Iterable[Problem]:
    for side in ("delta_low", "delta_high"):
        if not getattr(config.dppo, side) >= 0:
            yield f"dppo.{side}", "must be 0 or more, e.g. 0.2"


ROW = Loss(
    dppo,
    _formula,
    paper="https://arxiv.org/abs/2602.04879",
    anchor=lambda c: "rollout",
    ratio=lambda c: [f"{PER_TOKEN}; p, q = exp of the two"],
    check=_check,
)
