"""The plain importance-weighted policy gradient."""

from typing import Any

import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, zero_masked
from jaxrl.losses.row import Loss


def importance_sampling(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any = None,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Weigh by the ratio without any clip or clamp; one update per batch keeps it near 1.

        L_t = -(pi_theta(a_t | s_t) / pi_old(a_t | s_t)) A_t

    Tinker's loss of this name, https://tinker-docs.thinkingmachines.ai/losses; for two policies
    Kakade & Langford, 2002. exp may overflow: such an update is skipped as not finite.

    Args:
        log_probs, old_log_probs, advantages: [B, T] float.
        config: not used.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: not used.

    Returns:
        loss [B, T], unmasked and unreduced; {"importance_ratio": [B, T]}.
    """
    assert_per_token(log_probs, old_log_probs, advantages)
    log_probs, old_log_probs, advantages = zero_masked(
        loss_mask, log_probs, old_log_probs, advantages
    )
    ratio = jnp.exp(log_probs - old_log_probs)
    return -ratio * advantages, {"importance_ratio": ratio}


ROW = Loss(importance_sampling, lambda c: "-r A")
