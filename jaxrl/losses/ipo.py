"""prime-rl's IPO: a trust region on probabilities, whatever the sign of the advantage."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, safe_exp, zero_masked
from jaxrl.losses.row import PER_TOKEN, Loss, Problem, hyperparameters


def ipo(
    log_probs: FloatBT,
    old_log_probs: FloatBT | None,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
    *,
    threshold: float = 0.1,
    kl_tau: float = 1e-3,
) -> tuple[FloatBT, dict[str, Array]]:
    """Drop tokens whose probability has moved, and hold all of them near the sampler (IPO).

        u_t = p_t / q_t,  p_t = pi_theta(a_t | s_t),  q_t = pi_rollout(a_t | s_t)
        L_t = -[|p_t - q_t| <= threshold] u_t A_t + kl_tau (log u_t)^2

    prime-rl, PrimeIntellect, 2026, https://github.com/PrimeIntellect-ai/prime-rl, ipo_loss_fn; the
    penalty is that of Kimi K2.5, https://arxiv.org/abs/2602.02276. Not the identity preference
    optimization of the same name. The log ratio is clamped to +-20 before exp.

    Args:
        log_probs, advantages: [B, T] float.
        old_log_probs: not used, may be None: no pass for them is needed.
        config: not used.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: [B, T], required.
        threshold: of the probabilities' difference, 0 or more.
        kl_tau: weight of the penalty, 0 or more.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": [B, T] 0/1 dropped tokens}.

    Raises:
        ValueError: no rollout_log_probs.
    """
    if rollout_log_probs is None:
        raise ValueError("policy loss 'ipo' needs rollout_log_probs, got None")
    assert_per_token(log_probs, rollout_log_probs, advantages)
    log_probs, rollout_log_probs, advantages = zero_masked(
        loss_mask, log_probs, rollout_log_probs, advantages
    )
    log_ratio = log_probs - rollout_log_probs
    dropped = jnp.abs(jnp.exp(log_probs) - jnp.exp(rollout_log_probs)) > threshold
    gain = jnp.where(dropped, 0, safe_exp(log_ratio) * advantages)
    return kl_tau * jnp.square(log_ratio) - gain, {"clip_ratio": dropped}


def _formula(config: Any) -> str:
    p = hyperparameters(ipo, config)
    return f"-r A where |p - q| <= {p['threshold']:g}, else 0; + {p['kl_tau']:g} (log r)^2"


def _check(config: Any) -> Iterable[Problem]:
    p = hyperparameters(ipo, config)
    for name in ("threshold", "kl_tau"):
        if not p[name] >= 0:
            yield f"policy_loss_kwargs.{name}", "must be 0 or more, e.g. 0.1 and 1e-3"


ROW = Loss(
    ipo,
    _formula,
    paper="https://github.com/PrimeIntellect-ai/prime-rl",
    anchor=lambda c: "rollout",
    ratio=lambda c: [f"{PER_TOKEN}; p, q = exp of the two"],
    plain_at_one=True,
    check=_check,
)
