"""Decoupled PPO: one policy weighs what another sampled, a third bounds the step."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, IntBT, MaskBT, assert_per_token, safe_exp, zero_masked
from jaxrl.losses.regular import clipped_surrogate
from jaxrl.losses.row import Loss, Problem, surrogate


def decoupled_ppo(
    log_probs: FloatBT,
    old_log_probs: FloatBT | None,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
    staleness: IntBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Clip around a recent policy, whatever the age of the one that sampled (decoupled PPO).

        r_t = pi_theta(a_t | s_t) / pi_prox(a_t | s_t)
        w_t = pi_prox(a_t | s_t) / pi_rollout(a_t | s_t) if that is at most behave_cap, else 0
        L_t = -sg[w_t] min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)
        "forward":    pi_prox = pi_old, the policy at the start of the step
        "log_linear": log pi_prox = log pi_rollout + a_t sg[log pi_theta - log pi_rollout],
                      a_t = d_t / (d_t + 1)

    with d_t the staleness of the token: the log-prob is taken to move evenly over d_t + 1 steps, of
    which the one under way is the last, so that pi_prox is, as in "forward", the policy at its
    start. A-3PO and AReaL have a_t = (d_t - 1) / d_t, 0 for d_t <= 1: their pi_theta is that policy
    and their pi_prox the one before. With one update on a batch pi_prox is pi_theta itself, which
    "forward" takes without a pass.
    AReaL, Fu et al., 2025, https://arxiv.org/abs/2505.24298; A-3PO, Li et al., 2025,
    https://arxiv.org/abs/2512.06547, needs no forward pass. Log ratios are clamped to +-20.

    Args:
        log_probs, advantages: [B, T] float.
        old_log_probs: [B, T]; None is possible with "log_linear".
        config: uses eps_clip_low, eps_clip_high, decoupled_ppo.proximal, decoupled_ppo.behave_cap.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: [B, T], required. staleness: [B, T] int, "log_linear" needs it.

    Returns:
        loss [B, T], unmasked and unreduced; metrics [B, T]: clip_ratio, behave_masked (0/1),
        behave_weight_mean, behave_weight_max of pi_prox / pi_rollout.

    Raises:
        ValueError: unknown proximal policy, or what it needs is None.
    """
    if rollout_log_probs is None:
        raise ValueError("policy loss 'decoupled_ppo' needs rollout_log_probs, got None")
    assert_per_token(log_probs, rollout_log_probs, advantages)
    log_probs, rollout, advantages = zero_masked(
        loss_mask, log_probs, rollout_log_probs, advantages
    )
    old = None if old_log_probs is None else zero_masked(loss_mask, old_log_probs)[0]
    proximal = proximal_log_probs(log_probs, old, rollout, staleness, config.decoupled_ppo.proximal)
    weight = jax.lax.stop_gradient(safe_exp(proximal - rollout))
    trusted = weight <= config.decoupled_ppo.behave_cap
    ratio = safe_exp(log_probs - proximal)
    loss, clipped = clipped_surrogate(ratio, advantages, config.eps_clip_low, config.eps_clip_high)
    weights = {"behave_weight_mean": weight, "behave_weight_max": weight, "behave_masked": ~trusted}
    return jnp.where(trusted, weight, 0) * loss, {"clip_ratio": clipped, **weights}


def proximal_log_probs(
    log_probs: FloatBT, old: FloatBT | None, rollout: FloatBT, staleness: IntBT | None, kind: str
) -> FloatBT:
    """Return log-probs [B, T], without gradient, of the policy that the ratio is clipped around."""
    if kind == "forward":
        if old is None:
            raise ValueError("decoupled_ppo.proximal='forward' needs old_log_probs, got None")
        return old
    if kind != "log_linear":
        raise ValueError(f"decoupled_ppo.proximal='{kind}' must be 'forward' or 'log_linear'")
    if staleness is None:
        raise ValueError(
            "decoupled_ppo.proximal='log_linear' needs the staleness of each token, and the "
            "generator gives no 'token_versions' in its output; set 'forward', or give them"
        )
    moved = staleness / (staleness + 1.0)
    return rollout + moved * (jax.lax.stop_gradient(log_probs) - rollout)


def _ratio(config: Any) -> Sequence[str]:
    """Describe the two ratios, and the policy between them."""
    ratios = "r = exp(log_probs - {0}), v = exp({0} - rollout_log_probs)"
    if config.decoupled_ppo.proximal == "forward":
        return [ratios.format("old_log_probs")]
    between = "rollout_log_probs + d / (d + 1) sg[log_probs - rollout_log_probs]"
    return [ratios.format("prox"), f"prox = {between}", "d = staleness of the token, in steps"]


def _check(config: Any) -> Iterable[Problem]:
    if not config.decoupled_ppo.behave_cap >= 1:
        fix = "must be 1 or more, the weight where the policies are the same; e.g. 5.0"
        yield "decoupled_ppo.behave_cap", fix
    if config.old_log_probs == "rollout" and config.decoupled_ppo.proximal == "forward":
        yield (
            "old_log_probs",
            "policy_loss_type='decoupled_ppo' would be clipped around the sampler itself, which is "
            "'regular'; set 'trainer', or decoupled_ppo.proximal='log_linear', which needs no "
            "forward pass either",
        )


def _odd_alone(config: Any) -> Iterable[str]:
    if config.decoupled_ppo.proximal == "log_linear":
        yield (
            "decoupled_ppo.proximal='log_linear' with one update on each batch: the policy at its "
            "start is the policy itself, which 'forward' takes without a pass of its own; the "
            "estimate of it only clips more; set 'forward'"
        )


ROW = Loss(
    decoupled_ppo,
    lambda c: f"sg[v] {surrogate(c)} where v <= {c.decoupled_ppo.behave_cap:g}, else 0",
    paper="https://arxiv.org/abs/2505.24298",
    anchor=lambda c: "rollout" if c.decoupled_ppo.proximal == "log_linear" else "old",
    ratio=_ratio,
    corrects_itself=True,
    check=_check,
    odd_alone=_odd_alone,
)
