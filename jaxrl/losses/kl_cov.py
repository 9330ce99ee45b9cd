"""KL-Cov: a KL penalty for the tokens of highest covariance."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxrl.array_ops import (
    Array,
    BoolBT,
    FloatBT,
    IntB,
    MaskBT,
    absolute,
    assert_per_token,
    top_tokens,
    zero_masked,
)
from jaxrl.losses.clip_cov import token_covariance
from jaxrl.losses.row import PER_TOKEN, Loss, Problem


def kl_cov(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
    row_ids: IntB | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Compute the policy gradient with a penalty on tokens that drive the entropy down; no clip.

        r_t   = pi_theta(a_t | s_t) / pi_old(a_t | s_t)
        cov_t = (A_t - mean A) (log pi_theta(a_t | s_t) - mean log pi_theta)
        L_t   = -r_t A_t + ppo_kl_coef |log r_t| [t among the k of highest cov]
        k     = max(1, floor(kl_cov_frac * tokens))

    Cui et al., 2025, https://arxiv.org/abs/2505.22617. The means and k are those of
    the minibatch: the loss is registered with batch_statistics. Equal covariances are ranked by
    row id and position, so padding and the order of rows change nothing.

    Args:
        log_probs, old_log_probs, advantages: [B, T] float, the whole minibatch.
        config: uses kl_cov.kl_cov_frac and kl_cov.ppo_kl_coef.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: not used.
        row_ids: [B] int32, number of the row in its minibatch; None = 0, 1, 2 ...

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": 0}: nothing is clipped.
    """
    assert_per_token(log_probs, old_log_probs, advantages)
    mask = jnp.ones_like(log_probs) if loss_mask is None else loss_mask
    log_probs, old_log_probs, advantages = zero_masked(mask, log_probs, old_log_probs, advantages)
    log_ratio = log_probs - old_log_probs
    covariance = token_covariance(log_probs, advantages, mask)
    penalized = highest(covariance, mask, config.kl_cov.kl_cov_frac, row_ids)
    penalty = config.kl_cov.ppo_kl_coef * absolute(log_ratio)
    loss = -jnp.exp(log_ratio) * advantages + jnp.where(penalized, penalty, 0)
    return loss, {"clip_ratio": jnp.zeros(())}


def highest(covariance: FloatBT, mask: MaskBT, fraction: float, row_ids: IntB | None) -> BoolBT:
    """Mark the max(1, floor(fraction * tokens)) tokens of highest covariance, [B, T] bool."""
    valid = mask > 0
    row_ids = jnp.arange(mask.shape[0]) if row_ids is None else row_ids
    count = jnp.maximum(jnp.floor(fraction * valid.sum()), 1)
    return top_tokens(covariance, valid, count, row_ids)


def _check(config: Any) -> Iterable[Problem]:
    if not 0 < config.kl_cov.kl_cov_frac <= 1:
        yield "kl_cov.kl_cov_frac", "must be in (0, 1]"
    if not config.kl_cov.ppo_kl_coef >= 0:
        yield "kl_cov.ppo_kl_coef", "must be 0 or more: a negative one rewards the distance"


ROW = Loss(
    kl_cov,
    lambda c: (
        f"-r A, + {c.kl_cov.ppo_kl_coef:g} |log r| for the {c.kl_cov.kl_cov_frac:g} of the tokens "
        "with highest cov"
    ),
    paper="https://arxiv.org/abs/2505.22617",
    ratio=lambda c: [f"{PER_TOKEN}; cov = (A - mean A)(log_probs - mean)"],
    uncorrected="it chooses tokens by its own statistics of the minibatch",
    whole_batch=True,
    plain_at_one=True,
    check=_check,
)
