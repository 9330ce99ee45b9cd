"""LUSPO: GSPO that weighs every token alike, in short sequences and long ones."""

from collections.abc import Iterable
from typing import Any

from jaxrl.array_ops import Array, FloatBT, MaskBT
from jaxrl.losses.gspo import gspo
from jaxrl.losses.row import PER_ROW, Loss, bounds, odd_bounds, surrogate


def luspo(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    config: Any,
    loss_mask: MaskBT | None = None,
    rollout_log_probs: FloatBT | None = None,
) -> tuple[FloatBT, dict[str, Array]]:
    """Scale GSPO's loss of a sequence by its length: length-unbiased sequence policy optimization.

        s   = exp(mean_t (log pi_theta(a_t | s_t) - log pi_old(a_t | s_t)))    over the mask
        L_t = -min(s A, clip(s, 1 - eps_low, 1 + eps_high) A) |y|

    with |y| the number of the sequence's tokens under the mask. Liu et al., 2026,
    https://arxiv.org/abs/2602.05261 (eq. 7), averaged over sequences (loss_reduction
    "sequence_mean"). The ratio has GSPO's token form; its gradient is the same where A is constant
    over a sequence. The paper's bounds are 2e-3 and 2.5e-3.

    Args:
        log_probs, old_log_probs, advantages: [B, T] float.
        config: uses eps_clip_low, eps_clip_high.
        loss_mask: [B, T] tokens of the sequence; None = all. What is masked may be NaN.
        rollout_log_probs: not used; the caller corrects.

    Returns:
        loss [B, T], unmasked and unreduced; {"clip_ratio": [B, T] 0/1 where clipping took effect}.
    """
    loss, metrics = gspo(log_probs, old_log_probs, advantages, config, loss_mask)
    tokens = loss.shape[-1] if loss_mask is None else loss_mask.sum(-1, keepdims=True)
    return loss * tokens, metrics


def _odd(config: Any) -> Iterable[str]:
    if max(config.eps_clip_low, config.eps_clip_high) > 0.05:
        yield f"{bounds(config)}: luspo's ratio is of a sequence; its paper has 2e-3 and 2.5e-3"
    yield from odd_bounds(config)


ROW = Loss(
    luspo,
    lambda c: f"{surrogate(c)} |y|, |y| = tokens of the row",
    paper="https://arxiv.org/abs/2602.05261",
    ratio=lambda c: [PER_ROW],
    reductions=("sequence_mean",),
    odd=_odd,
)
