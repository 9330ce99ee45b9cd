"""Softmax attention over rows of prefix trees on NVIDIA GPUs, as kernels that skip what is unseen.

A row holds a forest in depth-first order, so that what sees a key is an interval of places: its
subtree. Which blocks of queries and keys meet is found from the intervals, outside of the kernels;
a program goes through the blocks that its own meets, first those of which every pair is visible and
which need no mask. The backward pass computes the probabilities again, from the logarithm of their
sum (Dao, https://arxiv.org/abs/2307.08691), in one kernel for queries and one for keys and values,
neither of which adds to what another program writes: same input, same bits.

Shape legend: B rows, T places, H query heads, K key/value heads, G = H / K, h head width; a block
of N is what a program owns, a block of M what it goes through.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LOG2E = math.log2(math.e)  # a GPU has 2^x, of which it makes e^x
LOWEST = -1e30  # below all scores, and finite: -inf - LOWEST is no NaN
NARROWEST = 16  # of what tensor cores multiply
ALL, SOME, NONE = 0, 1, 2  # of the pairs of two blocks, how many are visible


class Settings(NamedTuple):
    """Hold what is static: factor and cap of the scores, and whether to run without a GPU."""

    scale: float
    softcap: float | None
    interpret: bool


class Tiles(NamedTuple):
    """Hold the sizes of a kernel: places that a program owns, those it takes at once, and warps."""

    own: int
    other: int
    warps: int
    stages: int


class Kernels(NamedTuple):
    """Hold the sizes of the kernels."""

    forward: Tiles
    queries: Tiles
    keys: Tiles


class Row(NamedTuple):
    """Hold what tells who sees whom: ends and positions [B, T] and window [1], int32."""

    ends: jax.Array
    positions: jax.Array
    window: jax.Array


def tree_attention_gpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ends: jax.Array,
    positions: jax.Array,
    window: jax.Array,
    *,
    scale: float,
    softcap: float | None,
    interpret: bool = False,
) -> jax.Array:
    """Compute grouped-query attention along the paths of trees, with the softmax in float32.

    The query at place q sees the key at place k where k <= q < ends[k], and positions[q] -
    positions[k] < window. It sees its own: ends[k] > k, and window > 0.

    Args:
        q, k, v: [B, T, H, h], [B, K, T, h] twice, of one dtype: bfloat16 or float32.
        ends: [B, T] int32, the place behind the subtree of each token; of padding the next place.
        positions: [B, T] int32, depths in the tree.
        window: [] int32, a huge number where the layer does not slide.
        scale, softcap: of the scores; see `jaxrl.models.attention`.
        interpret: run it anywhere, slowly, for tests.

    Returns:
        [B, T, H, h] in the dtype of q.
    """
    rows, t, _, width = q.shape
    missing = -t % max(max(x.own, x.other) for x in _tiles(width, q.dtype))
    wide = max(pl.next_power_of_2(width), NARROWEST) - width
    q = jnp.pad(q, ((0, 0), (0, missing), (0, 0), (0, wide)))
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, wide))) for x in (k, v))
    behind = jnp.broadcast_to(jnp.arange(t, t + missing) + 1, (rows, missing))
    row = Row(
        jnp.concatenate([ends, behind], axis=1).astype(jnp.int32),
        # no depth that the row does not have: padding widens no block's range
        jnp.pad(positions, ((0, 0), (0, missing)), mode="edge").astype(jnp.int32),
        jnp.asarray(window, jnp.int32).reshape(1),
    )
    out: Any = _attend(Settings(scale, softcap, interpret), q, k, v, row)
    return out[:, :t, :, :width]


def _tiles(width: int, dtype: Any) -> Kernels:
    """Return sizes for which an H100 has the shared memory, and in bfloat16 the registers."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return Kernels(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 16, 4, 1))
    if width <= 64:
        return Kernels(Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3))
    if width <= 128:
        return Kernels(Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2))
    return Kernels(Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 2))


# ---------------------------------------------------------------- which blocks meet


def _meetings(row: Row, queries: int, keys: int) -> jax.Array:
    """Tell how many pairs of blocks of queries and keys are visible: [B, T/queries, T/keys] int."""
    rows, t = row.ends.shape
    ends = row.ends.reshape(rows, 1, -1, keys)
    depths = row.positions.reshape(rows, -1, 1, queries)
    key_depths = row.positions.reshape(rows, 1, -1, keys)
    first, first_key = jnp.arange(0, t, queries)[:, None], jnp.arange(0, t, keys)
    farthest = depths.max(-1) - key_depths.min(-1)
    nearest = depths.min(-1) - key_depths.max(-1)
    every = (first_key + keys <= first) & (ends.min(-1) >= first + queries)
    some = (first_key < first + queries) & (ends.max(-1) > first) & (nearest < row.window)
    return jnp.where(every & (farthest < row.window), ALL, jnp.where(some, SOME, NONE))


def _lists(meetings: jax.Array) -> tuple[jax.Array, jax.Array]:
    """List the blocks that each block meets, and count them.

    meetings [B, N, M]; returns [B, N, M] int32, first blocks seen whole, then those seen in part;
    [B, N, 2] int32, how many are of the first kind, and of both.
    """
    order = jnp.argsort(meetings, axis=-1, stable=True).astype(jnp.int32)
    counts = [jnp.sum(meetings <= kind, axis=-1, dtype=jnp.int32) for kind in (ALL, SOME)]
    return order, jnp.stack(counts, axis=-1)


def _over_list(step: Callable[..., Any], counts_ref: Any, carry: Any) -> Any:
    """Run `step(masked, n, carry)` for each n of a list, masked where not every pair is visible."""
    whole, met = counts_ref[0], counts_ref[1]
    carry = lax.fori_loop(0, whole, functools.partial(step, False), carry)
    return lax.fori_loop(whole, met, functools.partial(step, True), carry)


def _visible(queries: Any, keys: Any, window: Any) -> jax.Array:
    """Return which pairs are visible, of (places, depths) and of (places, ends, depths)."""
    (place, depth), (key_place, end, key_depth) = queries, keys
    return (place >= key_place) & (place < end) & (depth - key_depth < window)


# ---------------------------------------------------------------- kernels


def _product(settings: Settings, a: jax.Array, b: jax.Array, over: int) -> jax.Array:
    """Multiply a by b [n, m] along b's axis `over`, a's last, and sum up in float32."""
    precision: Any = None
    if a.dtype == jnp.float32:  # of one pass, a GPU rounds to 11 bits
        three = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        precision = lax.Precision.HIGHEST if settings.interpret else three
    dims = (((1,), (over,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _scores(settings: Settings, products: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """Return scores as exponents of 2, and their slope over that of products without a cap."""
    cap = settings.softcap
    if cap is None:
        return products * (settings.scale * LOG2E), 1.0
    capped = jnp.tanh(products * (settings.scale / cap))
    return capped * (cap * LOG2E), 1.0 - capped * capped


def _forward_kernel(
    settings: Settings,
    tiles: Tiles,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    ends_ref: Any,
    positions_ref: Any,
    window_ref: Any,
    lists_ref: Any,
    counts_ref: Any,
    out_ref: Any,
    lse_ref: Any,
) -> None:
    """Attend from a block of queries of a head: q, out [N, h]; k, v [T, h]; lse [N], of 2^x."""
    first = pl.program_id(0) * tiles.own
    own = first + jnp.arange(tiles.own), positions_ref[pl.ds(first, tiles.own)]
    queries = [x[:, None] for x in own]
    q, window = q_ref[...], window_ref[0]

    def step(masked: bool, n: Any, carry: Any) -> Any:
        out, top, total = carry
        start = lists_ref[n] * tiles.other
        at = pl.ds(start, tiles.other)
        scores, _ = _scores(settings, _product(settings, q, k_ref[at, :], over=1))
        if masked:
            key = start + jnp.arange(tiles.other), ends_ref[at], positions_ref[at]
            seen = _visible(queries, [x[None, :] for x in key], window)
            scores = jnp.where(seen, scores, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        shrink = jnp.exp2(top - higher)
        probs = jnp.exp2(scores - higher[:, None])
        v = v_ref[at, :]
        out = out * shrink[:, None] + _product(settings, probs.astype(v.dtype), v, over=0)
        return out, higher, total * shrink + jnp.sum(probs, axis=1)

    zero = jnp.zeros(tiles.own, jnp.float32)
    empty = jnp.zeros(q.shape, jnp.float32), zero + LOWEST, zero
    out, top, total = _over_list(step, counts_ref, empty)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    lse_ref[...] = top + jnp.log2(total)


def _queries_kernel(
    settings: Settings,
    tiles: Tiles,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    ends_ref: Any,
    positions_ref: Any,
    window_ref: Any,
    lists_ref: Any,
    counts_ref: Any,
    d_out_ref: Any,
    lse_ref: Any,
    inner_ref: Any,
    dq_ref: Any,
) -> None:
    """Compute the gradient of a block of queries of a head: q, dq, d_out [N, h]; k, v [T, h].

    lse, inner [N]: inner products of the output and its gradient.
    """
    first = pl.program_id(0) * tiles.own
    own = first + jnp.arange(tiles.own), positions_ref[pl.ds(first, tiles.own)]
    queries = [x[:, None] for x in own]
    q, d_out, window = q_ref[...], d_out_ref[...], window_ref[0]
    lse, inner = lse_ref[...], inner_ref[...]

    def step(masked: bool, n: Any, dq: Any) -> Any:
        start = lists_ref[n] * tiles.other
        at = pl.ds(start, tiles.other)
        k = k_ref[at, :]
        scores, slope = _scores(settings, _product(settings, q, k, over=1))
        if masked:
            key = start + jnp.arange(tiles.other), ends_ref[at], positions_ref[at]
            seen = _visible(queries, [x[None, :] for x in key], window)
            scores = jnp.where(seen, scores, -jnp.inf)
        probs = jnp.exp2(scores - lse[:, None])
        d_probs = _product(settings, d_out, v_ref[at, :], over=1)
        d_scores = probs * (d_probs - inner[:, None]) * slope
        return dq + _product(settings, d_scores.astype(k.dtype), k, over=0)

    dq = _over_list(step, counts_ref, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = (dq * settings.scale).astype(dq_ref.dtype)


def _keys_kernel(
    settings: Settings,
    tiles: Tiles,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    ends_ref: Any,
    positions_ref: Any,
    window_ref: Any,
    lists_ref: Any,
    counts_ref: Any,
    d_out_ref: Any,
    lse_ref: Any,
    inner_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
) -> None:
    """Compute the gradients of a block of keys and values: k, v, dk, dv [N, h].

    q, d_out [T, G, h]; lse, inner [G, T]. Scores are [keys, queries], as both sums want them.
    """
    first = pl.program_id(0) * tiles.own
    at_own = pl.ds(first, tiles.own)
    own = first + jnp.arange(tiles.own), ends_ref[at_own], positions_ref[at_own]
    keys = [x[:, None] for x in own]
    k, v, window = k_ref[...], v_ref[...], window_ref[0]

    def of_head(g: Any, sums: Any) -> Any:
        def step(masked: bool, n: Any, sums: Any) -> Any:
            dk, dv = sums
            start = lists_ref[n] * tiles.other
            at = pl.ds(start, tiles.other)
            q, d_out = q_ref[at, g, :], d_out_ref[at, g, :]
            scores, slope = _scores(settings, _product(settings, k, q, over=1))
            if masked:
                query = start + jnp.arange(tiles.other), positions_ref[at]
                seen = _visible([x[None, :] for x in query], keys, window)
                scores = jnp.where(seen, scores, -jnp.inf)
            probs = jnp.exp2(scores - lse_ref[g, at][None, :])
            dv = dv + _product(settings, probs.astype(v.dtype), d_out, over=0)
            d_probs = _product(settings, v, d_out, over=1)
            d_scores = probs * (d_probs - inner_ref[g, at][None, :]) * slope
            return dk + _product(settings, d_scores.astype(q.dtype), q, over=0), dv

        return _over_list(step, counts_ref, sums)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, q_ref.shape[1], of_head, (zeros, zeros))
    dk_ref[...] = (dk * settings.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


# ---------------------------------------------------------------- calls


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: Settings, q: jax.Array, k: jax.Array, v: jax.Array, row: Row) -> jax.Array:
    """Compute `tree_attention_gpu` of whole blocks."""
    return _forward(settings, q, k, v, row)[0]


def _forward(
    settings: Settings, q: jax.Array, k: jax.Array, v: jax.Array, row: Row
) -> tuple[jax.Array, Any]:
    """Return the output [B, T, H, h], and what the backward pass is computed from."""
    rows, t, heads, _ = q.shape
    tiles = _tiles(q.shape[3], q.dtype).forward
    block, scalars, given = _query_specs(q, k, tiles)
    out, lse = _call(
        functools.partial(_forward_kernel, settings, tiles),
        settings,
        tiles,
        (t // tiles.own, heads, rows),
        given,
        (block, scalars),
        (q, jax.ShapeDtypeStruct((rows, heads, t), jnp.float32)),
    )(q, k, v, *row, *_lists(_meetings(row, tiles.own, tiles.other)))
    return out, (q, k, v, row, out, lse)


def _backward(settings: Settings, kept: Any, d_out: jax.Array) -> tuple[Any, ...]:
    """Return the gradients of q, k and v from that of the output [B, T, H, h]."""
    q, k, v, row, out, lse = kept
    rows, t, heads, width = q.shape
    kv, group = k.shape[1], heads // k.shape[1]
    inner = jnp.einsum("bthd,bthd->bht", out, d_out, preferred_element_type=jnp.float32)
    _, for_q, for_k = _tiles(width, q.dtype)
    block, scalars, given = _query_specs(q, k, for_q)
    (dq,) = _call(
        functools.partial(_queries_kernel, settings, for_q),
        settings,
        for_q,
        (t // for_q.own, heads, rows),
        (*given, block, scalars, scalars),
        (block,),
        (q,),
    )(q, k, v, *row, *_lists(_meetings(row, for_q.own, for_q.other)), d_out, lse, inner)
    block = pl.BlockSpec((None, None, for_k.own, width), lambda j, h, b: (b, h, j, 0))
    queries = pl.BlockSpec((None, t, None, group, width), lambda j, h, b: (b, 0, h, 0, 0))
    scalars = pl.BlockSpec((None, None, group, t), lambda j, h, b: (b, h, 0, 0))
    grouped, d_grouped = (x.reshape(rows, t, kv, group, width) for x in (q, d_out))
    lse, inner = (x.reshape(rows, kv, group, t) for x in (lse, inner))
    meetings = _meetings(row, for_k.other, for_k.own).swapaxes(1, 2)
    dk, dv = _call(
        functools.partial(_keys_kernel, settings, for_k),
        settings,
        for_k,
        (t // for_k.own, kv, rows),
        (queries, block, block, *_row_specs(t, t // for_k.other), queries, scalars, scalars),
        (block, block),
        (k, v),
    )(grouped, k, v, *row, *_lists(meetings), d_grouped, lse, inner)
    return dq, dk, dv, None


_attend.defvjp(_forward, _backward)


def _query_specs(q: jax.Array, k: jax.Array, tiles: Tiles) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return how programs (i, h, b) read their block of queries of a head, and the head's keys.

    First of q and what has its shape, then of what is [B, H, T], then of all that both kernels of
    queries are given: q, k, v, the row and its lists.
    """
    t, group, width = q.shape[1], q.shape[2] // k.shape[1], q.shape[3]
    block = pl.BlockSpec((None, tiles.own, None, width), lambda i, h, b: (b, i, h, 0))
    scalars = pl.BlockSpec((None, None, tiles.own), lambda i, h, b: (b, h, i))
    keys = pl.BlockSpec((None, None, t, width), lambda i, h, b: (b, lax.div(h, group), 0, 0))
    return block, scalars, (block, keys, keys, *_row_specs(t, t // tiles.other))


def _row_specs(t: int, others: int) -> tuple[pl.BlockSpec, ...]:
    """Return how programs (i, h, b) read the ends, positions and window, and their list."""
    row = pl.BlockSpec((None, t), lambda i, h, b: (b, 0))
    window = pl.BlockSpec((1,), lambda i, h, b: (0,))
    lists, counts = (pl.BlockSpec((None, None, n), lambda i, h, b: (b, i, 0)) for n in (others, 2))
    return row, row, window, lists, counts


def _call(
    kernel: Callable[..., None],
    settings: Settings,
    tiles: Tiles,
    grid: tuple[int, ...],
    given: tuple[pl.BlockSpec, ...],
    made: tuple[pl.BlockSpec, ...],
    like: tuple[Any, ...],
) -> Callable[..., Any]:
    """Return the call of a kernel, which makes arrays `like` these."""
    # who never runs these kernels does without what JAX means to drop
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=given,
        out_specs=made,
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like),
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=settings.interpret,
    )
