"""Attention of one new token per row on the TPU: it reads the filled part of the cache alone.

The kernel goes through the positions of a row in blocks and keeps a running maximum and sum
(Milakov and Gimelshein, https://arxiv.org/abs/1805.02867). The blocks of a row follow one another
on the TPU's grid, and those without a position in use are not fetched.

Shape legend: B rows, S positions of the cache, K key/value heads, G query heads of each, h width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.models.attention import softcap
from jaxrl.types import Array

POSITIONS = 128  # the cache has a multiple of them where a kernel reads it
TILE_BYTES = 32  # of the second-last dim: 8 rows of 4 bytes, 16 of 2
TPU_BLOCKS = (512, 256, POSITIONS)
LOWEST = float(jnp.finfo(jnp.float32).min) / 2
TINY = float(jnp.finfo(jnp.float32).tiny)  # below every sum of weights, whose largest is 1


def fits(positions: int, width: int) -> bool:
    """Return whether the kernels can take a cache of so many positions, heads of such a width."""
    return positions % POSITIONS == 0 and width % 64 == 0


def tpu_attention(
    q: Array,
    keys: Array,
    values: Array,
    mask: Array,
    *,
    scale: float,
    cap: float | None,
    transposed: bool,
    interpret: bool = False,
) -> Array:
    """Compute softmax attention to the positions in use, on a TPU.

    Args:
        q: [B, K, G, h]; values: [B, K, S, h]; keys too, or [B, K, h, S] where `transposed`.
        mask: [B, S] bool, one run of True in a row, or none: the result is then 0.
        scale, cap: of the scores.
        interpret: run anywhere, slowly, for tests.

    Returns:
        [B, K, G, h] float32.
    """
    rows, heads, group, width = q.shape
    positions = values.shape[2]
    block = next(b for b in TPU_BLOCKS if positions % b == 0)

    fetched = functools.partial(fetched_block, block=block)
    lines = pl.BlockSpec((None, heads, block, width), lambda *at: _lines(*fetched(*at)))
    columns = pl.BlockSpec((None, heads, width, block), lambda *at: _columns(*fetched(*at)))
    whole = pl.BlockSpec((None, heads, group, width), lambda row, number, *_: (row, 0, 0, 0))
    return pl.pallas_call(
        functools.partial(_tpu_kernel, scale=scale, cap=cap, block=block, transposed=transposed),
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(rows, positions // block),
            in_specs=[whole, columns if transposed else lines, lines],
            out_specs=whole,
            scratch_shapes=[pltpu.VMEM((heads, group, 1), jnp.float32)] * 2,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="decode_attention",
    )(*runs(mask), q, _in_place(keys, interpret), _in_place(values, interpret))


def _in_place(cache: Array, interpret: bool) -> Array:
    """Keep a cache in the main memory: XLA moves all of a small one to the fast one and back."""
    return cache if interpret else pltpu.with_memory_space_constraint(cache, pltpu.HBM)


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
    transposed: bool,
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
            dim = 0 if transposed else 1  # of the keys, which a query has too
            scores = softcap(_product(q[head], keys[head], dim) * scale, cap)
            sums = _add_block(sums, scores, values[head], used)
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
    transposed: bool,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Write the keys and values of one more token in each row, in place.

    A row reads and writes the tile that has its position, 16 of bfloat16 and 8 of float32; of
    transposed keys the 128 positions that are next to each other there. Nothing else moves.

    Args:
        values: [B, K, S, h]; keys too, or [B, K, h, S] where `transposed`.
        k, v: [B, K, h].
        positions: [B]; S and more = nothing is written.
        interpret: run anywhere, slowly, for tests.
    """
    rows, heads, length, width = values.shape
    tile = TILE_BYTES // values.dtype.itemsize
    at = functools.partial(_block_of, length=length)
    token = pl.BlockSpec((None, heads, width), lambda row, *_: (row, 0, 0))
    lines = pl.BlockSpec((None, heads, tile, width), lambda row, p: (row, 0, at(p[row], tile), 0))
    columns = pl.BlockSpec(
        (None, heads, width, POSITIONS), lambda row, p: (row, 0, 0, at(p[row], POSITIONS))
    )
    blocks = columns if transposed else lines, lines
    in_place = jax.ShapeDtypeStruct if interpret else pltpu.HBM  # as `_in_place` has it
    return pl.pallas_call(
        functools.partial(_write_kernel, length=length, transposed=transposed),
        out_shape=(
            in_place(keys.shape, keys.dtype),
            in_place(values.shape, values.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows,),
            in_specs=[*blocks, token, token],
            out_specs=blocks,
        ),
        input_output_aliases={1: 0, 2: 1},  # keys and values, counted from positions
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="write_tokens",
    )(positions, _in_place(keys, interpret), _in_place(values, interpret), k, v)


def _block_of(position: Array, size: int, length: int) -> Array:
    return jax.lax.div(jnp.minimum(position, length - 1), size)


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
    transposed: bool,
) -> None:
    position = positions[pl.program_id(0)]

    def put(new: Any, old: Any, token: Any, axis: int) -> None:
        size = old.shape[1 + axis]
        place = position - _block_of(position, size, length) * size  # beyond the block: none is it
        chosen = jax.lax.broadcasted_iota(jnp.int32, (size, 1) if axis == 0 else (1, size), axis)
        for head in range(token.shape[0]):
            new[head] = jnp.where(chosen == place, jnp.expand_dims(token[head], axis), old[head])

    put(new_keys, keys, k, 1 if transposed else 0)
    put(new_values, values, v, 0)


def _add_block(
    sums: tuple[Array, Array, Array], scores: Array, values: Array, used: Array
) -> tuple[Array, Array, Array]:
    """Add n positions to the running maximum [G, 1], sum [G, 1] and weighted values [G, h].

    scores [G, n]; values [n, h]; used [1, n].
    """
    peak, total, out = sums
    scores = jnp.where(used, scores, LOWEST)
    new = jnp.maximum(peak, scores.max(1, keepdims=True))
    old, weights = jnp.exp(peak - new), jnp.where(used, jnp.exp(scores - new), 0)
    out = old * out + _product(weights.astype(values.dtype), values, 0)
    return new, old * total + weights.sum(1, keepdims=True), out


def _product(x: Array, y: Array, dim: int) -> Array:
    """Multiply matrices along the last dim of x and a dim of y, in float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    along = ((1,), (dim,)), ((), ())
    return jax.lax.dot_general(x, y, along, precision, preferred_element_type=jnp.float32)


def runs(mask: Array) -> tuple[Array, Array, Array]:
    """Return where the run of True begins and has ended: [B, S] -> [B] twice; 0, 0 for none.

    And the last row up to this one that has a run; 0 where none has.
    """
    first, size = mask.argmax(1).astype(jnp.int32), mask.sum(1, dtype=jnp.int32)
    source = jax.lax.cummax(jnp.where(size > 0, jnp.arange(len(mask), dtype=jnp.int32), 0))
    return first, first + size, source
