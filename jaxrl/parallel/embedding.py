"""The embedding table, used where it lies: rows travel, the table does not."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl.parallel.rules import Placement


def look_up(
    table: jax.Array,
    names: tuple[str, str],
    tokens: jax.Array,
    placement: Placement | None,
    dtype: jnp.dtype,
) -> jax.Array:
    """Look up the rows of a table [V, D] for tokens [B, T] -> [B, T, D] in `dtype`.

    The table, of logical axes `names`, is never whole on a device, nor is its gradient, which is
    summed in the table's dtype: a device looks its columns up for the tokens of all devices that
    share the table, then they exchange rows for columns. B T D numbers travel instead of V D.
    """
    if placement is None:
        return table[tokens].astype(dtype)
    vocab_axis, embed_axis = placement.spec(table.shape, names)
    rows = placement.tokens
    return jax.shard_map(
        functools.partial(_look_up, vocab_axis=vocab_axis, embed_axis=embed_axis, dtype=dtype),
        mesh=placement.mesh,
        in_specs=(PartitionSpec(vocab_axis, embed_axis), rows),
        out_specs=rows,
        check_vma=False,
    )(table, tokens)


def _look_up(
    table: jax.Array,
    tokens: jax.Array,
    *,
    vocab_axis: str | tuple[str, ...] | None,
    embed_axis: str | tuple[str, ...] | None,
    dtype: jnp.dtype,
) -> jax.Array:
    if embed_axis is not None:
        tokens = jax.lax.all_gather(tokens, embed_axis, tiled=True)
    if vocab_axis is None:
        rows = table[tokens].astype(dtype)
    else:  # the token is in the slice of one device
        row = tokens - jax.lax.axis_index(vocab_axis) * table.shape[0]
        here = (row >= 0) & (row < table.shape[0])
        rows = jnp.where(here[..., None], table[jnp.where(here, row, 0)], 0).astype(dtype)
        rows = jax.lax.psum(rows, vocab_axis)
    if embed_axis is None:
        return rows
    return jax.lax.all_to_all(rows, embed_axis, split_axis=0, concat_axis=2, tiled=True)
