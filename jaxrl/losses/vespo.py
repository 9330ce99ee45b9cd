"""VESPO: a smooth weight of each sequence's importance ratio."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import (
    Array,
    FloatBT,
    MaskBT,
    assert_per_token,
    clamp,
    masked_sum,
    zero_masked,
)
from jaxrl.losses.row import Loss, Problem, hyperparameters


def vespo(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> tuple[FloatBT, dict[str, Array]]:
    """Weigh a sequence by a smooth function of its ratio that fades on both sides of 1 (VESPO).

        W   = prod_t pi_theta(a_t | s_t) / mu(a_t | s_t)            over the sequence's mask
        phi = W^k exp(lambda (1 - W)),  k, lambda of the sign of A_t, that of 0 as positive
        L_t = -sg[phi] A_t log pi_theta(a_t | s_t)

    Shen et al., 2026, https://arxiv.org/abs/2602.10693 (eq. 20); k and lambda are its c_1 and c_2,
    mu the behaviour policy: here old, or the sampler with old_log_probs="rollout". The authors'
    code and TRL average over the tokens of the minibatch (loss_reduction "token_mean"). Log ratios
    of tokens are clamped to +-20 and their sum, as in TRL, to [log 1e-8, 20].

    Args:
        log_probs, old_log_probs, advantages: [B, T] float.
        config: not used.
        loss_mask: [B, T] tokens of the product; None = all. What is masked may be NaN.
        rollout_log_probs: not used.
        k_pos, k_neg: how fast phi fades below W = 1, where A >= 0 and where A < 0; 0 or more.
        lambda_pos, lambda_neg: how fast it fades above; > 0.

    Returns:
        loss [B, T], unmasked and unreduced; metrics [B, T]: clip_ratio (0: nothing is clipped),
        vespo/phi_mean.
    """
    assert_per_token(log_probs, old_log_probs, advantages)
    log_probs, old_log_probs, advantages = zero_masked(
        loss_mask, log_probs, old_log_probs, advantages
    )
    log_ratio = clamp(jax.lax.stop_gradient(log_probs) - old_log_probs, -20.0, 20.0)
    log_w = clamp(masked_sum(log_ratio, loss_mask, axis=-1), jnp.log(1e-8), 20.0)[:, None]
    k = jnp.where(advantages >= 0, k_pos, k_neg)
    fade = jnp.where(advantages >= 0, lambda_pos, lambda_neg)
    phi = jnp.exp(k * log_w + fade * (1 - jnp.exp(log_w)))
    return -phi * advantages * log_probs, {"clip_ratio": jnp.zeros(()), "vespo/phi_mean": phi}


def _formula(config: Any) -> str:
    p = hyperparameters(vespo, config)
    return (
        f"-sg[W^k exp(lambda (1 - W))] A log_probs, k = {p['k_pos']:g}, lambda = "
        f"{p['lambda_pos']:g} where A >= 0, else {p['k_neg']:g}, {p['lambda_neg']:g}"
    )


def _check(config: Any) -> Iterable[Problem]:
    p = hyperparameters(vespo, config)
    for name in ("k_pos", "k_neg"):
        if not p[name] >= 0:
            yield f"policy_loss_kwargs.{name}", "must be 0 or more, e.g. 2.0"
    for name in ("lambda_pos", "lambda_neg"):
        if not p[name] > 0:
            yield f"policy_loss_kwargs.{name}", "must be > 0, e.g. 3.0"


ROW = Loss(
    vespo,
    _formula,
    paper="https://arxiv.org/abs/2602.10693",
    ratio=lambda c: ["W = exp(sum_t (log_probs - {anchor}_log_probs)), per row"],
    usual_reduction="token_mean",
    uncorrected="the difference to the sampler belongs in W: set old_log_probs='rollout'",
    plain_at_one=True,
    check=_check,
)
