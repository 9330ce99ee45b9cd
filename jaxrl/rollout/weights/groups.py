"""Parameters on their way to a sampler: merged, cast, and cut into groups of bounded size.

A group is what is moved at a time, so that moving costs no more memory than one of them. It holds
some layers of all stacked arrays, or parts of the others. An array of which one layer (or all, if
it has none) is larger than a group is cut further, along its next dims: no group is ever larger.

    plan          which pieces of which arrays make up each group
    take          the pieces of a group, from the trainer's parameters, on their devices
    Assembly      arrays on other devices, filled piece by piece
    local_copy    all of it between the processes of a job: a copy on the devices of each
    to_engine     arrays of a job on the devices of the engine of this process, of several hosts
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.models.architecture import KINDS
from jaxrl.models.linear import LoraWeight, Weight, is_adapted, merge
from jaxrl.models.transformer import Params
from jaxrl.parallel import by_process, hosts_of, make_mesh
from jaxrl.parallel.checksums import checksums
from jaxrl.types import Array

GROUP_BYTES = 256 * 2**20
STACKED = "layers"  # whose arrays have a leading dim of layers
NOT_CAST = frozenset({"final_norm"})  # as in the sampler's own layout


class Piece(NamedTuple):
    """Name a range of every dim of one array.

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
        """Return the size of the piece in bytes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    @property
    def box(self) -> tuple[slice, ...]:
        """Return the ranges as slices of the array."""
        return tuple(slice(at, at + n) for at, n in zip(self.starts, self.shape, strict=True))


Arrays = Mapping[str, Any]  # by path


def named(params: Params) -> Arrays:
    """Return the arrays by their paths; a matrix and its adapter are one."""
    return _by_path(params, is_adapted)


def _by_path(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def whole_pieces(arrays: Arrays, dtype: Any = None) -> list[Piece]:
    """Return each array as one piece, in the dtype in which it travels.

    Args:
        arrays: or shapes.
        dtype: of the sampler; None = each as it is.
    """

    def cast(name: str, x: Any) -> Any:
        keeps = dtype is None or name in NOT_CAST or not jnp.issubdtype(x.dtype, jnp.floating)
        return x.dtype if keeps else dtype

    found = {name: x.w if is_adapted(x) else x for name, x in arrays.items()}
    return [
        Piece(name, (0,) * x.ndim, x.shape, str(jnp.dtype(cast(name, x))))
        for name, x in found.items()
    ]


def plan(whole: Sequence[Piece], group_bytes: int = GROUP_BYTES) -> list[tuple[Piece, ...]]:
    """Return the pieces of each group; together every element of every array, once.

    Args:
        whole: each array as one piece.
        group_bytes: most bytes of a group.
    """
    stacks: dict[str, list[Piece]] = {STACKED: [], **{f"{STACKED}/{kind}": [] for kind in KINDS}}
    for p in whole:
        folder = p.name.rpartition("/")[0]
        if folder in stacks and p.shape:
            stacks[folder].append(p)
    # a flax module's have no such dim
    stacks = {k: some for k, some in stacks.items() if len({p.shape[0] for p in some}) == 1}
    stacked = {p.name for some in stacks.values() for p in some}
    groups = list(_filled([p for p in whole if p.name not in stacked], group_bytes))
    for stack in stacks.values():
        for first, count in layer_ranges(stack, group_bytes):
            some = [
                p._replace(starts=(first, *p.starts[1:]), shape=(count, *p.shape[1:]))
                for p in stack
            ]
            groups += _filled(some, group_bytes)
    return groups


def layer_ranges(stacked: Sequence[Piece], group_bytes: int) -> list[tuple[int, int]]:
    """Return the first layer and the number of layers of each group of stacked arrays.

    That number is at least one.
    """
    if not stacked:
        return []
    layers, size = stacked[0].shape[0], sum(piece.nbytes for piece in stacked)
    each = max(1, group_bytes * layers // size)
    return [(first, min(each, layers - first)) for first in range(0, layers, each)]


def _filled(pieces: Sequence[Piece], group_bytes: int) -> Iterator[tuple[Piece, ...]]:
    """Yield groups of neighbours, as many as fit."""
    group: list[Piece] = []
    for piece in (part for whole in pieces for part in _cut(whole, group_bytes)):
        if group and sum(p.nbytes for p in group) + piece.nbytes > group_bytes:
            yield tuple(group)
            group = []
        group.append(piece)
    if group:
        yield tuple(group)


def _cut(piece: Piece, group_bytes: int) -> Iterator[Piece]:
    """Yield parts of a piece that fit into a group, cut along its first dim that can be cut."""
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


def take(arrays: Arrays, group: Sequence[Piece]) -> list[jax.Array]:
    """Return the pieces of a group, merged and cast.

    They are on the devices of the parameters, spread as they are.

    Nothing is gathered for it, but the pieces of a dim that is itself spread.
    """
    weights = [arrays[piece.name] for piece in group]
    return _take(
        weights, [piece.starts for piece in group], tuple((p.shape, p.dtype) for p in group)
    )


@functools.partial(jax.jit, static_argnums=2)
def _take(weights: list[Weight], starts: list[Any], kinds: tuple) -> list[jax.Array]:
    return [
        _piece(weight, at, *kind) for weight, at, kind in zip(weights, starts, kinds, strict=True)
    ]


def _piece(
    weight: Weight, starts: Sequence[Array], shape: tuple[int, ...], dtype: str
) -> jax.Array:
    """Return a piece, merged and cast.

    Its layers are cut out first: what is merged and cast is no more than these.
    """
    if shape and not (isinstance(weight, LoraWeight) and weight.scale.ndim == 0):
        weight = some_layers(weight, starts[0], shape[0])
        starts = (0, *starts[1:])
    return jax.lax.dynamic_slice(merge(weight).astype(dtype), starts, shape)


def some_layers(stacked: Any, first: Array, count: int) -> Any:
    """Return `count` layers of a tree of stacked arrays."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count), stacked)


@functools.partial(jax.jit, static_argnames=("count", "dtype"))
def take_layers(stacked: Params, first: int, *, count: int, dtype: Any) -> Params:
    """Return layers of the stacked parameters, merged and cast, on their devices."""
    return jax.tree.map(lambda x: x.astype(dtype), merge(some_layers(stacked, first, count)))


def sums(arrays: Sequence[jax.Array]) -> list[int]:
    """Return a checksum of each array, the same on every mesh."""
    found = checksums(list(arrays))
    return [found[f"[{number}]"] for number in range(len(arrays))]


# ---- where they go


class Assembly:
    """Hold arrays that are filled piece by piece; the pieces may come in any order.

    Args:
        pieces: each array as one piece.
        shardings: of each array, by name.
    """

    def __init__(self, pieces: Sequence[Piece], shardings: Mapping[str, Any]) -> None:
        self.wholes, self.shardings = {p.name: p for p in pieces}, dict(shardings)
        self.missing = sum(math.prod(p.shape) for p in pieces)  # elements
        self._arrays: dict[str, jax.Array] = {}

    def put(self, group: Sequence[Piece], arrays: Sequence[jax.Array]) -> None:
        """Fill in a group, and wait until it is there: what it came in can be freed.

        Args:
            arrays: on any devices.

        Raises:
            ValueError: a piece is not part of these arrays.
        """
        self.check(group)
        for piece, array in zip(group, arrays, strict=True):
            whole = self.wholes[piece.name]
            if piece.shape == whole.shape:
                self._arrays[piece.name] = jax.device_put(array, self.shardings[piece.name])
            else:
                self._fill(piece, whole, array)
            self.missing -= math.prod(piece.shape)
        jax.block_until_ready([self._arrays[piece.name] for piece in group])

    def check(self, group: Sequence[Piece]) -> None:
        """Check a group before anything is allocated for it.

        Raises:
            ValueError: a piece is not part of these arrays, or it is more than what is missing.
        """
        for piece in group:
            whole = self.wholes.get(piece.name)
            if whole is None:
                raise ValueError(f"{piece.name} is none of this model's arrays")
            ranks = {len(piece.starts), len(piece.shape), len(whole.shape)}
            ranges = zip(piece.starts, piece.shape, whole.shape, strict=False)
            within = all(at >= 0 and n > 0 and at + n <= most for at, n, most in ranges)
            if len(ranks) > 1 or not within:
                raise ValueError(
                    f"{piece} is not a part of {piece.name}, which has shape {whole.shape}"
                )
            if piece.dtype != whole.dtype:
                raise ValueError(f"{piece.name} comes as {piece.dtype}; here it is {whole.dtype}")
        come = sum(math.prod(piece.shape) for piece in group)
        if come > self.missing:
            raise ValueError(f"{come} elements come, but only {self.missing} are missing")

    def finish(self) -> dict[str, jax.Array]:
        """Return all arrays by name, in the order of the pieces.

        Raises:
            ValueError: something is missing.
        """
        if self.missing:
            raise ValueError(f"{self.missing} elements of the weights have not come")
        return {name: self._arrays[name] for name in self.wholes}

    def _fill(self, piece: Piece, whole: Piece, array: jax.Array) -> None:
        """Write a piece into its array, in place; the array is made for its first piece."""
        sharding = self.shardings[piece.name]
        if piece.name not in self._arrays:
            self._arrays[piece.name] = jnp.empty(whole.shape, whole.dtype, device=sharding)
        if array.sharding.device_set != sharding.device_set:
            everywhere = sharding
            if isinstance(sharding, NamedSharding):
                everywhere = NamedSharding(sharding.mesh, PartitionSpec())
            array = jax.device_put(array, everywhere)
        there = self._arrays.pop(piece.name)
        self._arrays[piece.name] = _fill(sharding)(there, array, piece.starts)


@functools.lru_cache(maxsize=64)
def _fill(sharding: Any) -> Any:
    return jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0, out_shardings=sharding)


# ---- between the processes of a job


def local_copy(params: Any, dtype: Any = None, group_bytes: int = GROUP_BYTES) -> Any:
    """Return parameters that span processes, whole on the devices of each; others as they are.

    A collective. It moves one group at a time. Each array is spread over the devices of a process
    along the largest dim that they divide, but that of layers.

    Args:
        dtype: of the sampler; None = each array keeps its own, as with adapters, which are cast
            when they are merged.
    """
    if jax.process_count() == 1:
        return params
    if any(map(is_adapted, named(params).values())):
        dtype = None
    arrays, structure = _by_path(params), jax.tree.structure(params)
    everywhere, here = _meshes(next(iter(arrays.values())), 1)
    pieces = whole_pieces(arrays, dtype)
    specs = {p.name: _spread(p.shape, here.size, p.name.startswith(f"{STACKED}/")) for p in pieces}
    assembly = Assembly(pieces, {name: NamedSharding(here, spec) for name, spec in specs.items()})
    for group in plan(pieces, group_bytes):
        taken = zip(group, take(arrays, group), strict=True)
        assembly.put(group, [_local(x, specs[p.name], everywhere, here) for p, x in taken])
    return jax.tree.unflatten(structure, assembly.finish().values())


def to_engine(tree: Any, mesh: Mesh, *, stacked: bool) -> Any:
    """Return arrays that span a job on the devices of this process's engine; a collective.

    They go straight from the devices that have their parts to those of every engine, spread over
    these along the largest dim that they divide. Where all devices of the job divide it, each first
    gets a part of what is to be its own, and then those of the other engines: none ever holds more.

    Args:
        mesh: of the engine, which has all devices of its processes, neighbours.
        stacked: the first dim is of layers, and stays whole.
    """
    everywhere, here = _meshes(jax.tree.leaves(tree)[0], hosts_of(mesh))

    def move(x: jax.Array) -> jax.Array:
        spec = _spread(x.shape, here.size, stacked)
        parts = (("local", "engine") if axis else None for axis in spec)
        fits = all(
            size % everywhere.size == 0 for size, axis in zip(x.shape, spec, strict=True) if axis
        )
        if fits and everywhere.size > here.size:
            x = jax.device_put(x, NamedSharding(everywhere, PartitionSpec(*parts)))
        return _local(x, spec, everywhere, here)

    return jax.tree.map(move, tree)


def _meshes(some: jax.Array, hosts: int) -> tuple[Mesh, Mesh]:
    """Return the mesh of the engines of a job, and that of the engine of this process.

    Args:
        some: array on the devices of the job.
        hosts: processes of an engine, neighbours.
    """
    processes = by_process(sorted(some.sharding.device_set, key=lambda device: device.id))
    engines = [
        make_mesh(devices=[d for owned in processes[first : first + hosts] for d in owned], data=-1)
        for first in range(0, len(processes), hosts)
    ]
    devices = np.array([engine.devices.ravel() for engine in engines])
    here = devices[jax.process_index() // hosts]
    return Mesh(devices, ("engine", "local")), Mesh(here, ("local",))


def _spread(shape: Sequence[int], number: int, stacked: bool) -> PartitionSpec:
    """Return the spec that spreads an array over so many devices, but along its layers."""
    fits = [dim for dim in range(stacked, len(shape)) if shape[dim] % number == 0]
    chosen = max(fits, key=lambda dim: shape[dim], default=None)
    return PartitionSpec(*("local" if dim == chosen else None for dim in range(len(shape))))


def _local(piece: jax.Array, spec: PartitionSpec, everywhere: Mesh, here: Mesh) -> jax.Array:
    """Return a piece, whole on the devices of an engine; spread over them, if they divide it."""
    sizes = zip(piece.shape, spec, strict=True)
    if any(axis and size % here.size for size, axis in sizes):
        spec = PartitionSpec()
    shards = jax.device_put(piece, NamedSharding(everywhere, spec)).addressable_shards
    return jax.make_array_from_single_device_arrays(
        piece.shape, NamedSharding(here, spec), [shard.data for shard in shards]
    )
