"""REINFORCE weighted by the ratio to the rollout policy, zero outside a band."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import Array, FloatBT, MaskBT, assert_per_token, safe_exp, zero_masked
from jaxrl.losses.row import Loss, Problem, bounds, odd_bounds


def rollout_is(
    log_probs: FloatBT,
    old_log_probs: FloatBT | None,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Correct sampler mismatch and staleness by one importance weight, with a double-sided mask.

        r_t = pi_theta(a_t | s_t) / pi_rollout(a_t | s_t)
        w_t = r_t if 1 - eps_low < r_t < 1 + eps_high, else 0
        L_t = -sg[w_t] A_t log pi_theta(a_t | s_t)

    GLM-5, 2026, https://arxiv.org/abs/2602.15763 (sec. 4.1.2), after IcePop. A token outside
    the band has no gradient. The log ratio is clamped to +-20 before exp.

    Args:
        log_probs, advantages: [B, T] float.
        old_log_probs: not used, may be None: no pass for them is needed.
        config: uses eps_clip_low, eps_clip_high.
        loss_mask: [B, T] or None; what is masked may be NaN.
        rollout_log_probs: [B, T], required.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": [B, T] 0/1 outside the band}.

    Raises:
        ValueError: no rollout_log_probs.
    """
    if rollout_log_probs is None:
        raise ValueError("policy loss 'rollout_is' needs rollout_log_probs, got None")
    assert_per_token(log_probs, rollout_log_probs, advantages)
    log_probs, rollout_log_probs, advantages = zero_masked(
        loss_mask, log_probs, rollout_log_probs, advantages
    )
    ratio = jax.lax.stop_gradient(safe_exp(log_probs - rollout_log_probs))
    inside = (ratio > 1 - config.eps_clip_low) & (ratio < 1 + config.eps_clip_high)
    return -jnp.where(inside, ratio, 0) * advantages * log_probs, {"clip_ratio": ~inside}


def _check(config: Any) -> Iterable[Problem]:
    if config.eps_clip_low == config.eps_clip_high == 0:
        fix = "and eps_clip_high=0: no ratio lies strictly inside the band; set e.g. 0.5 and 1.0"
        yield "eps_clip_low", fix


def _odd(config: Any) -> Iterable[str]:
    low, high = config.eps_clip_low, config.eps_clip_high
    if max(low, high) < 0.5:
        yield (
            f"{bounds(config)}: rollout_is drops every token whose ratio to the sampler is outside "
            f"of ({1 - low:g}, {1 + high:g}); GLM-5 and IcePop have a wide band, e.g. (0.5, 5): "
            "set 0.5 and 4.0"
        )
    yield from odd_bounds(config)


ROW = Loss(
    rollout_is,
    lambda c: (
        f"-sg[r] A log_probs where {1 - c.eps_clip_low:g} < r < {1 + c.eps_clip_high:g}, else 0"
    ),
    paper="GLM-5",
    anchor=lambda c: "rollout",
    check=_check,
    odd=_odd,
)
