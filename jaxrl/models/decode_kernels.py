"""Attention of one new token per row as one kernel: it reads the filled part of the cache alone.

Both kernels go through the positions of a row in blocks and keep a running maximum and sum
(Milakov and Gimelshein, https://arxiv.org/abs/1805.02867). On the TPU the blocks of a row follow
one another on the grid, and those without a position in use are not fetched. On the GPU a row is
split over several programs, as rows and heads alone are too few for it, and their results are added
up afterwards (flash decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

Shape legend: B rows, S positions of the cache, K key/value heads, G query heads of each, h width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu, triton

from jaxrl.models.attention import softcap
from jaxrl.types import Array

POSITIONS = 128  # the cache has a multiple of them where a kernel reads it
TPU_BLOCKS = (512, 256, POSITIONS)
GPU_BLOCK = 64
LEAST_QUERIES = 16  # rows of the GPU's matrix products
GPU_PROGRAMS = 512  # about as many as keep a GPU busy
LOWEST = float(jnp.finfo(jnp.float32).min) / 2
TINY = float(jnp.finfo(jnp.float32).tiny)  # below every sum of weights, whose largest is 1


def fits(platform: str, positions: int, width: int) -> bool:
    """Return whether a platform has a kernel for heads of a given width."""
    power_of_two = width & (width - 1) == 0
    able = {"tpu": width % 64 == 0, "gpu": power_of_two and 16 <= width <= 256}
    return positions % POSITIONS == 0 and able.get(platform, False)


def tpu_attention(
    q: Array,
    keys: Array,
    values: Array,
    mask: Array,
    *,
    scale: float,
    cap: float | None,
    interpret: bool = False,
) -> Array:
    """Compute softmax attention to the positions in use, on a TPU.

    Args:
        q: [B, K, G, h]; keys: [B, K, h, S]; values: [B, K, S, h].
        mask: [B, S] bool, one run of True in a row, or none: the result is then 0.
        scale, cap: of the scores.
        interpret: run anywhere, slowly, for tests.

    Returns:
        [B, K, G, h] float32.
    """
    rows, heads, group, width = q.shape
    positions = keys.shape[3]
    block = next(b for b in TPU_BLOCKS if positions % b == 0)

    fetched = functools.partial(fetched_block, block=block)
    whole = pl.BlockSpec((None, heads, group, width), lambda row, number, *_: (row, 0, 0, 0))
    return pl.pallas_call(
        functools.partial(_tpu_kernel, scale=scale, cap=cap, block=block),
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(rows, positions // block),
            in_specs=[
                whole,
                pl.BlockSpec((None, heads, width, block), lambda *at: _columns(*fetched(*at))),
                pl.BlockSpec((None, heads, block, width), lambda *at: _lines(*fetched(*at))),
            ],
            out_specs=whole,
            scratch_shapes=[pltpu.VMEM((heads, group, 1), jnp.float32)] * 2,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="decode_attention",
    )(*runs(mask), q, keys, values)


def fetched_block(
    row: Array, number: Array, first: Array, end: Array, source: Array, *, block: int
) -> tuple[Array, Array]:
    """Return the row and block of positions that a step of the TPU's grid has in memory.

    It is one in use, or that of the step before, which is not fetched again: so a row without a
    position in use costs nothing.
    """
    # lax.div: `//` asks for the sign, and the compiler then for a TPU of its own
    at = source[row]
    last = jax.lax.div(jnp.maximum(end[at] - 1, 0), block)
    used = jnp.clip(number, jax.lax.div(first[at], block), last)
    return at, jnp.where(at == row, used, last)


def _columns(row: Array, part: Array) -> tuple[Array | int, ...]:
    return row, 0, 0, part


def _lines(row: Array, part: Array) -> tuple[Array | int, ...]:
    return row, 0, part, 0


def _tpu_kernel(
    first: Any,
    end: Any,
    source: Any,
    q: Any,
    keys: Any,
    values: Any,
    out: Any,
    peak: Any,
    total: Any,
    *,
    scale: float,
    cap: float | None,
    block: int,
) -> None:
    del source  # of the blocks that are fetched
    row, number = pl.program_id(0), pl.program_id(1)
    start = number * block

    @pl.when(number == 0)
    def begin() -> None:
        peak[...] = jnp.full_like(peak, LOWEST)
        total[...] = jnp.zeros_like(total)
        out[...] = jnp.zeros_like(out)

    @pl.when((start < end[row]) & (start + block > first[row]))
    def add() -> None:
        place = start + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
        used = (place >= first[row]) & (place < end[row])
        for head in range(q.shape[0]):
            sums = peak[head], total[head], out[head]
            sums = _add_block(sums, q[head], keys[head], values[head], used, scale, cap)
            peak[head], total[head], out[head] = sums

    @pl.when(number == pl.num_programs(1) - 1)
    def divide() -> None:
        out[...] = out[...] / jnp.maximum(total[...], TINY)


def tpu_write(
    keys: Array,
    values: Array,
    k: Array,
    v: Array,
    positions: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Write the keys and values of one more token in each row, in place.

    A row reads and writes the block that has its position; nothing else moves.

    Args:
        keys: [B, K, h, S]; values: [B, K, S, h].
        k, v: [B, K, h].
        positions: [B]; S and more = nothing is written.
        interpret: run anywhere, slowly, for tests.
    """
    rows, heads, width, length = keys.shape
    at = functools.partial(_block_of, length=length)
    token = pl.BlockSpec((None, heads, width), lambda row, *_: (row, 0, 0))
    columns = pl.BlockSpec((None, heads, width, POSITIONS), lambda row, p: (row, 0, 0, at(p[row])))
    lines = pl.BlockSpec((None, heads, POSITIONS, width), lambda row, p: (row, 0, at(p[row]), 0))
    return pl.pallas_call(
        functools.partial(_write_kernel, length=length),
        out_shape=(
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows,),
            in_specs=[columns, lines, token, token],
            out_specs=(columns, lines),
        ),
        input_output_aliases={1: 0, 2: 1},  # keys and values, counted from positions
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="write_tokens",
    )(positions, keys, values, k, v)


def _block_of(position: Array, length: int) -> Array:
    return jax.lax.div(jnp.minimum(position, length - 1), POSITIONS)


def _write_kernel(
    positions: Any,
    keys: Any,
    values: Any,
    k: Any,
    v: Any,
    new_keys: Any,
    new_values: Any,
    *,
    length: int,
) -> None:
    position = positions[pl.program_id(0)]
    place = position - _block_of(position, length) * POSITIONS  # beyond the block: none is it
    column = jax.lax.broadcasted_iota(jnp.int32, (1, POSITIONS), 1) == place
    line = jax.lax.broadcasted_iota(jnp.int32, (POSITIONS, 1), 0) == place
    for head in range(k.shape[0]):
        new_keys[head] = jnp.where(column, k[head][:, None], keys[head])
        new_values[head] = jnp.where(line, v[head][None], values[head])


def gpu_attention(
    q: Array,
    keys: Array,
    values: Array,
    mask: Array,
    *,
    scale: float,
    cap: float | None,
    interpret: bool = False,
) -> Array:
    """Do what `tpu_attention` does, on a GPU."""
    rows, heads, group, width = q.shape
    positions = keys.shape[3]
    queries = max(pl.next_power_of_2(group), LEAST_QUERIES)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, queries - group), (0, 0)))
    blocks = positions // GPU_BLOCK
    wanted = max(GPU_PROGRAMS // (rows * heads), 1)
    splits = max(n for n in range(1, min(wanted, blocks) + 1) if blocks % n == 0)
    span = positions // splits
    number = pl.BlockSpec((None,), lambda b, k, s: (b,))
    sums = jax.ShapeDtypeStruct((rows, heads, splits, queries), jnp.float32)
    out, peak, total = pl.pallas_call(
        functools.partial(_gpu_kernel, scale=scale, cap=cap, span=span),
        out_shape=(jax.ShapeDtypeStruct((*sums.shape, width), jnp.float32), sums, sums),
        grid=(rows, heads, splits),
        in_specs=[
            number,
            number,
            pl.BlockSpec((None, None, queries, width), lambda b, k, s: (b, k, 0, 0)),
            pl.BlockSpec((None, None, width, span), lambda b, k, s: (b, k, 0, s)),
            pl.BlockSpec((None, None, span, width), lambda b, k, s: (b, k, s, 0)),
        ],
        out_specs=(
            pl.BlockSpec((None, None, None, queries, width), lambda b, k, s: (b, k, s, 0, 0)),
            *(pl.BlockSpec((None, None, None, queries), lambda b, k, s: (b, k, s, 0)),) * 2,
        ),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )(*runs(mask)[:2], q, keys, values)
    weight = jnp.exp(peak - peak.max(2, keepdims=True))
    out = (weight[..., None] * out).sum(2) / jnp.maximum((weight * total).sum(2), TINY)[..., None]
    return out[:, :, :group]


def _gpu_kernel(
    first: Any,
    end: Any,
    q: Any,
    keys: Any,
    values: Any,
    out: Any,
    peak: Any,
    total: Any,
    *,
    scale: float,
    cap: float | None,
    span: int,
) -> None:
    start = pl.program_id(2) * span
    queries, begin, stop = q[...], first[...], end[...]
    low = jnp.clip(begin - start, 0, span) // GPU_BLOCK
    high = pl.cdiv(jnp.clip(stop - start, 0, span), GPU_BLOCK)

    def add(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        part = pl.ds(i * GPU_BLOCK, GPU_BLOCK)
        place = (start + i * GPU_BLOCK + jnp.arange(GPU_BLOCK))[None]
        used = (place >= begin) & (place < stop)
        return _add_block(sums, queries, keys[:, part], values[part, :], used, scale, cap)

    nothing = jnp.zeros((len(queries), 1), jnp.float32)
    zeros = jnp.zeros(queries.shape, jnp.float32)
    sums = jax.lax.fori_loop(low, high, add, (nothing + LOWEST, nothing, zeros))
    peak[...], total[...], out[...] = sums[0].sum(1), sums[1].sum(1), sums[2]


def _add_block(
    sums: tuple[Array, Array, Array],
    q: Array,
    keys: Array,
    values: Array,
    used: Array,
    scale: float,
    cap: float | None,
) -> tuple[Array, Array, Array]:
    """Add n positions to the running maximum [G, 1], sum [G, 1] and weighted values [G, h].

    q [G, h]; keys [h, n]; values [n, h]; used [1, n].
    """
    peak, total, out = sums
    scores = softcap(_product(q, keys) * scale, cap)
    scores = jnp.where(used, scores, LOWEST)
    new = jnp.maximum(peak, scores.max(1, keepdims=True))
    old, weights = jnp.exp(peak - new), jnp.where(used, jnp.exp(scores - new), 0)
    out = old * out + _product(weights.astype(values.dtype), values)
    return new, old * total + weights.sum(1, keepdims=True), out


def _product(x: Array, y: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)


def runs(mask: Array) -> tuple[Array, Array, Array]:
    """Return where the run of True begins and has ended: [B, S] -> [B] twice; 0, 0 for none.

    And the last row up to this one that has a run; 0 where none has.
    """
    first, size = mask.argmax(1).astype(jnp.int32), mask.sum(1, dtype=jnp.int32)
    source = jax.lax.cummax(jnp.where(size > 0, jnp.arange(len(mask), dtype=jnp.int32), 0))
    return first, first + size, source
