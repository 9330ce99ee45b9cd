"""The samples of `TransformerEngine` in the middle of decoding, and what happens to them.

Shape legend: S slots, L positions of a slot, k tokens of a call.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.rollout.jetstream.protocol import ResultTokens
from jaxrl.rollout.native.decode import Block, Rows
from jaxrl.rollout.native.kv_cache import Cache, put_slots, take_slots
from jaxrl.types import Array

FREE = 2**30  # in `Rows.slots`, beyond every slot: the row is done, or was never filled


class Slots(struct.PyTreeNode):
    """Hold samples in the middle of decoding: a prefix (its cache has one slot), or all slots."""

    cache: Cache
    rows: Rows
    tokens: Array  # [rows, L] prompt and response


def with_stop_ids(rows: Rows, other: Rows) -> Rows:
    """Return rows with room for the stop ids, and with the features, of others too."""
    features = rows.features.union(other.features)
    wider = features.stop_ids - rows.stop_ids.shape[1]
    padded = jnp.pad(rows.stop_ids, ((0, 0), (0, wider)), constant_values=-1)
    return rows.replace(stop_ids=padded if wider else rows.stop_ids, features=features)


@jax.jit
def for_decode(rows: Rows, tokens: Array, freed: Array) -> Rows:
    """Return rows as `decode` takes them."""
    seen = jnp.arange(tokens.shape[1]) <= rows.position[:, None]
    history = jnp.where(seen, tokens, -1) if rows.features.penalised else None
    return rows.replace(slots=jnp.where(freed, FREE, rows.slots), history=history)


@jax.jit
def advance(rows: Rows, tokens: Array, block: Block) -> tuple[Rows, Array, ResultTokens]:
    """Return rows and tokens after a block, and what it drew."""
    size, k = block.tokens.shape
    drawn = jnp.arange(k) < block.count[:, None]
    at = jnp.where(drawn, rows.position[:, None] + 1 + jnp.arange(k), tokens.shape[1])
    tokens = tokens.at[jnp.arange(size)[:, None], at].set(block.tokens, mode="drop")
    last = jnp.take_along_axis(block.tokens, jnp.maximum(block.count - 1, 0)[:, None], 1)[:, 0]
    count = rows.count + block.count
    rows = rows.replace(
        slots=jnp.where(block.stopped | (count >= rows.max_tokens), FREE, rows.slots),
        last_token=jnp.where(block.count > 0, last, rows.last_token),
        position=rows.position + block.count,
        count=count,
    )
    data = jnp.concatenate([block.tokens, drawn.astype(jnp.int32), count[:, None]], axis=1)
    ends = (0, k), (k, 2 * k), (2 * k, 2 * k + 1)
    return rows, tokens, ResultTokens(data, *ends, 1, block.log_probs)


@functools.partial(jax.jit, donate_argnums=0)
def insert_prefix(state: Slots, prefix: Slots, slots: Array) -> Slots:
    """Put sample i of the prefix into slots[i]."""
    n, length = len(slots), state.tokens.shape[1]
    copies = take_slots(prefix.cache, jnp.zeros_like(slots), length)
    cache = put_slots(state.cache, slots, copies, length)
    live = jnp.where(prefix.rows.slots[:n] == FREE, FREE, slots)
    new = jax.tree.map(lambda x: x[:n], prefix.rows).replace(slots=live)
    rows = jax.tree.map(lambda old, x: old.at[slots].set(x), state.rows, new)
    return Slots(cache, rows, state.tokens.at[slots].set(prefix.tokens[:n]))
