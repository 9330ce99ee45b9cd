"""Softmax attention over rows that hold prefix trees, by kernels for TPUs.

A row holds a forest in depth-first order: what several samples begin with stands in it once. Every
token says where its subtree ends, and only tokens within it see that token. As in Dao,
https://arxiv.org/abs/2307.08691, the scores [T, T] are never written: the kernels go through them
in blocks, and compute them again in the backward pass from each query's log of the sum of
exponentials. Beforehand it is found out which blocks of queries and keys meet; all others are
neither computed nor fetched.

Shape legend: B rows, T places, H query heads, K key/value heads, G = H / K, h head width, N blocks
of n places.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.models.remat import ATTENTION

BLOCK = 512  # places of a block, of queries and of keys
LANES = 128  # a shorter row is one block, of a whole number of these
UNSEEN = -0.7 * float(jnp.finfo(jnp.float32).max)  # a score; the difference of two is finite


class _Tree(NamedTuple):
    """Hold what says who sees whom.

    Attributes:
        ends: [B, 1, T] the place behind each token's subtree.
        positions: [B, 1, T] the depth of each token.
        window: [1] how many positions back a query sees, its own included.
    """

    ends: Array
    positions: Array
    window: Array


class _Options(NamedTuple):
    scale: float
    softcap: float | None
    block: int
    interpret: bool


def tree_attention_tpu(
    q: Array,
    k: Array,
    v: Array,
    ends: Array,
    positions: Array,
    window: Array,
    *,
    scale: float,
    softcap: float | None,
    interpret: bool = False,
    block: int = BLOCK,
) -> Array:
    """Compute attention in which a token is seen by its subtree alone, within the window.

    The query at place q sees the key at k <= q < ends[k] if positions[q] - positions[k] < window.

    Args:
        q, k, v: [B, T, H, h], [B, K, T, h] twice, of one dtype.
        ends, positions: [B, T] int32; padding ends one behind its place.
        window: [] int32, larger than any position where the layer does not slide.
        scale, softcap: of the scores.
        interpret: run anywhere, slowly, for tests.
        block: places of a block; on a TPU a multiple of `LANES`. Scalar memory has B N² block
            numbers.

    Returns:
        [B, T, H, h].
    """
    t = q.shape[1]
    block = min(block, -(-t // LANES) * LANES)
    missing = -t % block
    padding = jnp.broadcast_to(t + 1 + jnp.arange(missing), (q.shape[0], missing))
    tree = _Tree(
        jnp.concatenate([ends, padding.astype(jnp.int32)], axis=1)[:, None],
        jnp.pad(positions, ((0, 0), (0, missing)), mode="edge")[:, None],
        jnp.reshape(window, 1),
    )
    add = functools.partial(jnp.pad, pad_width=((0, 0), (0, 0), (0, missing), (0, 0)))
    options = _Options(scale, softcap, block, interpret)
    out: Array = _attend(add(q.swapaxes(1, 2)), add(k), add(v), tree, options)
    return out.swapaxes(1, 2)[:, :t]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, tree: _Tree, options: _Options) -> Array:
    """Return the outputs [B, H, T, h], as q is; k, v [B, K, T, h]."""
    return _forward(q, k, v, tree, options)[0]


def _forward(q: Array, k: Array, v: Array, tree: _Tree, options: _Options) -> list[Array]:
    """Return the outputs and, as [B, H, 1, T], the logs of the sums of exponentials."""
    rows, heads, t, width = q.shape
    return _call(
        _forward_kernel,
        q,
        k,
        v,
        tree,
        options,
        outputs=[q, jax.ShapeDtypeStruct((rows, heads, 1, t), jnp.float32)],
        scratch=[(width, jnp.float32), (1, jnp.float32), (1, jnp.float32), (1, jnp.int32)],
        name="tree_attention",
    )


def _keep(
    q: Array, k: Array, v: Array, tree: _Tree, options: _Options
) -> tuple[Array, tuple[Any, ...]]:
    out, sums = (checkpoint_name(x, ATTENTION) for x in _forward(q, k, v, tree, options))
    return out, (q, k, v, tree, out, sums)


def _backward(
    options: _Options, kept: tuple[Any, ...], g: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, tree, out, sums = kept
    dots = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=3)[:, :, None]
    width, more = q.shape[3], (g, sums, dots)
    (for_q,) = _call(
        _query_gradient_kernel,
        q,
        k,
        v,
        tree,
        options,
        more=more,
        outputs=[q],
        scratch=[(width, jnp.float32), (1, jnp.float32), (1, jnp.float32), (1, jnp.int32)],
        name="tree_attention_for_queries",
    )
    for_k, for_v = _call(
        _key_gradient_kernel,
        q,
        k,
        v,
        tree,
        options,
        more=more,
        outputs=[k, v],
        scratch=[(width, jnp.float32), (width, jnp.float32), (1, jnp.int32), (1, jnp.int32)],
        by_key=True,
        name="tree_attention_for_keys",
    )
    return for_q, for_k, for_v, None


_attend.defvjp(_keep, _backward)


def _meetings(tree: _Tree, block: int) -> Array:
    """Return whether a query of block i sees a key of block j, or might: [B, N, N] bool."""
    ends, positions = (x.reshape(len(x), -1, block) for x in (tree.ends, tree.positions))
    i, j = (jnp.arange(ends.shape[1]).reshape(shape) for shape in ((-1, 1), (1, -1)))
    reached = ends.max(2)[:, None] > i * block
    nearest = positions.min(2)[:, :, None] - positions.max(2)[:, None]
    return (i >= j) & reached & (nearest < tree.window)


def _lists(meets: Array) -> tuple[Array, Array]:
    """Return for each line [..., N] its true places, in front of its last one again, and how many.

    Both are flat, [B N N] and [B N]: scalar memory pads the last dim of others to 128.
    """
    count = meets.sum(2, dtype=jnp.int32)
    place = jnp.arange(meets.shape[2], dtype=jnp.int32)
    first = jnp.argsort(~meets, axis=2, stable=True).astype(jnp.int32)
    listed = jnp.take_along_axis(first, jnp.minimum(place, count[..., None] - 1), axis=2)
    return listed.reshape(-1), count.reshape(-1)


def _call(
    kernel: Callable[..., None],
    q: Array,
    k: Array,
    v: Array,
    tree: _Tree,
    options: _Options,
    *,
    more: tuple[Array, ...] = (),
    outputs: list[Any],
    scratch: list[tuple[int, Any]],
    by_key: bool = False,
    name: str,
) -> list[Array]:
    """Run a kernel for each row, head and block, and the blocks that it meets one after the other.

    The grid is (row, query head, block of queries, number in its list of blocks of keys), or, so
    that keys stay while the queries of all their heads pass, (row, key/value head, block of keys,
    query head of those, number in its list of blocks of queries).

    Args:
        q, k, v: [B, H, T, h], [B, K, T, h] twice.
        more: inputs that queries have: [B, H, T, h] or [B, H, 1, T].
        outputs: of which shapes and dtypes; those of keys if `by_key`, else of queries.
        scratch: width and dtype of what stays from one meeting block to the next, [n, width].
    """
    rows, heads, t, width = q.shape
    key_heads, size, blocks = k.shape[1], options.block, t // options.block
    group = heads // key_heads
    meets = _meetings(tree, size)
    listed, count = _lists(meets.swapaxes(1, 2) if by_key else meets)

    def own(*at: Any) -> tuple[Any, Any, Any]:
        return at[0], at[1], at[2]

    def met(*at: Any) -> tuple[Any, Any, Any]:
        *step, listed, _, _ = at  # behind the numbers of a step stand the prefetched arrays
        head = step[1] * group + step[3] if by_key else jax.lax.div(step[1], group)
        return step[0], head, listed[(step[0] * blocks + step[2]) * blocks + step[-1]]

    queries, keys = (met, own) if by_key else (own, met)

    def wide(at: Callable[..., tuple[Any, Any, Any]]) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, size, width), lambda *step: (*at(*step), 0))

    def of_query(x: Any) -> pl.BlockSpec:
        def at(*step: Any) -> tuple[Any, ...]:
            row, head, block = queries(*step)
            return row, head, 0, block

        return wide(queries) if x.shape[2] == t else pl.BlockSpec((None, None, 1, size), at)

    def of_place(at: Callable[..., tuple[Any, Any, Any]]) -> pl.BlockSpec:
        return pl.BlockSpec((None, 1, size), lambda *step: (at(*step)[0], 0, at(*step)[2]))

    outer = (rows, key_heads, blocks, group) if by_key else (rows, heads, blocks)
    run = pl.pallas_call(
        functools.partial(kernel, options=options),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(*outer, count.max()),  # of no more steps than the longest list has
            in_specs=[
                wide(queries),
                wide(keys),
                wide(keys),
                of_place(keys),
                of_place(queries),
                of_place(keys),
                *(of_query(x) for x in more),
            ],
            out_specs=[wide(keys) if by_key else of_query(x) for x in outputs],
            scratch_shapes=[pltpu.VMEM((size, columns), dtype) for columns, dtype in scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3 + ("arbitrary",) * (len(outer) - 2)
        ),
        interpret=options.interpret,
        name=name,
    )
    places = tree.ends, tree.positions, tree.positions
    return run(listed, count, tree.window, q, k, v, *places, *more)


def _forward_kernel(
    listed: Any,
    count: Any,
    window: Any,
    q: Any,
    k: Any,
    v: Any,
    ends: Any,
    positions: Any,
    key_positions: Any,
    out: Any,
    sums: Any,
    mix: Any,
    total: Any,
    top: Any,
    depths: Any,
    *,
    options: _Options,
) -> None:
    """Write a block of outputs and of sums; the scores are [queries, keys]."""
    i, step = pl.program_id(2), pl.program_id(3)
    j, last = _meeting(listed, count, step)

    @pl.when(step == 0)
    def start() -> None:
        mix[...], total[...] = jnp.zeros_like(mix), jnp.zeros_like(total)
        top[...] = jnp.full_like(top, UNSEEN)
        depths[...] = _column(positions)

    @pl.when(step <= last)
    def add() -> None:
        # Until its first seen key, what a query adds up is of no meaning; then it is multiplied
        # by e^(UNSEEN - top) = 0. Every query sees itself.
        near = depths[...] - key_positions[...] < window[0]
        scores = _scores(q, k, options)
        scores = jnp.where(near & _seen(scores.shape, i, j, ends[...]), scores, UNSEEN)
        highest = jnp.maximum(top[...], scores.max(1, keepdims=True))
        weights, shrink = jnp.exp(scores - highest), jnp.exp(top[...] - highest)
        total[...] = shrink * total[...] + weights.sum(1, keepdims=True)
        mix[...] = shrink * mix[...] + _product(weights.astype(v.dtype), v[...], (1, 0))
        top[...] = highest

    @pl.when(step == last)
    def end() -> None:
        out[...] = (mix[...] / total[...]).astype(out.dtype)
        sums[...] = (top[...] + jnp.log(total[...])).T


def _query_gradient_kernel(
    listed: Any,
    count: Any,
    window: Any,
    q: Any,
    k: Any,
    v: Any,
    ends: Any,
    positions: Any,
    key_positions: Any,
    g: Any,
    sums: Any,
    dots: Any,
    for_q: Any,
    total: Any,
    own_sums: Any,
    own_dots: Any,
    depths: Any,
    *,
    options: _Options,
) -> None:
    """Write a block of the gradient of queries; the scores are [queries, keys]."""
    i, step = pl.program_id(2), pl.program_id(3)
    j, last = _meeting(listed, count, step)

    @pl.when(step == 0)
    def start() -> None:
        total[...] = jnp.zeros_like(total)
        own_sums[...], own_dots[...] = _column(sums), _column(dots)
        depths[...] = _column(positions)

    @pl.when(step <= last)
    def add() -> None:
        scores = _scores(q, k, options)
        near = depths[...] - key_positions[...] < window[0]
        seen = near & _seen(scores.shape, i, j, ends[...])
        weights = jnp.where(seen, jnp.exp(scores - own_sums[...]), 0)
        for_weights = _product(g[...], v[...], (1, 1))
        slopes = _slopes(scores, weights * (for_weights - own_dots[...]), options)
        total[...] += _product(slopes.astype(k.dtype), k[...], (1, 0))

    @pl.when(step == last)
    def end() -> None:
        for_q[...] = (options.scale * total[...]).astype(for_q.dtype)


def _key_gradient_kernel(
    listed: Any,
    count: Any,
    window: Any,
    q: Any,
    k: Any,
    v: Any,
    ends: Any,
    positions: Any,
    key_positions: Any,
    g: Any,
    sums: Any,
    dots: Any,
    for_k: Any,
    for_v: Any,
    total_k: Any,
    total_v: Any,
    own_ends: Any,
    depths: Any,
    *,
    options: _Options,
) -> None:
    """Write a block of the gradients of keys and values; the scores are [keys, queries]."""
    j, head, step = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    i, last = _meeting(listed, count, step)

    @pl.when((head == 0) & (step == 0))
    def start() -> None:
        total_k[...], total_v[...] = jnp.zeros_like(total_k), jnp.zeros_like(total_v)
        own_ends[...], depths[...] = _column(ends), _column(key_positions)

    @pl.when(step <= last)
    def add() -> None:
        scores = _scores(k, q, options)
        near = positions[...] - depths[...] < window[0]
        seen = near & _seen(scores.shape, i, j, own_ends[...], query_dim=1)
        weights = jnp.where(seen, jnp.exp(scores - sums[...]), 0)
        total_v[...] += _product(weights.astype(g.dtype), g[...], (1, 0))
        for_weights = _product(v[...], g[...], (1, 1))
        slopes = _slopes(scores, weights * (for_weights - dots[...]), options)
        total_k[...] += _product(slopes.astype(q.dtype), q[...], (1, 0))

    @pl.when((head == pl.num_programs(3) - 1) & (step == last))
    def end() -> None:
        for_k[...] = (options.scale * total_k[...]).astype(for_k.dtype)
        for_v[...] = total_v[...].astype(for_v.dtype)


def _meeting(listed: Any, count: Any, step: Any) -> tuple[Any, Any]:
    """Return the block that is met in a step of a list, and the last step of the list."""
    blocks = pl.num_programs(2)
    line = pl.program_id(0) * blocks + pl.program_id(2)
    return listed[line * blocks + step], count[line] - 1


def _column(row: Any) -> Array:
    """Return [1, n] as [n, 1]."""
    return row[...].T


def _product(x: Array, y: Array, contract: tuple[int, int]) -> Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def _scores(x: Any, y: Any, options: _Options) -> Array:
    """Return the scores [n, n] of queries and keys, or of keys and queries."""
    scores = options.scale * _product(x[...], y[...], (1, 1))
    cap = options.softcap
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def _slopes(scores: Array, for_scores: Array, options: _Options) -> Array:
    """Return the gradient of what the soft cap was applied to."""
    cap = options.softcap
    return for_scores if cap is None else for_scores * (1 - jnp.square(scores / cap))


def _seen(shape: tuple[int, ...], i: Any, j: Any, ends: Array, query_dim: int = 0) -> Array:
    """Return whether a query is behind a key and in its subtree [n, n].

    Args:
        i, j: the block of queries and that of keys.
        ends: of the keys, along their dim.
    """
    query = i * shape[0] + jax.lax.broadcasted_iota(jnp.int32, shape, query_dim)
    key = j * shape[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 1 - query_dim)
    return (query >= key) & (query < ends)
