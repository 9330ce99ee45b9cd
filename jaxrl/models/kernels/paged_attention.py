"""Attention to keys and values that lie in pages, wherever those are in memory.

The positions of a row are cut into pages of p; a table says where each lies, so that rows share
those of a common beginning. A row asks for Q neighbouring positions: 1 where it decodes, a tile of
its prompt where it prefills. What a position is given depends on its row alone, to the bit: not on
the other rows, nor, for positions that are multiples of Q apart, on where its tile began.

Shape legend: R rows, Q queries of a row, P pages, p positions of a page, C pages of the longest
row, N tokens, H query heads, K key/value heads, h head width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.models.architecture import TransformerConfig
from jaxrl.models.attention import scale, softcap
from jaxrl.models.kernels.choice import REFERENCE, Facts, Implementation, Operation, unmet
from jaxrl.models.linear import einsum_float32
from jaxrl.types import Array

# Of keys and values of a page of each of some rows. Rows are attended to in tiles of so many bytes,
# which stay in a CPU's cache: 64 rows of 3 heads of 64, 1,024 positions each, in tiles of 8, 16, 32
# rows (96 KiB each) 28.7, 14.7, 17.5 ms (LOG.md).
TILE_BYTES = 2 * 2**20
BLOCK_POSITIONS, BLOCK_QUERIES = 512, 32  # of the TPU's kernel


class Pages(struct.PyTreeNode):
    """Hold the keys and values of one layer.

    Attributes:
        arrays: keys [P, K, h, p] and values [P, K, p, h]; where `joined` one array [P, p, 2 K, h],
            the keys of head k at 2 k, its values at 2 k + 1: there a token is what lies together,
            so that a TPU writes it in place, and its kernel reads it.
    """

    arrays: tuple[Array, ...]
    joined: bool = struct.field(pytree_node=False)

    @classmethod
    def empty(
        cls, config: TransformerConfig, pages: int, size: int, dtype: Any, *, joined: bool
    ) -> "Pages":
        """Make `pages` pages of `size` positions."""
        heads, width = config.num_kv_heads, config.head_dim
        shapes = ((pages, heads, width, size), (pages, heads, size, width))
        if joined:
            shapes = ((pages, size, 2 * heads, width),)
        return cls(tuple(jnp.zeros(shape, dtype) for shape in shapes), joined)

    @property
    def size(self) -> int:
        """Return the positions of a page."""
        return self.arrays[0].shape[1] if self.joined else self.arrays[1].shape[2]

    @property
    def heads(self) -> int:
        """Return the key/value heads."""
        return self.arrays[0].shape[2] // 2 if self.joined else self.arrays[0].shape[1]

    def read(self, ids: Array) -> tuple[Array, Array]:
        """Return the keys [n, K, h, p] and values [n, K, p, h] of n pages."""
        if not self.joined:
            keys, values = self.arrays
            return keys[ids], values[ids]
        both = self.arrays[0][ids]
        return both[:, :, 0::2].transpose(0, 2, 3, 1), both[:, :, 1::2].transpose(0, 2, 1, 3)

    def write(self, ids: Array, offsets: Array, k: Array, v: Array) -> "Pages":
        """Put tokens into pages.

        Args:
            ids, offsets: [N] page, and position in it, of each; an id of P or more drops it.
            k, v: [N, K, h].
        """
        dtype = self.arrays[0].dtype
        if self.joined:
            both = jnp.stack([k, v], axis=2).reshape(len(k), -1, k.shape[-1]).astype(dtype)
            return self.replace(arrays=(self.arrays[0].at[ids, offsets].set(both, mode="drop"),))
        keys, values = self.arrays
        keys = keys.at[ids, :, :, offsets].set(k.astype(dtype), mode="drop")
        values = values.at[ids, :, offsets].set(v.astype(dtype), mode="drop")
        return self.replace(arrays=(keys, values))

    def copy(self, sources: Array, targets: Array) -> "Pages":
        """Copy pages [n] to others; a target of P or more drops it."""
        put = lambda x: x.at[targets].set(x[sources], mode="drop")  # noqa: E731
        return jax.tree.map(put, self)


def paged_attention(
    config: TransformerConfig,
    q: Array,
    pages: Pages,
    table: Array,
    first: Array,
    *,
    sliding: bool = False,
    kernel: str = REFERENCE,
) -> Array:
    """Attend from the positions of each row to all before them, and to themselves.

    Args:
        q: [R, Q, H, h] at positions first, first + 1, ... of the row, which are written.
        table: [R, C] where the pages of a row are; behind its last one, anything that exists.
        first: [R]; below 0, the row is none, and gets anything finite.
        sliding: the layer sees `config.sliding_window` positions.
        kernel: of `PAGED_ATTENTION`.

    Returns:
        [R, Q, H, h].
    """
    window = config.sliding_window if sliding else None
    settings = {"scale": scale(config), "cap": config.attention_softcap, "window": window}
    run = PAGED_ATTENTION.implementations[kernel].run
    return run(q, pages, table, first, **settings).astype(q.dtype)


def by_pages(
    q: Array,
    pages: Pages,
    table: Array,
    first: Array,
    *,
    scale: float,
    cap: float | None,
    window: int | None,
) -> Array:
    """Attend in plain XLA: tiles of rows of like length, a page of each at a time.

    The softmax goes along (Milakov and Gimelshein 2018, arXiv:1805.02867), so that no score is kept
    beyond its page.
    """
    rows, queries, heads, width = q.shape
    size, count = pages.size, pages.heads
    row_bytes = 2 * size * count * width * pages.arrays[0].dtype.itemsize
    tile = -(-rows // -(-rows // max(TILE_BYTES // row_bytes, 1)))  # of equal ones as few as do
    padding = -rows % tile
    order = jnp.argsort(-first)  # alike beside each other; behind them padding, which is none
    at_first = jnp.pad(first[order], (0, padding), constant_values=-1)
    order = jnp.pad(order, (0, padding))

    def attend(one: tuple[Array, Array, Array]) -> Array:
        q, table, first = one
        at = (first[:, None] + jnp.arange(queries))[:, None, None, :, None]  # [W, 1, 1, Q, 1]
        grouped = q.reshape(tile, queries, count, -1, width).transpose(0, 2, 3, 1, 4)
        flat = grouped.reshape(tile, count, -1, width)  # of a key head all that ask it

        def add_page(number: Array, so_far: tuple[Array, Array, Array]) -> tuple:
            most, total, mixed = so_far
            ids = jax.lax.dynamic_index_in_dim(table, number, axis=1, keepdims=False)
            keys, values = pages.read(ids)
            written = number * size + jnp.arange(size) < first[:, None] + queries
            # behind its end a row has pages of others, whatever is in them: 0 x inf is no number
            values = jnp.where(written[:, None, :, None], values, 0)
            scores = softcap(einsum_float32("wkqh,wkhp->wkqp", flat, keys) * scale, cap)
            scores = scores.reshape(*grouped.shape[:-1], size)
            seen = number * size + jnp.arange(size)
            sees = (seen <= at) & (first >= 0)[:, None, None, None, None]
            if window is not None:
                sees &= at - seen < window
            scores = jnp.where(sees, scores, -jnp.inf).reshape(*flat.shape[:-1], size)
            higher = jnp.maximum(most, scores.max(-1))
            weights = jnp.exp(scores - higher[..., None])
            shrink = jnp.exp(most - higher)
            mix = einsum_float32("wkqp,wkph->wkqh", weights.astype(values.dtype), values)
            total = total * shrink + weights.sum(-1)
            return higher, total, mixed * shrink[..., None] + mix

        lowest = jnp.full(flat.shape[:-1], jnp.finfo(jnp.float32).min)
        nothing = lowest, jnp.zeros_like(lowest), jnp.zeros(flat.shape, jnp.float32)
        end = jnp.where(first.max() < 0, 0, -(-(first.max() + queries) // size))
        begin = 0
        if window is not None:  # what the first of them sees
            earliest = jnp.where(first < 0, first.max(), first).min()
            begin = jnp.maximum(earliest - window + 1, 0) // size
        _, total, mixed = jax.lax.fori_loop(begin, end, add_page, nothing)
        out = mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
        out = out.reshape(grouped.shape).transpose(0, 3, 1, 2, 4)
        return out.reshape(tile, queries, heads, width)

    given = q[order], table[order], at_first
    tiled = jax.tree.map(lambda x: x.reshape(-1, tile, *x.shape[1:]), given)
    out = jax.lax.map(attend, tiled).reshape(-1, *q.shape[1:])[:rows]
    return jnp.zeros_like(out).at[order[:rows]].set(out)


def tpu_ragged(
    q: Array,
    pages: Pages,
    table: Array,
    first: Array,
    *,
    scale: float,
    cap: float | None,
    window: int | None,
) -> Array:
    """Attend by JAX's kernel for TPUs (Jiang et al. 2026, arXiv:2604.15464).

    It takes rows of any number of queries one after the other: here each has Q. A row that is none
    is one of its first Q positions. Its blocks are the same for all rows, and never chosen by what
    they hold.
    """
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    rows, queries, heads, width = q.shape
    out = ragged_paged_attention(
        q.reshape(-1, heads, width),
        pages.arrays[0],
        jnp.maximum(first, 0).astype(jnp.int32) + queries,
        table.astype(jnp.int32),
        queries * jnp.arange(rows + 1, dtype=jnp.int32),
        jnp.array([rows], jnp.int32),
        sm_scale=scale,
        sliding_window=window,
        soft_cap=cap,
        num_kv_pages_per_block=min(max(BLOCK_POSITIONS // pages.size, 1), table.shape[1]),
        num_queries_per_block=BLOCK_QUERIES,
    )
    return out.reshape(q.shape)


def _tpu_needs(facts: Facts) -> list[str]:
    """List what is missing for the kernel, by its own rule for the heads that it takes together."""
    assert facts.model is not None
    width, heads = facts.model.head_dim, facts.model.num_kv_heads
    packing = 4 // jnp.dtype(facts.dtype).itemsize  # heads of a 32-bit word
    words, rest = divmod(2 * heads, packing)
    return unmet(
        [
            (width % 128 == 0, f"a head_dim that 128 divides, not {width}"),
            (
                rest == 0 and (words in (1, 2, 4) or words % 8 == 0),
                f"1, 2 or 4 words of key and value heads, or a multiple of 8, not {words:g}",
            ),
        ]
    )


PAGED_ATTENTION = Operation(
    "paged_attention",
    "attention of rows to keys and values in pages",
    {
        "ragged": Implementation(
            tpu_ragged,
            _tpu_needs,
            "128 divides head_dim; key and value heads fill 1, 2, 4 or a multiple of 8 words",
        ),
        REFERENCE: Implementation(by_pages),
    },
    {"tpu": ("ragged", REFERENCE)},
)
