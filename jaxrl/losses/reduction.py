"""Weights that turn a per-token loss into the objective. Nothing else divides by a count.

The objective of a minibatch is `sum(per_token_loss * reduction_weights(loss_mask, ...))`. The
weights are computed once from the whole minibatch and sliced with it, so the gradient cannot depend
on how the minibatch is cut into microbatches, padded, or spread over devices.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import FloatBT, IntB, MaskBT, at_least_float32

REDUCTIONS = (
    "token_mean",
    "token_mean_legacy",
    "sequence_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
)


def reduction_weights(
    loss_mask: MaskBT,
    kind: str,
    *,
    max_seq_len: int | None = None,
    group_ids: IntB | None = None,
    microbatch_rows: int | None = None,
    axis_name: str | None = None,
) -> FloatBT:
    """Return the token weights w [B, T] of a minibatch with mask m [B, T]; B counts empty rows too.

        token_mean                w_bt = m_bt / max(sum m, 1)
        token_mean_legacy         w_bt = m_bt / (blocks max(sum of m over the row's block, 1))
        sequence_mean             w_bt = m_bt / (B max(sum_t m_bt, 1))
        seq_mean_token_sum_norm   w_bt = m_bt / (B max_seq_len)        Dr. GRPO, arXiv:2503.20783
        prompt_mean               w_bt = m_bt / (prompts max(sum of m over the row's prompt, 1))

    A block of token_mean_legacy is `microbatch_rows` rows, in order (the last may be shorter):
    the mean of microbatch means that older releases of most systems optimise. It alone depends on
    how the minibatch is cut.

    A row is a trajectory, or with generator.step_wise_trajectories one turn of it. A mean over rows
    (sequence_mean, seq_mean_token_sum_norm, and the rows of token_mean_legacy's blocks) then counts
    a conversation once for each of its turns, as in SkyRL: long ones weigh more. prompt_mean and
    token_mean do not depend on how conversations are cut into rows.

    Args:
        loss_mask: [B, T] float, the WHOLE minibatch without padding rows; under `axis_name` this
            device's share of it.
        kind: one of `REDUCTIONS`.
        max_seq_len: the constant length of seq_mean_token_sum_norm, in tokens.
        group_ids: [B] int, for prompt_mean; in [0, rows of the whole minibatch).
        microbatch_rows: rows of a block of token_mean_legacy.
        axis_name: mapped axis that the rows are spread over (vmap, pmap, shard_map).

    Raises:
        ValueError: unknown kind, or the argument that it needs is missing.
    """
    mask = at_least_float32(loss_mask)
    if kind == "token_mean":
        return mask / jnp.maximum(_total(mask.sum(), axis_name), 1.0)
    if kind == "token_mean_legacy":
        return _block_mean(mask, microbatch_rows, axis_name)
    if kind == "prompt_mean":
        return _prompt_mean(mask, group_ids, axis_name)
    rows = _total(mask.shape[0], axis_name)
    if kind == "sequence_mean":
        return mask / (rows * jnp.maximum(mask.sum(-1, keepdims=True), 1.0))
    if kind == "seq_mean_token_sum_norm":
        if not max_seq_len:
            raise ValueError("loss_reduction='seq_mean_token_sum_norm' needs max_seq_len > 0")
        return mask / (rows * max_seq_len)
    raise ValueError(f"Invalid loss reduction type '{kind}'. Must be one of {list(REDUCTIONS)}")


def _block_mean(mask: MaskBT, block_rows: int | None, axis_name: str | None) -> FloatBT:
    if not block_rows:
        raise ValueError("loss_reduction='token_mean_legacy' needs microbatch_rows > 0")
    rows = mask.shape[0]
    blocks = -(-rows // block_rows)
    tokens = jax.ops.segment_sum(mask.sum(-1), jnp.arange(rows) // block_rows, blocks)
    tokens = jnp.repeat(tokens, block_rows)[:rows, None]
    return mask / (_total(blocks, axis_name) * jnp.maximum(tokens, 1.0))


def _prompt_mean(mask: MaskBT, group_ids: IntB | None, axis_name: str | None) -> FloatBT:
    if group_ids is None:
        raise ValueError("loss_reduction='prompt_mean' needs group_ids, the prompt of each row")
    segments = int(_total(mask.shape[0], axis_name))  # a prompt may be spread over devices
    counts = jnp.stack([jnp.ones_like(mask[:, 0]), mask.sum(-1)])
    rows, tokens = _total(jnp.zeros((2, segments)).at[:, group_ids].add(counts), axis_name)
    return mask / ((rows > 0).sum() * jnp.maximum(tokens, 1.0)[group_ids][:, None])


def _total(x: Any, axis_name: str | None) -> Any:
    """Sum over the mapped axis."""
    return x if axis_name is None else jax.lax.psum(x, axis_name)
