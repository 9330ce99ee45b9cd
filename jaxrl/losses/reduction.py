"""Weights that turn a per-token loss into the objective. Nothing else divides by a count.

The objective of a minibatch is `sum(per_token_loss * reduction_weights(loss_mask, ...))`. The
weights are computed once from the whole minibatch and sliced with it, so the gradient cannot depend
on how the minibatch is cut into microbatches, padded, or spread over devices.
"""

import jax
import jax.numpy as jnp

from jaxrl.array_ops import Array

REDUCTIONS = (
    "token_mean",
    "token_mean_legacy",
    "sequence_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
)


def reduction_weights(
    loss_mask: Array,
    kind: str,
    *,
    max_seq_len: int | None = None,
    group_ids: Array | None = None,
    microbatch_rows: int | None = None,
    axis_name: str | None = None,
) -> Array:
    """Token weights w [B, T] of a minibatch with mask m [B, T] (B counts empty rows too).

        token_mean                w_bt = m_bt / max(sum m, 1)
        token_mean_legacy         w_bt = m_bt / (blocks max(sum of m over the row's block, 1))
        sequence_mean             w_bt = m_bt / (B max(sum_t m_bt, 1))
        seq_mean_token_sum_norm   w_bt = m_bt / (B max_seq_len)        Dr. GRPO, arXiv:2503.20783
        prompt_mean               w_bt = m_bt / (prompts max(sum of m over the row's prompt, 1))

    A block of token_mean_legacy is `microbatch_rows` rows, in order (the last may be shorter):
    the mean of microbatch means that older releases of most systems optimise. It alone depends on
    how the minibatch is cut.

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
    _check(kind, max_seq_len, group_ids, microbatch_rows)
    mask = jnp.asarray(loss_mask, jnp.promote_types(jnp.result_type(loss_mask), jnp.float32))
    rows = mask.shape[0]
    if kind == "token_mean":
        return mask / jnp.maximum(_total(mask.sum(), axis_name), 1.0)
    if kind == "token_mean_legacy":
        block = jnp.arange(rows) // microbatch_rows
        blocks = _total(-(-rows // microbatch_rows), axis_name)
        return _segment_mean_weights(mask, block, blocks, rows, None)
    if kind == "prompt_mean":
        segments = int(_total(rows, axis_name))
        present = _total(jnp.zeros(segments).at[group_ids].set(1.0), axis_name)
        return _segment_mean_weights(mask, group_ids, (present > 0).sum(), segments, axis_name)
    if kind == "sequence_mean":
        tokens = jnp.maximum(mask.sum(-1, keepdims=True), 1.0)
    else:
        tokens = max_seq_len
    return mask / (_total(rows, axis_name) * tokens)


def _segment_mean_weights(
    mask: Array, segment: Array, count: Array, segments: int, axis_name: str | None
) -> Array:
    """Weights of the mean over `count` segments of the token means within each."""
    tokens = jax.ops.segment_sum(mask.sum(-1), segment, num_segments=segments)
    tokens = jnp.maximum(_total(tokens, axis_name), 1.0)
    return mask / (count * tokens[segment][:, None])


def _total(x: Array | int, axis_name: str | None) -> Array:
    """Sum over the mapped axis."""
    return x if axis_name is None else jax.lax.psum(x, axis_name)


def _check(
    kind: str, max_seq_len: int | None, group_ids: Array | None, microbatch_rows: int | None
) -> None:
    if kind not in REDUCTIONS:
        raise ValueError(f"Invalid loss reduction type '{kind}'. Must be one of {list(REDUCTIONS)}")
    if kind == "seq_mean_token_sum_norm" and not max_seq_len:
        raise ValueError("loss_reduction='seq_mean_token_sum_norm' needs max_seq_len > 0")
    if kind == "prompt_mean" and group_ids is None:
        raise ValueError("loss_reduction='prompt_mean' needs group_ids, the prompt of each row")
    if kind == "token_mean_legacy" and not microbatch_rows:
        raise ValueError("loss_reduction='token_mean_legacy' needs microbatch_rows > 0")
