"""Logical axis -> mesh axis. A sharding strategy is one `ShardingRules` value."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None
LATER = ("expert", "context")  # axes that arrays do not name where their size is 1, as ever


@dataclass(frozen=True)
class ShardingRules:
    """Name the mesh axes of each logical axis; None = not sharded.

    The default is FSDP (ZeRO-3) and tensor. A dim that its mesh axes do not divide stays whole.
    """

    batch: MeshAxes = ("data", "fsdp", "expert")
    seq: MeshAxes = "context"
    embed: MeshAxes = ("fsdp", "expert", "context")
    experts: MeshAxes = "expert"
    vocab: MeshAxes = "tensor"
    heads: MeshAxes = "tensor"
    kv_heads: MeshAxes = "tensor"
    head_dim: MeshAxes = None
    mlp: MeshAxes = "tensor"
    layers: MeshAxes = None
    norm: MeshAxes = None
    lora_rank: MeshAxes = None

    @property
    def expert_embed(self) -> MeshAxes:
        """Return the axes of the model width in experts: those that do not split the experts."""
        apart = _names(self.experts)
        return tuple(axis for axis in _names(self.embed) if axis not in apart) or None


@dataclass(frozen=True)
class Placement:
    """Hold a mesh and its rules: where the arrays of a model live."""

    mesh: Mesh
    rules: ShardingRules = field(default_factory=ShardingRules)

    def spec(self, shape: Sequence[int], names: Sequence[str | None]) -> PartitionSpec:
        """Return the mesh axes of each dim of an array with these logical axes."""
        axes = [self._of_mesh(getattr(self.rules, name) if name else None) for name in names]

        def fits(dim: int, axis: MeshAxes) -> bool:
            return self.size(axis) > 1 and dim % self.size(axis) == 0

        return PartitionSpec(*(a if fits(d, a) else None for d, a in zip(shape, axes, strict=True)))

    def _of_mesh(self, axes: MeshAxes) -> MeshAxes:
        """Return those of some axes that the mesh has, without `LATER` ones of size 1."""
        there = tuple(
            axis
            for axis in _names(axes)
            if axis in self.mesh.shape and (axis not in LATER or self.mesh.shape[axis] > 1)
        )
        return there[0] if len(there) == 1 else there or None

    def sharding(self, shape: Sequence[int], names: Sequence[str | None]) -> NamedSharding:
        """Return the sharding of an array with these logical axes, as `spec` says."""
        return NamedSharding(self.mesh, self.spec(shape, names))

    def whole_over_batch(self, shape: Sequence[int], names: Sequence[str | None]) -> PartitionSpec:
        """Return `spec` without the axes of tokens: a parameter as the computation needs it.

        Experts stay apart: tokens travel to them.
        """

        def keep(axes: MeshAxes, name: str | None) -> MeshAxes:
            left = (a for a in _names(axes) if name == "experts" or a not in self.token_axes)
            return tuple(left) or None

        return PartitionSpec(*map(keep, self.spec(shape, names), names))

    @property
    def platform(self) -> str:
        """Return the platform of the devices: "cpu", "gpu", "tpu"."""
        return self.mesh.devices.flat[0].platform

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Return the mesh axes over which rows are spread."""
        return _names(self._of_mesh(self.rules.batch))

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Return the mesh axes over which tokens are spread: those of rows, and those within."""
        return (*self.batch_axes, *_names(self._of_mesh(self.rules.seq)))

    @property
    def tokens(self) -> PartitionSpec:
        """Return how an array [B, T, ...] of tokens is spread."""
        return PartitionSpec(self.batch_axes, self._of_mesh(self.rules.seq))

    def size(self, axes: MeshAxes) -> int:
        """Return the number of devices along mesh axes."""
        return math.prod(self.mesh.shape.get(name, 1) for name in _names(axes))


def constrain(x: jax.Array, names: Sequence[str | None], placement: Placement | None) -> jax.Array:
    """Return x sharded by its logical axes; x itself without a placement."""
    if placement is None:
        return x
    return _place(x, placement.mesh, placement.spec(x.shape, names))


def gather_parameter(
    w: jax.Array, names: Sequence[str | None], placement: Placement | None, dtype: Any
) -> jax.Array:
    """Return a parameter in the compute dtype, whole over the batch axes: FSDP's all-gather.

    It travels in the compute dtype and then has its own again, so that its gradient does too. That
    is scattered: left to the partitioner it is reduced whole, on every device.
    """
    if placement is None:
        return w
    return _gather(w, placement, tuple(names), dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(
    w: jax.Array, placement: Placement, names: tuple[str | None, ...], dtype: Any
) -> jax.Array:
    cast = constrain(w.astype(dtype), names, placement)
    return _place(cast, placement.mesh, placement.whole_over_batch(w.shape, names)).astype(w.dtype)


def _gather_forward(
    w: jax.Array, placement: Placement, names: tuple[str | None, ...], dtype: Any
) -> tuple[jax.Array, None]:
    return _gather(w, placement, names, dtype), None


def _scatter(
    placement: Placement, names: tuple[str | None, ...], dtype: Any, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (constrain(gradient, names, placement),)


_gather.defvjp(_gather_forward, _scatter)


def _place(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def param_shardings(mesh: Mesh, axes: Any, shapes: Any, rules: ShardingRules) -> Any:
    """Return a tree of `NamedSharding` for parallel trees of logical axes and arrays or shapes."""
    placement = Placement(mesh, rules)
    return jax.tree.map(lambda x, names: placement.sharding(x.shape, names), shapes, axes)


def batch_sharding(mesh: Mesh, rules: ShardingRules) -> NamedSharding:
    """Return the sharding of rows over the batch axes; every further dimension is whole."""
    return NamedSharding(mesh, PartitionSpec(Placement(mesh, rules).batch_axes))


def spread_tokens(tree: Any, placement: Placement | None) -> Any:
    """Return arrays [B, T, ...] spread over the devices of their tokens."""
    if placement is None:
        return tree
    return jax.tree.map(lambda x: _place(x, placement.mesh, placement.tokens), tree)


def batch_devices(mesh: Mesh, rules: ShardingRules) -> int:
    """Return the number of devices, or groups of them, that hold different rows of a batch."""
    return Placement(mesh, rules).size(rules.batch)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def _names(axes: MeshAxes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes or ()
