"""GMPO: the geometric mean of a sequence's clipped ratios."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxrl.array_ops import (
    Array,
    FloatBT,
    MaskBT,
    assert_per_token,
    clamp,
    masked_mean,
    safe_exp,
    zero_masked,
)
from jaxrl.losses.row import Loss, bounds


def gmpo(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Clip token log ratios, then average them: geometric-mean policy optimization.

        d_t = log pi_theta(a_t | s_t) - log pi_old(a_t | s_t)
        e_t = min(d_t, eps_high) where A > 0,  max(d_t, -eps_low) where A < 0
        L_t = -exp(mean_t e_t) A                   over the sequence's mask; the same on every token

    Zhao et al., 2025, https://arxiv.org/abs/2507.20673. eps_low and eps_high are
    bounds of the LOG ratio; the paper's are 0.4 and 0.4. Where the two differ so does its Algorithm
    1: it takes the minimum of sgn(A) d and of that clipped to [-eps_low, eps_high], hence
    max(d_t, -eps_high) where A < 0; here, as for other losses, eps_low is the lower bound. A is
    constant over a sequence, and the reduction is "sequence_mean". The mean is clamped to +-20
    before exp.

    Args:
        log_probs, old_log_probs, advantages: [B, T] float.
        config: uses eps_clip_low, eps_clip_high.
        loss_mask: [B, T] tokens of the sequence mean; None = all.
        rollout_log_probs: not used: there is no off-policy correction of a geometric mean.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio", "clip_ratio_lower": [B, T] 0/1 where the
        upper or lower bound took effect}.
    """
    assert_per_token(log_probs, old_log_probs, advantages)
    log_probs, old_log_probs, advantages = zero_masked(
        loss_mask, log_probs, old_log_probs, advantages
    )
    log_ratio = log_probs - old_log_probs
    upper = clamp(log_ratio, -jnp.inf, config.eps_clip_high)
    lower = clamp(log_ratio, -config.eps_clip_low, jnp.inf)
    effective = jnp.where(advantages < 0, lower, upper)
    ratio = safe_exp(masked_mean(effective, loss_mask, axis=-1))[:, None]
    metrics = {
        "clip_ratio": (advantages > 0) & (upper != log_ratio),
        "clip_ratio_lower": (advantages < 0) & (lower != log_ratio),
    }
    return -ratio * advantages, metrics


def _odd(config: Any) -> Iterable[str]:
    if max(config.eps_clip_low, config.eps_clip_high) < 0.4:
        yield f"{bounds(config)}: gmpo bounds the log ratio; its paper has 0.4 and 0.4"


ROW = Loss(
    gmpo,
    lambda c: (
        f"-r A, e = min(d, {c.eps_clip_high:g}) where A > 0, "
        f"max(d, {-c.eps_clip_low:g}) where A < 0"
    ),
    paper="https://arxiv.org/abs/2507.20673",
    ratio=lambda c: ["r = exp(mean_t e), per row; d = log_probs - {anchor}_log_probs"],
    reductions=("sequence_mean",),
    uncorrected="there is none of a geometric mean",
    plain_at_one=True,
    odd=_odd,
)
