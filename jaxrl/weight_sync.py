"""Parameters on their way to a sampler: merged, cast, and cut into groups of bounded size.

A group is what is moved at a time, so that moving costs no more memory than one of them. It holds
some layers of all stacked arrays, or parts of the others. An array of which one layer (or all, if
it has none) is larger than a group is cut further, along its next dims: no group is ever larger.

    plan          which pieces of which arrays make up each group
    take          the pieces of a group, from the trainer's parameters, on their devices
    Assembly      arrays on other devices, filled piece by piece
    local_copy    all of it between the processes of a job: a copy on the devices of each
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.checksums import checksums
from jaxrl.models.linear import Weight, is_adapted, merge
from jaxrl.models.transformer import Params
from jaxrl.types import Array

GROUP_BYTES = 256 * 2**20
STACKED = "layers"  # whose arrays have a leading dim of layers
NOT_CAST = frozenset({"final_norm"})  # as in the sampler's own layout


class Piece(NamedTuple):
    """A range of every dim of one array.

    Attributes:
        name: path of the array in the parameters, e.g. "layers/wq".
        starts, shape: of the range.
        dtype: in which it travels.
    """

    name: str
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


Group = tuple[Piece, ...]


def named(params: Params) -> dict[str, Any]:
    """The arrays by their paths; a matrix and its adapter are one."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_adapted)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


def whole_pieces(params: Params, dtype: Any) -> list[Piece]:
    """Each array as one piece, in the dtype in which it travels; arrays or shapes."""
    found = {n: x.w if is_adapted(x) else x for n, x in named(params).items()}
    return [
        Piece(n, (0,) * x.ndim, x.shape, str(jnp.dtype(x.dtype if n in NOT_CAST else dtype)))
        for n, x in found.items()
    ]


def plan(params: Params, dtype: Any, group_bytes: int = GROUP_BYTES) -> list[Group]:
    """The pieces of each group; together every element of every array, once.

    Args:
        params: arrays or shapes.
        dtype: of the sampler.
        group_bytes: most bytes of a group.
    """
    whole = whole_pieces(params, dtype)
    stacked = [piece for piece in whole if piece.name.startswith(f"{STACKED}/")]
    groups = list(_filled([p for p in whole if p not in stacked], group_bytes))
    for first, count in layer_ranges(stacked, group_bytes):
        some = [
            p._replace(starts=(first, *p.starts[1:]), shape=(count, *p.shape[1:])) for p in stacked
        ]
        groups += _filled(some, group_bytes)
    return groups


def layer_ranges(stacked: Sequence[Piece], group_bytes: int) -> list[tuple[int, int]]:
    """First layer and number of layers of each group of stacked arrays; at least one."""
    if not stacked:
        return []
    layers, size = stacked[0].shape[0], sum(piece.nbytes for piece in stacked)
    each = max(1, group_bytes * layers // size)
    return [(first, min(each, layers - first)) for first in range(0, layers, each)]


def _filled(pieces: Sequence[Piece], group_bytes: int) -> Iterator[Group]:
    """Groups of neighbours, as many as fit."""
    group: list[Piece] = []
    for piece in (part for whole in pieces for part in _cut(whole, group_bytes)):
        if group and sum(p.nbytes for p in group) + piece.nbytes > group_bytes:
            yield tuple(group)
            group = []
        group.append(piece)
    if group:
        yield tuple(group)


def _cut(piece: Piece, group_bytes: int) -> Iterator[Piece]:
    """Parts of a piece that fit into a group, cut along its first dim that can be cut."""
    dim = next((i for i, size in enumerate(piece.shape) if size > 1), None)
    if piece.nbytes <= group_bytes or dim is None:
        yield piece
        return
    size = piece.shape[dim]
    each = max(1, group_bytes * size // piece.nbytes)
    for first in range(0, size, each):
        starts, shape = list(piece.starts), list(piece.shape)
        starts[dim] += first
        shape[dim] = min(each, size - first)
        yield from _cut(piece._replace(starts=tuple(starts), shape=tuple(shape)), group_bytes)


# ---- where the parameters are


def take(params: Params, group: Group, *, everywhere: bool = False) -> list[jax.Array]:
    """The pieces of a group, cast, on the devices of the parameters.

    Args:
        everywhere: each device gets all of them, which all processes of the job must ask for
            together; else they are spread as the parameters are.
    """
    found = named(params)
    weights = [found[piece.name] for piece in group]
    starts = [piece.starts for piece in group]
    shapes = tuple((p.shape, p.dtype, p.name.startswith(f"{STACKED}/")) for p in group)
    if not everywhere:
        return _take(weights, starts, shapes)
    mesh = jax.tree.leaves(weights)[0].sharding.mesh
    return _take_everywhere(mesh)(weights, starts, shapes)


def _pieces(weights: list[Weight], starts: list[Any], shapes: tuple) -> list[jax.Array]:
    return [
        _piece(weight, at, *kind) for weight, at, kind in zip(weights, starts, shapes, strict=True)
    ]


_take = jax.jit(_pieces, static_argnums=2)


@functools.lru_cache(maxsize=8)
def _take_everywhere(mesh: Mesh) -> Any:
    return jax.jit(_pieces, static_argnums=2, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _piece(
    weight: Weight, starts: Sequence[Array], shape: tuple[int, ...], dtype: str, stacked: bool
) -> jax.Array:
    """Layers are cut out first: what is merged and cast is no more than these."""
    if stacked:
        weight = some_layers(weight, starts[0], shape[0])
        starts = (0, *starts[1:])
    array = merge(weight).astype(dtype)
    return jax.lax.dynamic_slice(array, starts, shape)


def some_layers(stacked: Any, first: Array, count: int) -> Any:
    """`count` layers of a tree of stacked arrays."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count), stacked)


@functools.partial(jax.jit, static_argnames=("count", "dtype"))
def take_layers(stacked: Params, first: int, *, count: int, dtype: Any) -> Params:
    """Layers of the stacked parameters, merged and cast, on their devices."""
    return jax.tree.map(lambda x: x.astype(dtype), merge(some_layers(stacked, first, count)))


def sums(arrays: Sequence[jax.Array]) -> list[int]:
    """A checksum of each array, the same on every mesh."""
    found = checksums(list(arrays))
    return [found[f"[{number}]"] for number in range(len(arrays))]


# ---- where they go


class Assembly:
    """Arrays that are filled piece by piece; the pieces may come in any order.

    Args:
        pieces: each array as one piece.
        shardings: of each array, by name.
    """

    def __init__(self, pieces: Sequence[Piece], shardings: Mapping[str, Any]) -> None:
        self.wholes, self.shardings = {p.name: p for p in pieces}, dict(shardings)
        self.missing = sum(math.prod(p.shape) for p in pieces)  # elements
        self._arrays: dict[str, jax.Array] = {}

    def put(self, group: Group, arrays: Sequence[jax.Array]) -> None:
        """Fill in a group, and wait until it is there: what it came in can be freed.

        Args:
            arrays: on any devices.

        Raises:
            ValueError: a piece is not part of these arrays.
        """
        for piece, array in zip(group, arrays, strict=True):
            whole = self._check(piece)
            if piece.shape == whole.shape:
                self._arrays[piece.name] = jax.device_put(array, self.shardings[piece.name])
            else:
                self._fill(piece, whole, array)
            self.missing -= math.prod(piece.shape)
        jax.block_until_ready([self._arrays[piece.name] for piece in group])

    def finish(self, like: Params) -> Params:
        """All arrays, in a tree as `like` has it.

        Raises:
            ValueError: something is missing.
        """
        if self.missing:
            raise ValueError(f"{self.missing} elements of the weights have not come")
        return jax.tree_util.tree_map_with_path(
            lambda path, _: self._arrays["/".join(key.key for key in path)],
            like,
            is_leaf=is_adapted,
        )

    def _check(self, piece: Piece) -> Piece:
        whole = self.wholes.get(piece.name)
        if whole is None:
            raise ValueError(f"{piece.name} is none of this model's arrays")
        ranges = zip(piece.starts, piece.shape, whole.shape, strict=False)
        ranks = {len(piece.starts), len(piece.shape), len(whole.shape)}
        if len(ranks) > 1 or not all(
            at >= 0 and n > 0 and at + n <= most for at, n, most in ranges
        ):
            raise ValueError(
                f"{piece} is not a part of {piece.name}, which has shape {whole.shape}"
            )
        if piece.dtype != whole.dtype:
            raise ValueError(f"{piece.name} comes as {piece.dtype}; here it is {whole.dtype}")
        return whole

    def _fill(self, piece: Piece, whole: Piece, array: jax.Array) -> None:
        sharding = self.shardings[piece.name]
        if piece.name not in self._arrays:
            self._arrays[piece.name] = _empty(whole.shape, whole.dtype, sharding)
        there = self._arrays.pop(piece.name)
        near = jax.device_put(array, _on_all(sharding))
        self._arrays[piece.name] = _fill(sharding)(there, near, piece.starts)


def _on_all(sharding: Any) -> Any:
    """Whole on the same devices."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def _empty(shape: tuple[int, ...], dtype: str, sharding: Any) -> jax.Array:
    return jnp.empty(shape, dtype, device=sharding)


@functools.lru_cache(maxsize=64)
def _fill(sharding: Any) -> Any:
    return jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0, out_shardings=sharding)


# ---- between the processes of a job


def local_copy(
    params: Params, local_mesh: Mesh, dtype: Any, group_bytes: int = GROUP_BYTES
) -> Params:
    """The parameters of a job of several processes, whole on the devices of this one.

    All processes call it together. Each group is made whole on all devices by one collective, and
    is kept spread over those of `local_mesh`: along the largest dim that they divide, but not that
    of layers.

    Args:
        params: spread over all processes.
        local_mesh: devices of this process.
        dtype: of the sampler.
    """
    pieces = whole_pieces(params, dtype)
    shardings = {piece.name: _spread(piece, local_mesh) for piece in pieces}
    assembly = Assembly(pieces, shardings)
    for group in plan(params, dtype, group_bytes):
        arrays = take(params, group, everywhere=True)
        assembly.put(group, [_local(array, local_mesh) for array in arrays])
    return assembly.finish(params)


def _spread(piece: Piece, mesh: Mesh) -> NamedSharding:
    dims = range(piece.name.startswith(f"{STACKED}/"), len(piece.shape))
    fits = [dim for dim in dims if piece.shape[dim] % mesh.size == 0]
    chosen = max(fits, key=lambda dim: piece.shape[dim], default=None)
    axes = [mesh.axis_names if dim == chosen else None for dim in range(len(piece.shape))]
    return NamedSharding(mesh, PartitionSpec(*axes))


def _local(array: jax.Array, mesh: Mesh) -> jax.Array:
    """What the devices of a mesh hold of an array that each device holds whole."""
    held = {shard.device: shard.data for shard in array.addressable_shards}
    whole = NamedSharding(mesh, PartitionSpec())
    parts = [held[device] for device in mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(array.shape, whole, parts)
