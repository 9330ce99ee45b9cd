"""LUFFY: answers of an expert in the group, whose improbable tokens count most."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxrl.array_ops import Array, BoolB, FloatBT, MaskBT, safe_exp, zero_masked
from jaxrl.losses.regular import regular
from jaxrl.losses.row import Loss, Problem, hyperparameters, odd_bounds, surrogate


def luffy(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
    demonstrated: BoolB | None = None,
    *,
    gamma: float = 0.1,
) -> tuple[FloatBT, dict[str, Array]]:
    """Clip what was sampled as PPO does; weigh demonstrations by their shaped probability.

        p_t = pi_theta(a_t | s_t),  r_t = p_t / pi_old(a_t | s_t)
        L_t = -min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)     of sampled rows
        L_t = -p_t / (p_t + gamma) A_t                                    of demonstrations

    Yan et al., 2025, https://arxiv.org/abs/2504.14945: the ratio of a demonstration is to an expert
    that is taken to be sure of each token. Its advantage is that within the group of the samples,
    so with a good demonstration the samples' own are lower. The slope gamma p / (p + gamma)^2 is
    highest at p = gamma: tokens that the policy does not know yet count more than without shaping.
    The authors' runs have no clip (eps_clip_high large), no deviation (grpo_norm_by_std=False) and
    sums over a fixed length (loss_reduction="seq_mean_token_sum_norm").

    Args:
        log_probs, old_log_probs, advantages: [B, T] float.
        config: uses eps_clip_low, eps_clip_high, offsets from 1.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: not used; the caller corrects.
        demonstrated: [B], rows that the data gives; None = none.
        gamma: > 0; the larger, the nearer to the plain probability, up to a factor.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": [B, T] 0/1 where clipping took effect}.
    """
    loss, metrics = regular(log_probs, old_log_probs, advantages, config, loss_mask)
    if demonstrated is None:
        return loss, metrics
    given = demonstrated[:, None]
    log_probs, advantages = zero_masked(loss_mask, log_probs, advantages)
    probability = safe_exp(log_probs)
    shaped = probability / (probability + gamma)
    return jnp.where(given, -shaped * advantages, loss), {
        "clip_ratio": metrics["clip_ratio"] & ~given
    }


def _formula(config: Any) -> str:
    gamma = hyperparameters(luffy, config)["gamma"]
    return f"{surrogate(config)}; of demonstrations -p/(p + {gamma:g}) A, p = exp(log_probs)"


def _check(config: Any) -> Iterable[Problem]:
    if not hyperparameters(luffy, config)["gamma"] > 0:
        yield "policy_loss_kwargs.gamma", "must be positive, e.g. 0.1"


ROW = Loss(
    luffy,
    _formula,
    paper="https://arxiv.org/abs/2504.14945",
    demonstrations="in the group",
    check=_check,
    odd=odd_bounds,
)
