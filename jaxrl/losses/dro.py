"""DRO: the policy gradient with a quadratic penalty on the log ratio."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, zero_masked
from jaxrl.losses.row import Loss, Problem, hyperparameters


def dro(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
    *,
    beta: float,
) -> tuple[FloatBT, dict[str, Array]]:
    """Hold the policy near the old one by the square of the log ratio: direct reward optimization.

        L_t = -(A_t log pi_theta(a_t | s_t)
                - beta / 2 (log pi_theta(a_t | s_t) - log pi_old(a_t | s_t))^2)

    verl, docs/algo/dro.md, after Richemond et al., 2024, https://arxiv.org/abs/2405.19107.
    The paper's loss is that of a whole sequence, its log ratio is to the reference policy, and A is
    R - V with a value V that is learned along; this is its gradient, divided by beta, for tokens,
    the old policy and the advantages of an estimator.

    Args:
        log_probs, old_log_probs, advantages: [B, T] float.
        config: not used.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: not used; the caller corrects.
        beta: weight of the penalty, > 0; neither source has a default.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": 0}: nothing is clipped.
    """
    assert_per_token(log_probs, old_log_probs, advantages)
    log_probs, old_log_probs, advantages = zero_masked(
        loss_mask, log_probs, old_log_probs, advantages
    )
    penalty = beta / 2 * jnp.square(log_probs - old_log_probs)
    return penalty - advantages * log_probs, {"clip_ratio": jnp.zeros(())}


def _formula(config: Any) -> str:
    beta = hyperparameters(dro, config).get("beta")
    weight = "beta/2" if beta is None else f"{beta / 2:g}"
    return f"-A log_probs + {weight} (log r)^2"


def _check(config: Any) -> Iterable[Problem]:
    beta = hyperparameters(dro, config).get("beta")
    if beta is None or not beta > 0:
        yield "policy_loss_kwargs.beta", "must be > 0; it has no default: set e.g. 0.1"


ROW = Loss(
    dro,
    _formula,
    paper="https://arxiv.org/abs/2405.19107",
    plain_at_one=True,
    check=_check,
)
