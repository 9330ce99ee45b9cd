"""M2PO: a trust region on the second moment of the log ratios of a minibatch."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import (
    Array,
    BoolBT,
    FloatBT,
    MaskBT,
    assert_per_token,
    largest,
    safe_exp,
    zero_masked,
)
from jaxrl.losses.row import Loss, Problem, hyperparameters


def m2po(
    log_probs: FloatBT,
    old_log_probs: FloatBT | None,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
    *,
    tau: float = 0.04,
) -> tuple[FloatBT, dict[str, Array]]:
    """Drop the few tokens that moved farthest, until the others are near the sampler (M2PO).

        r_t = pi_theta(a_t | s_t) / pi_rollout(a_t | s_t)
        T   = tokens with A_t > 0, r_t > 1 or A_t < 0, r_t < 1: those that a clip could reach
        M_t = 0 for the tokens of T with the largest (log r_t)^2, as few as make the mean of
              (log r_t)^2 over the rest of T at most tau; else 1
        L_t = -M_t r_t A_t

    Zheng et al., 2025, https://arxiv.org/abs/2510.01161 (algorithm 1, eq. 5). T is that of the
    minibatch; of its tokens that are equally far, all stay or none. A dropped token still counts in
    the reduction, as in the paper. AReaL looks at all tokens for T and at the ratio of proximal
    policy and sampler; the authors' code turns the drop into two bounds of a clip. The log ratio is
    clamped to +-20 before exp.

    Args:
        log_probs, advantages: [B, T] float, the whole minibatch.
        old_log_probs: not used, may be None: no pass for them is needed.
        config: not used.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: [B, T], required.
        tau: bound of the mean, > 0.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": [B, T] 0/1 dropped tokens}.

    Raises:
        ValueError: no rollout_log_probs.
    """
    if rollout_log_probs is None:
        raise ValueError("policy loss 'm2po' needs rollout_log_probs, got None")
    assert_per_token(log_probs, rollout_log_probs, advantages)
    log_probs, rollout_log_probs, advantages = zero_masked(
        loss_mask, log_probs, rollout_log_probs, advantages
    )
    log_ratio = log_probs - rollout_log_probs
    constrained = log_ratio * advantages > 0  # the masked are 0, hence outside
    dropped = farthest(jax.lax.stop_gradient(jnp.square(log_ratio)), constrained, tau)
    return jnp.where(dropped, 0, -safe_exp(log_ratio) * advantages), {"clip_ratio": dropped}


def farthest(distance: FloatBT, constrained: BoolBT, tau: float) -> BoolBT:
    """Mark the fewest constrained tokens [B, T] that leave a mean distance of at most tau.

    Args:
        distance: [B, T], 0 or more.
    """
    # floats that are not negative have the order of their bits
    keys = jax.lax.bitcast_convert_type(distance, f"uint{8 * distance.dtype.itemsize}")

    def near_enough(limit: Array) -> Array:
        """Return whether the mean up to a limit is at most tau; the farther, the larger it is."""
        return jnp.where(constrained & (keys <= limit), distance - tau, 0).sum() <= 0

    limit = largest(near_enough, jnp.iinfo(keys.dtype).bits, jnp.zeros((), keys.dtype))
    return constrained & (keys > limit)


def _formula(config: Any) -> str:
    tau = hyperparameters(m2po, config)["tau"]
    return f"-r A; where A log r > 0, 0 for the largest (log r)^2 until the mean is <= {tau:g}"


def _check(config: Any) -> Iterable[Problem]:
    if not hyperparameters(m2po, config)["tau"] > 0:
        yield "policy_loss_kwargs.tau", "must be > 0, e.g. 0.04"


ROW = Loss(
    m2po,
    _formula,
    paper="https://arxiv.org/abs/2510.01161",
    anchor=lambda c: "rollout",
    whole_batch=True,
    plain_at_one=True,
    check=_check,
)
