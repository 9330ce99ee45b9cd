"""CISPO: REINFORCE with a clipped importance weight."""

from collections.abc import Iterable
from typing import Any

import jax

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, clamp, safe_exp, zero_masked
from jaxrl.losses.row import Loss, Problem


def cispo(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Clip importance-sampling weights (CISPO): the weight is bounded, no token loses its gradient.

        r_t = pi_theta(a_t | s_t) / pi_mu(a_t | s_t)          mu = old, or the rollout policy
        L_t = -sg[clip(r_t, 1 - eps_low, 1 + eps_high)] A_t log pi_theta(a_t | s_t)

    MiniMax, 2025, https://arxiv.org/abs/2506.13585 (eq. 4-5). With the default bounds 1 and 4 the
    weight lies in [0, 5]; 0 and 5, SkyRL's documented default, would mean [1, 6]. The log ratio is
    clamped to +-20 before exp.

    Args:
        log_probs, old_log_probs, advantages: [B, T] float.
        config: uses cispo.cispo_eps_clip_low, cispo.cispo_eps_clip_high and cispo.cispo_anchor,
            "old" or "rollout"; the second is itself the off-policy correction.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: [B, T], the anchor "rollout" needs them.

    Returns:
        loss [B, T], unmasked and unreduced; metrics [B, T]: clip_ratio (0/1, weight outside the
        bounds), cispo/ratio_mean, cispo/ratio_max, cispo/ratio_min of r, cispo/ratio_clamped_mean.

    Raises:
        ValueError: unknown anchor, or no rollout_log_probs for the anchor "rollout".
    """
    anchor = anchor_log_probs(old_log_probs, rollout_log_probs, config.cispo.cispo_anchor)
    assert_per_token(log_probs, anchor, advantages)
    log_probs, anchor, advantages = zero_masked(loss_mask, log_probs, anchor, advantages)
    ratio = jax.lax.stop_gradient(safe_exp(log_probs - anchor))
    low, high = 1 - config.cispo.cispo_eps_clip_low, 1 + config.cispo.cispo_eps_clip_high
    weight = clamp(ratio, low, high)
    metrics = {
        "clip_ratio": (ratio < low) | (ratio > high),
        "cispo/ratio_mean": ratio,
        "cispo/ratio_clamped_mean": weight,
        "cispo/ratio_max": ratio,
        "cispo/ratio_min": ratio,
    }
    return -weight * advantages * log_probs, metrics


def anchor_log_probs(old: FloatBT, rollout: FloatBT | None, anchor: str) -> FloatBT:
    """Return the log-probs that the ratio is taken against."""
    if anchor == "old":
        return old
    if anchor != "rollout":
        raise ValueError(f"cispo.cispo_anchor='{anchor}' must be 'old' or 'rollout'")
    if rollout is None:
        raise ValueError("cispo.cispo_anchor='rollout' needs rollout_log_probs, got None")
    return rollout


def _formula(config: Any) -> str:
    low, high = config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high
    return f"-sg[clip(r, {1 - low:g}, {1 + high:g})] A log_probs"


def _check(config: Any) -> Iterable[Problem]:
    for side in ("cispo_eps_clip_low", "cispo_eps_clip_high"):
        if not getattr(config.cispo, side) >= 0:
            yield f"cispo.{side}", "must be 0 or more, e.g. 1.0 and 4.0"


def _odd(config: Any) -> Iterable[str]:
    if config.cispo.cispo_eps_clip_low == 0:
        yield "cispo.cispo_eps_clip_low=0: no weight is below 1; 1.0 is no lower bound"


ROW = Loss(
    cispo,
    _formula,
    paper="https://arxiv.org/abs/2506.13585",
    anchor=lambda c: c.cispo.cispo_anchor,
    anchor_setting="cispo.cispo_anchor='rollout'",
    plain_at_one=True,
    check=_check,
    odd=_odd,
)
