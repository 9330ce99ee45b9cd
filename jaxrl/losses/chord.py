"""CHORD: PPO on what was sampled and, beside it, likelihood of an expert's uncertain tokens."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import Array, BoolB, FloatBT, MaskBT, safe_exp, zero_masked
from jaxrl.losses.regular import regular
from jaxrl.losses.row import Loss, Problem, hyperparameters, odd_bounds, surrogate


def chord(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
    demonstrated: BoolB | None = None,
    *,
    mu: float = 0.1,
    weigh_uncertain: bool = True,
) -> tuple[FloatBT, dict[str, Array]]:
    """Mix two means over tokens: PPO's loss of samples, the negative log-prob of demonstrations.

        L     = (1 - mu) mean over sampled tokens of L_t + mu mean over demonstrated tokens of L_t
        L_t   = -min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)       of sampled rows
        L_t   = -sg[phi_t] log p_t,  phi_t = p_t (1 - p_t)                    of demonstrations
        p_t   = pi_theta(a_t | s_t),  r_t = p_t / pi_old(a_t | s_t)

    Zhang et al., 2025, https://arxiv.org/abs/2508.11408 (CHORD-phi, with its mu): phi leaves alone
    what the policy knows, and what it could only learn by forgetting. Demonstrations are no part of
    the group that samples are compared with, nor of anything else that an estimator or a critic
    looks at. CHORD-mu, without phi, lowers mu from 0.9 to 0.05 in its first 200 steps; here mu
    stays. Both means are of the minibatch: the loss is registered with batch_statistics and undoes
    the one mean of loss_reduction "token_mean".

    Args:
        log_probs, old_log_probs, advantages: [B, T] float, the whole minibatch.
        config: uses eps_clip_low, eps_clip_high, offsets from 1.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: not used; the caller corrects.
        demonstrated: [B], rows that the data gives; None = none.
        mu: weight of demonstrations, in [0, 1].
        weigh_uncertain: False = phi is 1.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": [B, T] 0/1 where clipping took effect}.
    """
    loss, metrics = regular(log_probs, old_log_probs, advantages, config, loss_mask)
    mask = jnp.ones_like(log_probs) if loss_mask is None else loss_mask
    (log_probs,) = zero_masked(mask, log_probs)
    rows = jnp.zeros(len(mask), bool) if demonstrated is None else demonstrated
    given = jnp.broadcast_to(rows[:, None], mask.shape)
    probability = jax.lax.stop_gradient(safe_exp(log_probs))
    phi = probability * (1 - probability) if weigh_uncertain else 1.0
    of_given, of_sampled = (
        weight * mask.sum() / jnp.maximum(jnp.sum(mask, where=part), 1)
        for weight, part in ((mu, given), (1 - mu, ~given))
    )
    mixed = jnp.where(given, -of_given * phi * log_probs, of_sampled * loss)
    return mixed, {"clip_ratio": metrics["clip_ratio"] & ~given}


def _formula(config: Any) -> str:
    chosen = hyperparameters(chord, config)
    mu, phi = chosen["mu"], "sg[p(1 - p)] " * bool(chosen["weigh_uncertain"])
    return (
        f"{surrogate(config)}, mean of samples, times {1 - mu:g}; of demonstrations "
        f"-{phi}log_probs, mean of theirs, times {mu:g}"
    )


def _check(config: Any) -> Iterable[Problem]:
    if not 0 <= hyperparameters(chord, config)["mu"] <= 1:
        yield "policy_loss_kwargs.mu", "must be in [0, 1], e.g. 0.1"


ROW = Loss(
    chord,
    _formula,
    paper="https://arxiv.org/abs/2508.11408",
    reductions=("token_mean",),
    whole_batch=True,
    demonstrations="apart",
    check=_check,
    odd=odd_bounds,
)
