"""GPG: the plain policy gradient."""

from typing import Any

import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, zero_masked
from jaxrl.losses.row import Loss


def gpg(
    log_probs: FloatBT,
    old_log_probs: FloatBT | None,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Follow the policy gradient itself, without a ratio, a clip or an old policy (GPG).

        L_t = -A_t log pi_theta(a_t | s_t)

    Chu et al., 2025, https://arxiv.org/abs/2504.02546. The paper's advantages are R - mean R of a
    group, divided by the share of groups whose rewards differ: the scale is the estimator's.

    Args:
        log_probs, advantages: [B, T] float.
        old_log_probs: not used, may be None: no pass for them is needed.
        config: not used.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: not used; the caller corrects.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": 0}: nothing is clipped.
    """
    assert_per_token(log_probs, advantages)
    log_probs, advantages = zero_masked(loss_mask, log_probs, advantages)
    return -advantages * log_probs, {"clip_ratio": jnp.zeros(())}


ROW = Loss(
    gpg,
    lambda c: "-A log_probs",
    paper="https://arxiv.org/abs/2504.02546",
    anchor=lambda c: None,
)
