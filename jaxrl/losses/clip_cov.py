"""Clip-Cov: no gradient for a few tokens of high covariance."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import (
    Array,
    BoolBT,
    FloatBT,
    FloatScalar,
    IntB,
    MaskBT,
    assert_per_token,
    masked_mean,
    top_tokens,
    zero_masked,
)
from jaxrl.losses.regular import clipped_surrogate
from jaxrl.losses.row import PER_TOKEN, Loss, Problem, odd_bounds, surrogate


def clip_cov(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
    key: Array | None = None,
    row_ids: IntB | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Compute PPO's loss, but drop a random few of the tokens that drive the entropy down.

        r_t   = pi_theta(a_t | s_t) / pi_old(a_t | s_t)
        cov_t = (A_t - mean A) (log pi_theta(a_t | s_t) - mean log pi_theta)
        L_t   = -min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t),
                but 0 for k random tokens with clip_cov_lb < cov_t < clip_cov_ub that PPO leaves
        k     = max(1, floor(clip_ratio * tokens))

    Cui et al., 2025, https://arxiv.org/abs/2505.22617. The means and k are those of
    the minibatch: the loss is registered with batch_statistics. Draws depend on (key, row id,
    position), not on shapes, so padding and the order of rows change nothing.

    Args:
        log_probs, old_log_probs, advantages: [B, T] float, the whole minibatch.
        config: uses eps_clip_low, eps_clip_high, clip_cov.clip_ratio, clip_cov.clip_cov_lb,
            clip_cov.clip_cov_ub.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: not used.
        key: PRNG key, required.
        row_ids: [B] int32, number of the row in its minibatch; None = 0, 1, 2 ...

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": [B, T] 0/1 dropped tokens}.

    Raises:
        ValueError: no key.
    """
    if key is None:
        raise ValueError("policy loss 'clip_cov' draws tokens and needs key, got None")
    assert_per_token(log_probs, old_log_probs, advantages)
    mask = jnp.ones_like(log_probs) if loss_mask is None else loss_mask
    log_probs, old_log_probs, advantages = zero_masked(mask, log_probs, old_log_probs, advantages)
    ratio = jnp.exp(log_probs - old_log_probs)
    loss, clipped = clipped_surrogate(ratio, advantages, config.eps_clip_low, config.eps_clip_high)
    covariance = token_covariance(log_probs, advantages, mask)
    candidates, count = drop_candidates(covariance, clipped, mask, config.clip_cov)
    dropped = draw(candidates, count, key, row_ids)
    return jnp.where(dropped, 0, loss), {"clip_ratio": dropped}


def token_covariance(log_probs: FloatBT, advantages: FloatBT, mask: MaskBT) -> FloatBT:
    """Return each token's part [B, T] of the covariance of advantage and log-prob; no gradient."""
    log_probs = jax.lax.stop_gradient(log_probs)
    return (advantages - masked_mean(advantages, mask)) * (log_probs - masked_mean(log_probs, mask))


def drop_candidates(
    covariance: FloatBT, clipped: BoolBT, mask: MaskBT, config: Any
) -> tuple[BoolBT, FloatScalar]:
    """Return which tokens [B, T] may be dropped, and how many are to be []."""
    inside = (covariance > config.clip_cov_lb) & (covariance < config.clip_cov_ub)
    return inside & ~clipped & (mask > 0), jnp.maximum(jnp.floor(config.clip_ratio * mask.sum()), 1)


def draw(candidates: BoolBT, count: FloatScalar, key: Array, row_ids: IntB | None = None) -> BoolBT:
    """Draw `count` of the candidates [B, T] at random, by (key, row id, position)."""
    rows, length = candidates.shape
    row_ids = jnp.arange(rows) if row_ids is None else row_ids

    def bits(row: Array, position: Array) -> Array:
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, row), position))

    grid = jax.vmap(jax.vmap(bits, (None, 0)), (0, None))
    return top_tokens(grid(row_ids, jnp.arange(length)), candidates, count, row_ids)


def _formula(config: Any) -> str:
    c = config.clip_cov
    return (
        f"{surrogate(config)}; 0 for {c.clip_ratio:g} of the tokens, random with "
        f"{c.clip_cov_lb:g} < cov < {c.clip_cov_ub:g}"
    )


def _check(config: Any) -> Iterable[Problem]:
    c = config.clip_cov
    if not 0 < c.clip_ratio <= 1:
        yield "clip_cov.clip_ratio", "must be in (0, 1]"
    if c.clip_cov_lb >= c.clip_cov_ub:
        fix = f"must be below clip_cov_ub={c.clip_cov_ub}: no token would be dropped"
        yield "clip_cov.clip_cov_lb", fix


ROW = Loss(
    clip_cov,
    _formula,
    paper="https://arxiv.org/abs/2505.22617",
    ratio=lambda c: [f"{PER_TOKEN}; cov = (A - mean A)(log_probs - mean)"],
    uncorrected="it chooses tokens by its own statistics of the minibatch",
    whole_batch=True,
    check=_check,
    odd=odd_bounds,
)
