"""TOPR: REINFORCE on what others sampled, tapered where the advantage is negative."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, masked_sum, zero_masked
from jaxrl.losses.row import Loss


def topr(
    log_probs: FloatBT,
    old_log_probs: FloatBT | None,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Weigh bad sequences by their ratio, at most 1, and good ones by 1: tapered REINFORCE.

        W     = prod_t pi_theta(a_t | s_t) / pi_rollout(a_t | s_t)     over the sequence's mask
        alpha = 1 where A_t >= 0, else min(W, 1)
        L_t   = -sg[alpha] A_t log pi_theta(a_t | s_t)

    Le Roux et al., 2025, https://arxiv.org/abs/2503.14286 (eq. 7-8, with its canonical limits). The
    paper's R is the reward, with or without a baseline: here what the estimator makes of it, A. The
    loss of a sequence is divided by its length (loss_reduction "sequence_mean"). Trinity-RFT takes
    the ratio of each token for W.

    Args:
        log_probs, advantages: [B, T] float.
        old_log_probs: not used, may be None: no pass for them is needed.
        config: not used.
        loss_mask: [B, T] tokens of the product; None = all. What is masked may be NaN.
        rollout_log_probs: [B, T], required.

    Returns:
        loss [B, T], unmasked and unreduced; metrics [B, T]: clip_ratio (0/1, a ratio above 1 was
        taken for 1), topr/alpha_mean.

    Raises:
        ValueError: no rollout_log_probs.
    """
    if rollout_log_probs is None:
        raise ValueError("policy loss 'topr' needs rollout_log_probs, got None")
    assert_per_token(log_probs, rollout_log_probs, advantages)
    log_probs, rollout_log_probs, advantages = zero_masked(
        loss_mask, log_probs, rollout_log_probs, advantages
    )
    log_ratio = jax.lax.stop_gradient(log_probs) - rollout_log_probs
    log_w = masked_sum(log_ratio, loss_mask, axis=-1)[:, None]
    bad = advantages < 0
    alpha = jnp.where(bad, jnp.exp(jnp.minimum(log_w, 0)), 1)
    metrics = {"clip_ratio": bad & (log_w > 0), "topr/alpha_mean": alpha}
    return -alpha * advantages * log_probs, metrics


ROW = Loss(
    topr,
    lambda c: "-sg[alpha] A log_probs, alpha = min(W, 1) where A < 0, else 1",
    paper="https://arxiv.org/abs/2503.14286",
    anchor=lambda c: "rollout",
    ratio=lambda c: ["W = exp(sum_t (log_probs - {anchor}_log_probs)), per row"],
    usual_reduction="sequence_mean",
    plain_at_one=True,
)
