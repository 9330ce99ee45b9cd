"""GSPO: importance ratios of whole sequences."""

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
    masked_mean,
    zero_masked,
)
from jaxrl.losses.regular import clipped_surrogate
from jaxrl.losses.row import PER_ROW, Loss, bounds, odd_bounds, surrogate


def gspo(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Give every token its sequence's ratio: group sequence policy optimization, token form.

        s   = mean_t (log pi_theta(a_t | s_t) - log pi_old(a_t | s_t))     over the sequence's mask
        r_t = exp(log pi_theta(a_t | s_t) - sg[log pi_theta(a_t | s_t)] + sg[s])
        L_t = -min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)

    Zheng et al., 2025, https://arxiv.org/abs/2507.18071 (eq. 13-14, GSPO-token). The exponent is
    clamped to at most 10. The paper averages over sequences (loss_reduction "sequence_mean") and
    clips at 3e-4 / 4e-4, not at the 0.2 that is usual for tokens.

    Args:
        log_probs, old_log_probs, advantages: [B, T] float.
        config: uses eps_clip_low, eps_clip_high.
        loss_mask: [B, T] tokens of the sequence mean; None = all.
        rollout_log_probs: not used.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": [B, T] 0/1 where clipping took effect}.
    """
    assert_per_token(log_probs, old_log_probs, advantages)
    log_probs, old_log_probs, advantages = zero_masked(
        loss_mask, log_probs, old_log_probs, advantages
    )
    log_ratio = masked_mean(log_probs - old_log_probs, loss_mask, axis=-1)[:, None]
    # the difference is exactly 0, so that no rounding parts the tokens of a sequence at the clip
    exponent = (log_probs - jax.lax.stop_gradient(log_probs)) + jax.lax.stop_gradient(log_ratio)
    ratio = jnp.exp(clamp(exponent, -jnp.inf, 10.0))
    loss, clipped = clipped_surrogate(ratio, advantages, config.eps_clip_low, config.eps_clip_high)
    return loss, {"clip_ratio": clipped}


def _odd(config: Any) -> Iterable[str]:
    if max(config.eps_clip_low, config.eps_clip_high) > 0.01:
        yield f"{bounds(config)}: gspo's ratio is of a sequence; its paper has 3e-4 and 4e-4"
    yield from odd_bounds(config)


ROW = Loss(
    gspo,
    surrogate,
    paper="https://arxiv.org/abs/2507.18071",
    ratio=lambda c: [PER_ROW],
    usual_reduction="sequence_mean",
    plain_at_one=True,
    odd=_odd,
)
