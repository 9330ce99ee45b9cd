"""Attention to keys and values that lie in pages, wherever those are in memory.

The positions of a row are cut into pages of p; a table says where each lies, so that rows share
those of a common beginning. A row asks for Q neighbouring positions: 1 where it decodes, a tile of
its prompt where it prefills. What a position is given depends on its row alone, to the bit: not on
the other rows, nor, for positions that are multiples of Q apart, on where its tile began.

Shape legend: R rows, Q queries of a row, P pages, p positions of a page, C pages of the longest
row, N tokens, H query heads, K key/value heads, h head width.
"""

import functools
import inspect
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.models.architecture import TransformerConfig
from jaxrl.models.attention import scale, softcap
from jaxrl.models.exact import Tiles, alone
from jaxrl.models.kernels.choice import (
    AMPERE,
    HOPPER,
    REFERENCE,
    Facts,
    Implementation,
    Operation,
    at_least,
    no_sinks,
    unmet,
)
from jaxrl.models.linear import einsum_float32
from jaxrl.parallel.jax_internals import fused_attention
from jaxrl.parallel.rules import MeshAxes
from jaxrl.types import Array

# Of keys and values of a page of each of some rows. Rows are attended to in tiles of so many bytes,
# which stay in a CPU's cache: 64 rows of 3 heads of 64, 1,024 positions each, in tiles of 8, 16, 32
# rows (96 KiB each) 28.7, 14.7, 17.5 ms (LOG.md).
TILE_BYTES = 2 * 2**20
BLOCK_POSITIONS = 512  # of a row, that an accelerator attends to at once
# Of a block of the TPU's kernel: those of 32 rows that decode, as nearly all blocks that JAX has
# tuned; or those of one row's tile, for which the default of 16 MiB of VMEM is not enough.
BLOCK_QUERIES, TILE_QUERIES = 32, 128
TILE_VMEM = 48 * 2**20  # bytes; 64 heads of 128 fit
LANES = 128  # of a TPU's memory
# Keys and values of 8 bits lie in pages as integers of the same bits: XLA for CPUs would cast whole
# arrays of float8 to float16, and back, to write a token into them.
FP8, FP8_BITS, LARGEST_FP8 = jnp.float8_e4m3fn, jnp.uint8, 448.0

Layout = Literal["transposed", "joined", "apart", "shared"]


def layout_of(platform: str, config: TransformerConfig | None = None) -> Layout:
    """Return how pages lie on a platform, for whichever of its implementations reads them.

    Those of a model with latent attention lie alike everywhere.
    """
    if config is not None and config.latent is not None:
        return "shared"
    layouts: dict[str, Layout] = {"cpu": "transposed", "tpu": "joined"}
    return layouts.get(platform, "apart")


class Pages(struct.PyTreeNode):
    """Hold the keys and values of one layer.

    Of dtype `FP8_BITS` they are float8_e4m3fn, see there: they have no scale, as vLLM has none
    where none is calibrated, and what is beyond 448 becomes that.

    Attributes:
        arrays: as `layout` says.
        kv_heads: of the model, wherever they are.
        layout: "transposed" has keys [P, K, h, p] and values [P, K, p, h], as a CPU multiplies
            them. In the others a token is what lies together, so that an accelerator writes it in
            place: "apart" has keys and values [P, p, K, h] each, which cuDNN reads; "joined" one
            array [P, p, 2 K, h], which the TPU's kernel reads, the keys of head k at 2 k, its
            values at 2 k + 1. There K and h are rounded up to what the kernel takes; zeros fill it.
            "shared" has keys [P, p, K, h], which are the values, too: of latent attention.
        apart: devices may have some positions of each page, where they cannot have some heads.
    """

    arrays: tuple[Array, ...]
    kv_heads: int = struct.field(pytree_node=False)
    layout: Layout = struct.field(pytree_node=False)
    apart: bool = struct.field(pytree_node=False, default=True)

    @classmethod
    def empty(
        cls,
        config: TransformerConfig,
        pages: int,
        size: int,
        dtype: Any,
        *,
        layout: Layout,
        heads: int | None = None,
        apart: bool = True,
    ) -> "Pages":
        """Make `pages` pages of `size` positions, of all heads of the model or of some."""
        heads, width = heads or config.num_kv_heads, config.head_dim
        shapes = {
            "transposed": ((pages, heads, width, size), (pages, heads, size, width)),
            "joined": ((pages, size, _rows_of_tpu(2 * heads, dtype), width + -width % LANES),),
            "apart": ((pages, size, heads, width),) * 2,
            "shared": ((pages, size, heads, width),),
        }[layout]
        arrays = tuple(jnp.zeros(shape, dtype) for shape in shapes)
        return cls(arrays, config.num_kv_heads, layout, apart)

    @property
    def head_axis(self) -> int:
        """Return the axis of the heads, by which all arrays can be split over devices."""
        return 1 if self.layout == "transposed" else 2

    @property
    def position_axes(self) -> tuple[int, ...]:
        """Return the axis of the positions of each array."""
        return (3, 2) if self.layout == "transposed" else (1,) * len(self.arrays)

    @property
    def size(self) -> int:
        """Return the positions of a page that are here."""
        return self.arrays[-1].shape[3 - self.head_axis]

    @property
    def heads(self) -> int:
        """Return the key/value heads that there is room for."""
        return self.arrays[0].shape[self.head_axis] // (2 if self.layout == "joined" else 1)

    @property
    def width(self) -> int:
        """Return the head width that there is room for."""
        return self.arrays[-1].shape[-1]

    def read(self, ids: Array, dtype: Any = None) -> tuple[Array, Array]:
        """Return the keys [R, K, h, n p] and values [R, K, n p, h] of pages [R, n].

        Args:
            dtype: of what is returned; None = as they are kept.
        """
        rows, heads, width = len(ids), self.heads, self.width
        found = [_widened(x[ids], dtype) for x in self.arrays]
        if self.layout == "transposed":
            keys, values = found[0].transpose(0, 2, 3, 1, 4), found[1].swapaxes(1, 2)
            return keys.reshape(rows, heads, width, -1), values.reshape(rows, heads, -1, width)
        if self.layout == "joined":
            # a barrier, or XLA for TPUs copies all pages to read some the other way around
            both = jax.lax.optimization_barrier(found[0])
            found = [both[..., 0::2, :], both[..., 1::2, :]]
        elif self.layout == "shared":
            found *= 2
        keys, values = (x.reshape(rows, -1, heads, width) for x in found)
        return keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2)

    def parts(self, number: int) -> list[tuple[Array, ...]]:
        """Return the arrays of some heads each, in their order; see `arrays`."""
        split = [jnp.split(x, number, axis=self.head_axis) for x in self.arrays]
        return list(zip(*split, strict=True))

    def write(self, ids: Array, offsets: Array, k: Array, v: Array) -> "Pages":
        """Put tokens into pages.

        Args:
            ids, offsets: [N] page, and position in it, of each; an id of P or more drops it.
            k, v: [N, K, h].
        """
        number, heads, width = k.shape
        if self.layout == "joined":
            room = (0, 0), (0, self.heads - heads), (0, 0), (0, self.width - width)
            both = jnp.pad(jnp.stack([k, v], axis=2), room).reshape(number, -1, self.width)
            tokens = [((ids, offsets), both)]
        elif self.layout == "transposed":
            every = slice(None)
            tokens = [((ids, every, every, offsets), k), ((ids, every, offsets), v)]
        elif self.layout == "shared":
            tokens = [((ids, offsets), k)]
        else:
            tokens = [((ids, offsets), k), ((ids, offsets), v)]
        put = [
            x.at[at].set(_narrowed(new, x.dtype), mode="drop")
            for x, (at, new) in zip(self.arrays, tokens, strict=True)
        ]
        return self.replace(arrays=tuple(put))


def _narrowed(x: Array, dtype: Any) -> Array:
    """Return what pages of a dtype keep of keys or values; float8 has no numbers beyond 448."""
    if dtype != FP8_BITS:
        return x.astype(dtype)
    near = jnp.clip(x, -LARGEST_FP8, LARGEST_FP8).astype(FP8)
    return jax.lax.bitcast_convert_type(near, FP8_BITS)


def _widened(x: Array, dtype: Any) -> Array:
    """Return what pages keep as numbers of a dtype; None = of their own."""
    if x.dtype == FP8_BITS:
        x = jax.lax.bitcast_convert_type(x, FP8)
    return x if dtype is None else x.astype(dtype)


def _rows_of_tpu(heads: int, dtype: Any) -> int:
    """Round key and value heads up to what the TPU's kernel takes together.

    They fill 1, 2, 4 or a multiple of 8 words of 32 bits.
    """
    packing = 4 // jnp.dtype(dtype).itemsize
    words = -(-heads // packing)
    return packing * (words + -words % 8 if words > 4 else 1 << (words - 1).bit_length())


def paged_attention(
    config: TransformerConfig,
    q: Array,
    pages: Pages,
    table: Array,
    first: Array,
    sinks: Array | None = None,
    *,
    sliding: bool | Array = False,
    kernel: str = REFERENCE,
    axis: MeshAxes = None,
    tiles: Tiles | None = None,
) -> Array:
    """Attend from the positions of each row to all before them, and to themselves.

    Args:
        q: [R, Q, H, h] at positions first, first + 1, ... of the row, which are written.
        table: [R, C] where the pages of a row are; behind its last one, anything that exists.
        first: [R]; below 0, the row is none, and gets anything finite.
        sinks: [H], see `attention`; of a kernel that takes them.
        sliding: the layer sees `config.sliding_window` positions.
        kernel: of `PAGED_ATTENTION`.
        axis: mesh axes over which the positions of every page are spread, in a `shard_map`: device
            i of n has those from i p / n on. That is done in plain XLA, whatever the kernel: none
            gives the sums of its softmax.
        tiles: of the exact mode, in place of the kernel.

    Returns:
        [R, Q, H, h].
    """
    window: Any = config.sliding_window if sliding is True else None
    if isinstance(sliding, jax.Array) and config.sliding_window is not None:
        window = jnp.where(sliding, config.sliding_window, jnp.iinfo(jnp.int32).max)
    settings = {"scale": scale(config), "cap": config.attention_softcap, "window": window}
    rows, queries, _, width = q.shape
    grouped = q.reshape(rows, queries, -1, config.num_heads // config.num_kv_heads, width)
    heads = grouped.shape[2]
    room = (0, 0), (0, 0), (0, pages.heads - heads), (0, 0), (0, pages.width - width)
    padded = jnp.pad(grouped, room)
    run = PAGED_ATTENTION.implementations[kernel].run
    if axis is not None:
        run = functools.partial(by_pages, axis=axis)
    if tiles is not None:
        run = functools.partial(by_tiles, tiles=tiles)
    if sinks is not None:
        of_heads = jnp.pad(sinks.reshape(heads, -1), room[2:3] + ((0, 0),))
        settings["sinks"] = of_heads.astype(jnp.float32)
    out = run(padded.reshape(rows, queries, -1, pages.width), pages, table, first, **settings)
    return out.reshape(padded.shape)[:, :, :heads, :, :width].reshape(q.shape).astype(q.dtype)


def by_tiles(
    q: Array,
    pages: Pages,
    table: Array,
    first: Array,
    *,
    tiles: Tiles,
    **settings: Any,
) -> Array:
    """Attend as `by_pages` does, in the tiles of the exact mode: Q divides `tiles.queries`, or is
    a multiple of them."""
    asked = min(q.shape[1], tiles.queries)
    many = q.shape[1] // asked
    asks = q.reshape(-1, asked, *q.shape[2:])
    asks = jnp.pad(asks, ((0, 0), (0, tiles.queries - asked), (0, 0), (0, 0)))
    begins = first[:, None] + asked * jnp.arange(many)
    begins = jnp.where(first[:, None] < 0, -1, begins).reshape(-1)
    table = jnp.repeat(table, many, axis=0)
    number, padding = len(asks), -len(asks) % tiles.rows
    order = jnp.argsort(-begins)  # alike beside each other
    begins = jnp.pad(begins[order], (0, padding), constant_values=-1)
    order = jnp.pad(order, (0, padding))
    step = max(BLOCK_POSITIONS // pages.size, 1) if pages.layout != "transposed" else 1
    sinks, here = settings.pop("sinks", None), 1  # logical parts of the heads, each by itself
    if tiles.is_split(pages.kv_heads):
        here = pages.heads * tiles.parts // pages.kv_heads
    of_parts = pages.parts(here)
    if sinks is not None:
        sinks = sinks.reshape(here, -1, sinks.shape[1])
    run = functools.partial(attend, **{"sinks": None, **settings}, step=step, axis=None)

    def one(tile: tuple[Array, Array, Array]) -> Array:
        some, some_table, some_begins = tile
        found = []
        for asks_of, arrays in zip(jnp.split(some, here, axis=2), of_parts, strict=True):
            of_part = functools.partial(run, pages=pages.replace(arrays=arrays), asked=asked)
            given = {"q": asks_of, "table": some_table, "first": some_begins}
            if sinks is not None:
                given["sinks"] = sinks[len(found)]
            reached = (some_begins >= 0).any()
            found.append(alone(lambda given, go=of_part: go(**given), given, when=reached))
        return jnp.concatenate(found, axis=2)

    given = asks[order], table[order], begins
    cut = jax.tree.map(lambda x: x.reshape(-1, tiles.rows, *x.shape[1:]), given)
    out = jax.lax.map(one, cut).reshape(-1, *asks.shape[1:])[:number, :asked]
    return jnp.zeros_like(out).at[order[:number]].set(out).reshape(q.shape)


def paged_kernel(facts: Facts, named: str | None = None) -> str:
    """Return the name of the implementation that a device has.

    A named one is not asked what it misses; platforms that do not have it have the reference.
    """
    if named is None:
        return PAGED_ATTENTION.choose(facts).name
    return named if named in PAGED_ATTENTION.order.get(facts.platform, ()) else REFERENCE


def by_pages(
    q: Array,
    pages: Pages,
    table: Array,
    first: Array,
    *,
    scale: float,
    cap: float | None,
    window: int | None,
    axis: MeshAxes = None,
    sinks: Array | None = None,
) -> Array:
    """Attend in plain XLA: on a CPU to a page of few rows at a time, elsewhere to many of all rows.

    A CPU works from its cache; an accelerator wants few and large operations.
    """
    settings = {"scale": scale, "cap": cap, "window": window, "axis": axis, "sinks": sinks}
    step = max(BLOCK_POSITIONS // pages.size, 1)
    tiles = functools.partial(in_tiles, **settings)
    whole = functools.partial(attend, **settings, step=step)
    return jax.lax.platform_dependent(q, pages, table, first, cpu=tiles, default=whole)


def in_tiles(q: Array, pages: Pages, table: Array, first: Array, **settings: Any) -> Array:
    """Attend to tiles of rows of like length, one tile after the other."""
    rows = len(q)
    row_bytes = 2 * pages.size * pages.heads * pages.width * pages.arrays[0].dtype.itemsize
    tile = -(-rows // -(-rows // max(TILE_BYTES // row_bytes, 1)))  # of equal ones as few as do
    padding = -rows % tile
    order = jnp.argsort(-first)  # alike beside each other; behind them padding, which is none
    at_first = jnp.pad(first[order], (0, padding), constant_values=-1)
    order = jnp.pad(order, (0, padding))
    given = q[order], table[order], at_first
    tiled = jax.tree.map(lambda x: x.reshape(-1, tile, *x.shape[1:]), given)
    run = functools.partial(attend, **settings, step=1)
    out = jax.lax.map(lambda one: run(one[0], pages, *one[1:]), tiled)
    out = out.reshape(-1, *q.shape[1:])[:rows]
    return jnp.zeros_like(out).at[order[:rows]].set(out)


def attend(  # noqa: PLR0915
    q: Array,
    pages: Pages,
    table: Array,
    first: Array,
    *,
    scale: float,
    cap: float | None,
    window: Array | int | None,
    step: int,
    axis: MeshAxes,
    sinks: Array | None,  # [K, G] float32
    asked: int | None = None,
) -> Array:
    """Attend to `step` pages of every row at a time.

    In the exact mode only the first `asked` queries are any.

    The softmax goes along (Milakov and Gimelshein 2018, arXiv:1805.02867), so that no score is kept
    beyond its step.
    """
    rows, queries, heads, width = q.shape
    exact, asked = asked is not None, asked or queries
    count, devices, device = pages.heads, 1, 0
    if axis is not None:
        devices, device = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    span = step * devices * pages.size  # positions of these pages, on all devices
    of_page = (jnp.arange(step)[:, None] * devices + device) * pages.size
    here = (of_page + jnp.arange(pages.size)).ravel()
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % step)))
    at = (first[:, None] + jnp.arange(queries))[:, None, None, :, None]  # [R, 1, 1, Q, 1]
    grouped = q.reshape(rows, queries, count, -1, width).transpose(0, 2, 3, 1, 4)
    flat = grouped.reshape(rows, count, -1, width)  # of a key head all that ask it

    def add_step(number: Array, so_far: tuple[Array, Array, Array]) -> tuple:
        most, total, mixed = so_far
        ids = jax.lax.dynamic_slice_in_dim(table, number * step, step, axis=1)
        keys, values = pages.read(ids, q.dtype)
        seen = number * span + here
        written = seen < first[:, None] + asked
        # behind its end a row has pages of others, whatever is in them: 0 x inf is no number
        values = jnp.where(written[:, None, :, None], values, 0)
        scores = softcap(einsum_float32("rkqh,rkhp->rkqp", flat, keys) * scale, cap)
        scores = scores.reshape(*grouped.shape[:-1], len(here))
        sees = (seen <= at) & (first >= 0)[:, None, None, None, None]
        if window is not None:
            sees &= at - seen < window
        scores = jnp.where(sees, scores, -jnp.inf).reshape(*flat.shape[:-1], len(here))
        higher = jnp.maximum(most, scores.max(-1))
        weights = jnp.exp(scores - higher[..., None])
        shrink = jnp.exp(most - higher)
        mix = einsum_float32("rkqp,rkph->rkqh", weights.astype(values.dtype), values)
        total = total * shrink + weights.sum(-1)
        return higher, total, mixed * shrink[..., None] + mix

    lowest = jnp.full(flat.shape[:-1], jnp.finfo(jnp.float32).min)
    nothing = lowest, jnp.zeros_like(lowest), jnp.zeros(flat.shape, jnp.float32)
    end = jnp.where(first.max() < 0, 0, -(-(first.max() + asked) // span))
    begin = 0
    if window is not None:  # what the first of them sees
        earliest = jnp.where(first < 0, first.max(), first).min()
        begin = jnp.maximum(earliest - window + 1, 0) // span
    most, total, mixed = jax.lax.fori_loop(begin, end, add_step, nothing)
    if axis is not None:
        highest = jax.lax.pmax(most, axis)
        shrink = jnp.exp(most - highest)
        total, mixed = jax.lax.psum((total * shrink, mixed * shrink[..., None]), axis)
        most = highest
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[:, :, None], grouped.shape[1:-1]).reshape(1, count, -1)
        highest = jnp.maximum(most, sink)
        shrink = jnp.exp(most - highest)
        total, mixed = total * shrink + jnp.exp(sink - highest), mixed * shrink[..., None]
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    # in the exact mode never a division, which XLA makes a product or not
    out = mixed / total if not exact else mixed * jax.lax.optimization_barrier(1 / total)
    out = out.reshape(grouped.shape).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, queries, heads, width)


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
    they hold; a tile of a prompt is one block, so that the keys before it are read once.
    """
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    rows, queries, heads, width = q.shape
    block, vmem = BLOCK_QUERIES, None
    if queries > 1 and pltpu.get_tpu_info().vmem_capacity_bytes > TILE_VMEM:  # v5e or later
        block, vmem = min(queries, TILE_QUERIES), TILE_VMEM
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
        num_queries_per_block=block,
        vmem_limit_bytes=vmem,
    )
    return out.reshape(q.shape)


def cudnn(
    q: Array,
    pages: Pages,
    table: Array,
    first: Array,
    *,
    scale: float,
    cap: float | None,
    window: int | None,
) -> Array:
    """Attend by cuDNN where a row asks for one position, and in plain XLA where it asks for a tile.

    XLA has cuDNN's causal mask begin at a row's position 0, wherever its queries are: that is right
    for no tile but the first. A row that is none is one of position 0.
    """
    if q.shape[1] > 1:
        return by_pages(q, pages, table, first, scale=scale, cap=cap, window=window)
    fused = fused_attention()
    assert cap is None
    assert window is None
    assert pages.layout == "apart"
    keys, values = pages.arrays
    places = table.astype(jnp.int32)[:, None, :, None]
    nothing = jnp.zeros(0, keys.dtype)
    # What `fused.paged_attention` calls; that itself wants as many pages as the table has entries,
    # which neither XLA nor cuDNN does. It is private: of its arguments, those that only some
    # versions of JAX have stand in the dict at its end.
    attend = fused._dot_product_attention
    later = {"score_mod_args": (), "score_mod": None}  # a function of the scores (0.12)
    return attend(
        query=q.astype(keys.dtype),
        key=keys,
        value=values,
        bias=nothing,
        q_seqlen=jnp.ones(len(q), jnp.int32),
        kv_seqlen=jnp.maximum(first, 0).astype(jnp.int32) + 1,
        q_offsets=nothing,
        kv_offsets=nothing,
        page_table_k=places,
        page_table_v=places,
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),  # a bias, its gradient
        mask_type=fused.MaskType.PADDING,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        cudnn_version=fused.check_cudnn_version(),
        return_residual=False,
        **{k: v for k, v in later.items() if k in inspect.signature(attend).parameters},
    )


def _cudnn_needs(facts: Facts) -> list[str]:
    assert facts.model is not None
    width, widest = facts.model.head_dim, 256 if at_least(facts, HOPPER) else 128
    return unmet(
        [
            (
                at_least(facts, AMPERE),
                f"an Ampere GPU or later, not compute capability {facts.capability}",
            ),
            (facts.dtype == jnp.bfloat16, "an engine in bfloat16"),
            (
                width <= widest and width % 8 == 0,
                f"a head_dim that 8 divides, of at most {widest}, not {width}",
            ),
            (facts.model.attention_softcap is None, "a model without attention softcap"),
            (facts.model.sliding_window is None, "a model without sliding windows"),
            no_sinks(facts.model),
            _no_latents(facts.model),
            _wide_pages(facts),
        ]
    )


def _ragged_needs(facts: Facts) -> list[str]:
    assert facts.model is not None
    return unmet([no_sinks(facts.model), _no_latents(facts.model), _wide_pages(facts)])


def _no_latents(model: TransformerConfig) -> tuple[bool, str]:
    return model.latent is None, "a model without latent attention"


def _wide_pages(facts: Facts) -> tuple[bool, str]:
    return (
        facts.pages in (None, facts.dtype),
        "pages in the engine's dtype (generator.inference_engine.kv_cache_dtype='auto')",
    )


PAGED_ATTENTION = Operation(
    "paged_attention",
    "attention of rows to keys and values in pages",
    {
        "ragged": Implementation(
            tpu_ragged, _ragged_needs, "no sinks, no latents, no pages in fp8"
        ),
        "cudnn": Implementation(
            cudnn,
            _cudnn_needs,
            "Ampere or later, bfloat16, 8 divides head_dim, head_dim <= 256 (128 before Hopper), "
            "no soft cap, no sliding windows, no sinks, no latents, no pages in fp8",
        ),
        REFERENCE: Implementation(by_pages),
    },
    {"tpu": ("ragged", REFERENCE), "gpu": ("cudnn", REFERENCE)},
)
