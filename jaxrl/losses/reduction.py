"""Weights that turn a per-token loss into the objective. Nothing else divides by a count.

The objective of a minibatch is `sum(per_token_loss * reduction_weights(loss_mask, ...))`. The
weights are computed once from the whole minibatch and sliced with it, so the gradient cannot depend
on how the minibatch is cut into microbatches, padded, or spread over devices.
"""

import jax.numpy as jnp

from jaxrl.array_ops import Array

REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm")


def reduction_weights(loss_mask: Array, kind: str, *, max_seq_len: int | None = None) -> Array:
    """Token weights w [B, T] of a minibatch with mask m [B, T] (B counts empty rows too).

        token_mean                w_bt = m_bt / max(sum m, 1)
        sequence_mean             w_bt = m_bt / (B max(sum_t m_bt, 1))
        seq_mean_token_sum_norm   w_bt = m_bt / (B max_seq_len)        Dr. GRPO, arXiv:2503.20783

    Args:
        loss_mask: [B, T] float, the WHOLE minibatch without padding rows.
        kind: one of `REDUCTIONS`.
        max_seq_len: the constant length of seq_mean_token_sum_norm, in tokens.

    Raises:
        ValueError: unknown kind, or max_seq_len missing where it is needed.
    """
    rows = loss_mask.shape[0]
    if kind == "token_mean":
        return loss_mask / jnp.maximum(loss_mask.sum(), 1.0)
    if kind == "sequence_mean":
        return loss_mask / (rows * jnp.maximum(loss_mask.sum(-1, keepdims=True), 1.0))
    if kind == "seq_mean_token_sum_norm":
        if not max_seq_len:
            raise ValueError("loss_reduction='seq_mean_token_sum_norm' needs max_seq_len > 0")
        return loss_mask / (rows * max_seq_len)
    raise ValueError(f"Invalid loss reduction type '{kind}'. Must be one of {list(REDUCTIONS)}")
