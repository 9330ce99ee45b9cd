"""The key/value cache of the native engine: pages, spread over devices by row and by head.

Each part of the mesh's batch axes has pages of its own, for the rows that it has: there a page is
called by its number on that part. Where there are more devices than heads can be split over, each
has some positions of every page, if these can be divided. Every write is in place, and touches what
it writes.

Shape legend: P pages of a part, p positions of a page, B rows of a call, T tokens of each, C pages
of a row, K key/value heads, H query heads, h head width, G parts, Lx layers with experts, k experts
of a token.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl.models.architecture import SOFTMAX, cached_attention, layers_with, routes_shape
from jaxrl.models.exact import Tiles
from jaxrl.models.kernels.paged_attention import FP8_BITS, Layout, Pages, paged_attention
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel.rules import MeshAxes, Placement
from jaxrl.rollout.native.states import States, empty_states, state_specs
from jaxrl.types import Array


def page_dtype(kv_cache_dtype: str, dtype: Any) -> Any:
    """Return the dtype of the pages of an engine that computes in `dtype`.

    Args:
        kv_cache_dtype: "auto", the same, or "fp8".
    """
    return {"auto": dtype, "fp8": FP8_BITS}[kv_cache_dtype]


class Cache(NamedTuple):
    """Hold what the model has computed for the positions of all rows.

    Attributes:
        layers: keys and values of each that has attention.
        routes: [P, p, Lx k] experts that the token was sent to, layer by layer; None = not kept.
        states: of each layer that keeps one; they are in no page.
    """

    layers: tuple[Pages, ...]
    routes: Array | None = None
    states: tuple[States, ...] = ()


def empty_cache(
    config: TransformerConfig,
    pages: int,
    size: int,
    dtype: Any,
    *,
    layout: Layout,
    keep_routes: bool = False,
    states: int = 0,
    apart: bool = True,
    kv_cache_dtype: str = "auto",
) -> Cache:
    """Make a cache of `pages` pages of `size` positions; `layout`, `apart` as in `Pages`.

    Args:
        dtype: of the computation, and of states.
        kv_cache_dtype: see `page_dtype`.
    """
    kept_in = page_dtype(kv_cache_dtype, dtype)
    layers = tuple(
        Pages.empty(cached_attention(config), pages, size, kept_in, layout=layout, apart=apart)
        for _ in range(layers_with(config, SOFTMAX))
    )
    kept = empty_states(config, states, dtype)
    if not keep_routes:
        return Cache(layers, states=kept)
    assert config.experts is not None
    # one dim: the two last ones of an array are padded to a tile of the chip
    shape = pages, size, math.prod(routes_shape(config))
    return Cache(layers, jnp.zeros(shape, config.experts.id_dtype), kept)


def write_and_attend(
    config: TransformerConfig,
    layer: Pages,
    q: Array,
    k: Array,
    v: Array,
    table: Array,
    first: Array,
    count: Array,
    sinks: Array | None = None,
    *,
    sliding: bool,
    kernel: str,
    placement: Placement | None = None,
    tiles: Tiles | None = None,
) -> tuple[Pages, Array]:
    """Put tokens of each row into its pages, and attend from them to all that the row has.

    Args:
        q: [B, T, H, h] at positions first, first + 1, ... of the row.
        k, v: [B, K, T, h].
        table: [B, C] where the pages of a row are.
        first: [B]; below 0, the row is none.
        count: [B] of its tokens that are real. The others are not written, and get anything.
        sinks, sliding, kernel, tiles: see `paged_attention`.
        placement: the mesh that rows and heads are split over; None = one device.

    Returns:
        The layer, and [B, T, H, h].
    """

    size, by_head, by_position = layer.size, None, None
    scores = () if sinks is None else (sinks,)
    if placement is not None:
        by_head, by_position = _axes(layer, placement)

    def run(
        layer: Pages,
        q: Array,
        k: Array,
        v: Array,
        table: Array,
        first: Array,
        count: Array,
        *sinks: Array,
    ) -> tuple[Pages, Array]:
        flat = (x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (k, v))
        pages = len(layer.arrays[0])
        ids, at = _places(table, first, count, q.shape[1], pages=pages, size=size)
        if by_position is not None:
            here = at // layer.size == jax.lax.axis_index(by_position)
            ids, at = jnp.where(here, ids, pages), at % layer.size
        layer = layer.write(ids, at, *flat)
        given = cached_attention(config), q, layer, table, first, *sinks
        how = {"kernel": kernel, "axis": by_position, "tiles": tiles}
        out = paged_attention(*given, sliding=sliding, **how)
        return layer, out

    if placement is not None:
        by_row = placement.batch_axes
        row, pages = PartitionSpec(by_row), _split(layer, placement)
        asks, held = PartitionSpec(by_row, None, by_head), PartitionSpec(by_row, by_head)
        given = pages, asks, held, held, row, row, row, *(PartitionSpec(by_head) for _ in scores)
        run = _by_device(run, placement, given, (pages, asks))
    return run(layer, q, k, v, table, first, count, *scores)


def write_routes(
    routes: Array,
    chosen: Array,
    table: Array,
    first: Array,
    count: Array,
    *,
    placement: Placement | None = None,
) -> Array:
    """Put the experts [B, T, Lx k] that tokens of each row were sent to into the row's pages.

    Args:
        routes: [P, p, Lx k].
        table, first, count: see `write_and_attend`.
    """

    def run(routes: Array, chosen: Array, table: Array, first: Array, count: Array) -> Array:
        pages, size, width = routes.shape
        ids, at = _places(table, first, count, chosen.shape[1], pages=pages, size=size)
        return routes.at[ids, at].set(chosen.reshape(-1, width).astype(routes.dtype), mode="drop")

    if placement is not None:
        row = PartitionSpec(placement.batch_axes)
        run = _by_device(run, placement, (row,) * 5, row)
    return run(routes, chosen, table, first, count)


def _places(
    table: Array, first: Array, count: Array, tokens: int, *, pages: int, size: int
) -> tuple[Array, Array]:
    """Return the page [B T] of each token and its place there; of those that are none, page P."""
    index = jnp.arange(tokens)
    at = first[:, None] + index
    ids = jnp.take_along_axis(table, jnp.clip(at // size, 0, table.shape[1] - 1), axis=1)
    ids = jnp.where(index < count[:, None], ids, pages)
    return ids.ravel(), (at % size).ravel()


def copy_pages(
    cache: Cache, pairs: Array, until: Array, step: Array, placement: Placement | None = None
) -> Cache:
    """Copy pages (from, to) within their part, one after the other.

    Args:
        pairs: [G n, 2], those of part i at i n.
        until: [G, steps + 1]; those of a step are the pairs until[step] to until[step + 1].
    """

    def run(cache: Cache, pairs: Array, until: Array, step: Array) -> Cache:
        def copy(i: Array, cache: Cache) -> Cache:
            def put(x: Array) -> Array:
                page = jax.lax.dynamic_slice_in_dim(x, pairs[i, 0], 1)
                return jax.lax.dynamic_update_slice_in_dim(x, page, pairs[i, 1], 0)

            return jax.tree.map(put, cache)

        return jax.lax.fori_loop(until[0, step], until[0, step + 1], copy, cache)

    pages = cache._replace(states=())
    if placement is not None:
        split, part = _split_pages(pages, placement), PartitionSpec(placement.batch_axes)
        run = _by_device(run, placement, (split, part, part, PartitionSpec()), split)
    return run(pages, pairs, until, step)._replace(states=cache.states)


def lengthen(cache: Cache, more: int, *, placement: Placement | None = None) -> Cache:
    """Return the cache with `more` pages in each part, behind those that are there."""

    def run(cache: Cache) -> Cache:
        return jax.tree.map(lambda x: jnp.pad(x, [(0, more), *((0, 0),) * (x.ndim - 1)]), cache)

    pages = cache._replace(states=())
    if placement is not None:
        split = _split_pages(pages, placement)
        run = _by_device(run, placement, (split,), split)
    return run(pages)._replace(states=cache.states)


def take_pages(cache: Cache, ids: Array, *, placement: Placement | None = None) -> Any:
    """Return the arrays of n pages of each part [G n, ...]; an id of P or more gives anything.

    Args:
        ids: [G n].
    """

    def run(cache: Cache, ids: Array) -> Any:
        return jax.tree.map(lambda x: x.at[ids].get(mode="clip"), cache)

    pages = cache._replace(states=())
    if placement is not None:
        split, part = _split_pages(pages, placement), PartitionSpec(placement.batch_axes)
        run = _by_device(run, placement, (split, part), split)
    return run(pages, ids)


def put_pages(cache: Cache, ids: Array, held: Any, *, placement: Placement | None = None) -> Cache:
    """Undo `take_pages`, wherever the pages shall be now; an id of P or more is dropped."""

    def run(cache: Cache, ids: Array, held: Any) -> Cache:
        return jax.tree.map(lambda x, new: x.at[ids].set(new, mode="drop"), cache, held)

    pages = cache._replace(states=())
    if placement is not None:
        split, part = _split_pages(pages, placement), PartitionSpec(placement.batch_axes)
        run = _by_device(run, placement, (split, part, split), split)
    return run(pages, ids, held)._replace(states=cache.states)


def take_states(cache: Cache, ids: Array) -> tuple[States, ...]:
    """Return states by their numbers among those of all parts."""
    return jax.tree.map(lambda x: x.at[ids].get(mode="clip"), cache.states)


def put_states(cache: Cache, ids: Array, held: tuple[States, ...]) -> Cache:
    """Undo `take_states`, wherever the states shall be now; beyond all of them they are dropped."""
    put = jax.tree.map(lambda x, new: x.at[ids].set(new, mode="drop"), cache.states, held)
    return cache._replace(states=put)


# ---------------------------------------------------------------- devices


def _axes(layer: Pages, placement: Placement) -> tuple[MeshAxes, MeshAxes]:
    """Return the mesh axes that split the heads of pages, and those that split their positions.

    Which device has a position follows from the position, so that no neighbour changes a bit.
    """
    axes = placement.rules.kv_heads
    devices = placement.size(axes)
    by_head = placement.spec((layer.kv_heads,), ("kv_heads",))[0]
    if layer.heads % devices:  # with those that fill the array up
        by_head = None
    runs_out = by_head is None and devices > 1 and layer.size % devices == 0
    return by_head, axes if runs_out and layer.apart else None


def _split(layer: Pages, placement: Placement) -> Pages:
    """Return the mesh axes of each dim of a layer's arrays; every batch axis splits its pages."""
    by_head, by_position = _axes(layer, placement)

    def spec(position_axis: int) -> PartitionSpec:
        by_dim = {layer.head_axis: by_head, position_axis: by_position}
        return PartitionSpec(placement.batch_axes, *(by_dim.get(dim) for dim in (1, 2, 3)))

    return layer.replace(arrays=tuple(map(spec, layer.position_axes)))


def _split_pages(cache: Cache, placement: Placement) -> Cache:
    routes = None if cache.routes is None else PartitionSpec(placement.batch_axes)
    return Cache(tuple(_split(layer, placement) for layer in cache.layers), routes)


def cache_shardings(cache: Cache, placement: Placement) -> Cache:
    """Return the shardings of a cache, given its shapes."""
    states = state_specs(cache.states, placement)
    return jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(placement.mesh, spec),
        _split_pages(cache, placement)._replace(states=states),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def _by_device(run: Callable, placement: Placement, in_specs: tuple, out_specs: Any) -> Callable:
    """Return a function that each device runs on its own part."""
    return jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,  # a kernel does not say over which axes its output varies
    )
