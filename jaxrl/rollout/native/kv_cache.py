"""The key/value cache of the native engine, spread over devices by slot and head.

Every write is in place, and touches what it writes. On TPUs that takes more than a scatter: XLA
wants the positions of a scatter outermost, where no kernel reads them, and copies the whole cache
there and back. Slots that lie on several devices are written by each device for itself.

Shape legend: S slots, L positions of a slot, B rows of a call, C tokens of a chunk, K key/value
heads, h head width.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxrl.models.kernels import decode_kernels
from jaxrl.models.kernels.choice import REFERENCE
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel.rules import Placement
from jaxrl.types import Array

TPU_LANES = 128  # a multiple of which the minor dim of an array takes


class LayerCache(struct.PyTreeNode):
    """Hold keys and values of one layer; position p of a slot holds the token at p of its row."""

    keys: Array  # [S, K, L, h], or [S, K, h, L] where `transposed`
    values: Array  # [S, K, L, h]
    transposed: bool = struct.field(pytree_node=False)

    def each(self, change: Callable[..., Any], *others: "LayerCache") -> "LayerCache":
        """Return `change(array, dim of its positions, *those of others)` of keys and of values."""
        axis = 3 if self.transposed else 2
        keys = change(self.keys, axis, *(other.keys for other in others))
        values = change(self.values, 2, *(other.values for other in others))
        return LayerCache(keys, values, self.transposed)

    def by_position(self) -> tuple[Array, Array]:
        """Return keys and values, both [S, K, L, h]."""
        return (self.keys.swapaxes(2, 3) if self.transposed else self.keys), self.values


Cache = tuple[LayerCache, ...]


def keys_transposed(config: TransformerConfig, platform: str) -> bool:
    """Return whether keys lie transposed.

    On a CPU a product that runs along the minor dim of both arrays, or along the minor dim of
    neither, takes 3 to 7 times as long (docs/performance.md). cuDNN wants keys as values. A TPU
    takes either, and a token is one tile where the head is its minor dim; but a head narrower than
    128 fills its tiles only in part, and is read more often than it is written.
    """
    narrow = platform == "tpu" and config.head_dim % TPU_LANES != 0
    return narrow or platform not in ("tpu", "gpu")


def empty_cache(
    config: TransformerConfig, slots: int, length: int, dtype: jnp.dtype, platform: str
) -> Cache:
    """Make a cache with room for `length` tokens in each of `slots` slots, as a platform has it."""
    heads, width = config.num_kv_heads, config.head_dim
    transposed = keys_transposed(config, platform)
    return tuple(
        LayerCache(
            jnp.zeros((slots, heads, *((width, length) if transposed else (length, width))), dtype),
            jnp.zeros((slots, heads, length, width), dtype),
            transposed,
        )
        for _ in range(config.num_layers)
    )


def lengthen(cache: Cache, length: int) -> Cache:
    """Return the cache with room for `length` tokens in each slot."""

    def pad(x: Array, axis: int) -> Array:
        return jnp.pad(x, [(0, length - n if i == axis else 0) for i, n in enumerate(x.shape)])

    return tuple(layer.each(pad) for layer in cache)


# ---------------------------------------------------------------- writes


def write_tokens(
    layer: LayerCache,
    positions: Array,
    k: Array,
    v: Array,
    placement: Placement | None = None,
    kernel: str | None = None,
) -> LayerCache:
    """Put a token into each slot, row s into slot s.

    Args:
        positions: [S]; what is outside is dropped.
        k, v: [S, K, 1, h].
        placement: the mesh that slots and heads are split over; None = one device.
        kernel: of `DECODE_ATTENTION`, which reads what is written; with "xla" this is a scatter on
            TPUs, too.
    """
    by_slot, by_head = _axes(layer, placement)
    run = functools.partial(_token_on_device, kernel)
    if placement is not None:
        split = PartitionSpec(by_slot, by_head)
        run = _by_device(run, placement, (split, PartitionSpec(by_slot), split, split), split)
    return run(layer, positions, k, v)


def _token_on_device(
    named: str | None, layer: LayerCache, positions: Array, k: Array, v: Array
) -> LayerCache:
    def scatter(layer: LayerCache, positions: Array, k: Array, v: Array) -> LayerCache:
        return write(layer, jnp.arange(len(k))[:, None], positions[:, None], k, v)

    def kernel(layer: LayerCache, positions: Array, k: Array, v: Array) -> LayerCache:
        k, v = (x[:, :, 0].astype(layer.keys.dtype) for x in (k, v))
        given = layer.keys, layer.values, k, v, positions
        written = decode_kernels.tpu_write(*given, transposed=layer.transposed)
        return LayerCache(*written, layer.transposed)

    platforms = {}
    if named != REFERENCE and decode_kernels.fits(*layer.values.shape[2:]):
        platforms["tpu"] = kernel
    return jax.lax.platform_dependent(layer, positions, k, v, default=scatter, **platforms)


def write_chunks(
    layer: LayerCache,
    slots: Array,
    starts: Array,
    k: Array,
    v: Array,
    placement: Placement | None = None,
) -> LayerCache:
    """Put a chunk of each row into its slot.

    Args:
        slots: [B], no two the same but S = padding.
        starts: [B] positions of the first tokens.
        k, v: [B, K, C, h]; what falls behind the last position is dropped.
        placement: the mesh that slots and heads are split over; None = one device.
    """
    by_slot, by_head = _axes(layer, placement)
    run = functools.partial(_chunks_on_device, by_slot)
    if placement is not None:
        split, whole, rows = PartitionSpec(by_slot, by_head), PartitionSpec(), (None, by_head)
        specs = split, whole, whole, PartitionSpec(*rows), PartitionSpec(*rows)
        run = _by_device(run, placement, specs, split)
    return run(layer, slots, starts, k, v)


def _chunks_on_device(
    by_slot: str | None, layer: LayerCache, slots: Array, starts: Array, k: Array, v: Array
) -> LayerCache:
    def scatter(layer: LayerCache, slots: Array, starts: Array, k: Array, v: Array) -> LayerCache:
        positions = starts[:, None] + jnp.arange(k.shape[2])
        return write(layer, slots[:, None], positions, k, v)

    here = _here(layer, slots, by_slot)
    return jax.lax.platform_dependent(layer, here, starts, k, v, default=scatter, tpu=write_windows)


def write(layer: LayerCache, slots: Array, positions: Array, k: Array, v: Array) -> LayerCache:
    """Put k, v [B, K, C, h] at `positions` [B, C] of `slots` [B, 1]; what is outside is dropped."""
    k, v = (x.swapaxes(1, 2).astype(layer.keys.dtype) for x in (k, v))  # [B, C, K, h]

    def put(x: Array, axis: int, new: Array) -> Array:
        return x.at[at_positions(slots, positions, axis)].set(new, mode="drop")

    return layer.each(put, LayerCache(k, v, layer.transposed))


def at_positions(slots: Any, positions: Any, axis: int) -> tuple:
    """Return the index of some positions of slots, in an array that has positions in dim `axis`."""
    return (slots, slice(None), *(positions if i == axis else slice(None) for i in (2, 3)))


def write_windows(layer: LayerCache, slots: Array, starts: Array, k: Array, v: Array) -> LayerCache:
    """Do `write_chunks` on one device with one update of C neighbouring positions per row."""
    (total, _, length, _), width = layer.values.shape, k.shape[2]
    new = LayerCache(k.swapaxes(2, 3) if layer.transposed else k, v, layer.transposed)

    def put(i: Array, layer: LayerCache) -> LayerCache:
        first = jnp.minimum(starts[i], length - width)  # a window may not hang over the end
        late = starts[i] - first
        held = (jnp.arange(width) >= late) & (slots[i] < total)

        def update(x: Array, axis: int, new: Array) -> Array:
            row = new[i][None].astype(x.dtype)
            corner = [slots[i], 0, 0, 0]
            corner[axis] = first
            old = jax.lax.dynamic_slice(x, corner, row.shape)
            mask = jnp.expand_dims(held, tuple(range(1, 4 - axis)))
            row = jnp.where(mask, jnp.roll(row, late, axis), old)
            return jax.lax.dynamic_update_slice(x, row, corner)

        return layer.each(update, new)

    return jax.lax.fori_loop(0, len(slots), put, layer)


# ---------------------------------------------------------------- slots


def copy_slots(
    cache: Cache,
    sources: Array,
    targets: Array,
    number: Array,
    *,
    placement: Placement | None = None,
) -> Cache:
    """Copy the first `number` slots of `sources` to those of `targets`, in order.

    A row travels only if its copy is on another device.
    """
    by_slot, by_head = _axes(cache[0], placement)
    run = functools.partial(_copy_on_device, by_slot)
    if placement is not None:
        split, whole = PartitionSpec(by_slot, by_head), PartitionSpec()
        run = _by_device(run, placement, (split, whole, whole, whole), split)
    return run(cache, sources, targets, number)


def _copy_on_device(
    by_slot: str | None, cache: Cache, sources: Array, targets: Array, number: Array
) -> Cache:
    total = len(cache[0].keys)
    take, put = _here(cache[0], sources, by_slot), _here(cache[0], targets, by_slot)

    def copy(i: Array, cache: Cache) -> Cache:
        def update(cache: Cache, rows: Cache) -> Cache:
            return jax.tree.map(
                lambda x, row: jax.lax.dynamic_update_slice_in_dim(x, row, put[i], 0), cache, rows
            )

        def travel(rows: Cache) -> Cache:
            sent = jax.tree.map(lambda x: jnp.where(take[i] < total, x, 0), rows)
            return jax.lax.psum(sent, by_slot)

        rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, take[i], 1), cache)
        if by_slot is None:
            return update(cache, rows)
        stays = sources[i] // total == targets[i] // total
        rows = jax.lax.cond(stays, lambda rows: rows, travel, rows)
        return jax.lax.cond(put[i] < total, update, lambda cache, _: cache, cache, rows)

    return jax.lax.fori_loop(0, number, copy, cache)


def take_rows(
    layer: LayerCache, slots: Array, length: int, placement: Placement | None = None
) -> LayerCache:
    """Return the first `length` positions of each row's slot; of padding, anything.

    One slice after the other: for a gather XLA copies the whole layer on TPUs.

    Args:
        slots: [B]; the rows are split as the slots are.
        placement: the mesh that slots and heads are split over; None = one device.
    """
    by_slot, by_head = _axes(layer, placement)
    run = functools.partial(_take_on_device, by_slot, length)
    if placement is not None:
        split = PartitionSpec(by_slot, by_head)
        run = _by_device(run, placement, (split, PartitionSpec()), split)
    return run(layer, slots)


def _take_on_device(
    by_slot: str | None, length: int, layer: LayerCache, slots: Array
) -> LayerCache:
    at, total = _here(layer, slots, by_slot), len(layer.keys)

    def take(x: Array, axis: int) -> Array:
        shape = [length if i == axis else n for i, n in enumerate(x.shape)][1:]

        def put(i: Array, rows: Array) -> Array:
            row = jax.lax.dynamic_slice(x, (at[i], 0, 0, 0), (1, *shape))
            if by_slot is not None:
                row = jnp.where(at[i] < total, row, 0)
            return jax.lax.dynamic_update_slice_in_dim(rows, row, i, 0)

        rows = jax.lax.fori_loop(0, len(slots), put, jnp.zeros((len(slots), *shape), x.dtype))
        if by_slot is None:
            return rows
        return jax.lax.psum_scatter(rows, by_slot, scatter_dimension=0, tiled=True)

    return layer.each(take)


def take_slots(cache: Cache, slots: Array | None, length: int) -> Cache:
    """Return the first `length` positions of some slots; None = all of them, in order."""

    def take(x: Array, axis: int) -> Array:
        x = jax.lax.slice_in_dim(x, 0, length, axis=axis)
        return x if slots is None else x.at[slots].get(mode="clip")

    return tuple(layer.each(take) for layer in cache)


def put_slots(cache: Cache, slots: Array | None, part: Cache, length: int) -> Cache:
    """Undo `take_slots`; padding is dropped."""
    at = slice(None) if slots is None else slots

    def put(x: Array, axis: int, new: Array) -> Array:
        return x.at[at_positions(at, slice(length), axis)].set(new, mode="drop")

    return tuple(layer.each(put, new) for layer, new in zip(cache, part, strict=True))


# ---------------------------------------------------------------- devices


def _axes(layer: LayerCache, placement: Placement | None) -> tuple:
    """Return the mesh axes over which slots and heads are spread."""
    if placement is None:
        return None, None
    return placement.spec(layer.values.shape, ("batch", "kv_heads", None, None))[:2]


def _by_device(
    run: Callable, placement: Placement, in_specs: tuple, out_specs: PartitionSpec
) -> Callable:
    """Return a function that each device runs on its own part."""
    return jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,  # a kernel does not say over which axes its output varies
    )


def _here(layer: LayerCache, slots: Array, by_slot: str | None) -> Array:
    """Return slots as this device counts its own, and its S for those of other devices."""
    total = len(layer.keys)
    if by_slot is None:
        return slots
    local = slots - jax.lax.axis_index(by_slot) * total
    return jnp.where((local >= 0) & (local < total), local, total)
