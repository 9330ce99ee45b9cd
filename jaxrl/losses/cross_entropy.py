"""Negative log-likelihood of the response tokens."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, zero_masked
from jaxrl.losses.row import Loss


def cross_entropy(
    log_probs: FloatBT,
    old_log_probs: FloatBT | None = None,
    advantages: FloatBT | None = None,
    config: Any = None,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Compute the supervised loss; of the arguments that all losses share it uses the first alone.

        L_t = -log pi_theta(a_t | s_t)

    Args:
        log_probs: [B, T] float.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": 0}, as every loss that clips nothing.
    """
    assert_per_token(log_probs)
    (log_probs,) = zero_masked(loss_mask, log_probs)
    return -log_probs, {"clip_ratio": jnp.zeros(())}


def _odd(config: Any) -> Iterable[str]:
    yield (
        "policy_loss_type='cross_entropy': all sampled tokens are trained alike; rewards and "
        f"advantage_estimator={config.advantage_estimator!r} have no effect"
    )


ROW = Loss(
    cross_entropy,
    lambda c: "-log_probs",
    anchor=lambda c: None,
    uncorrected="it has no ratio",
    odd=_odd,
)
