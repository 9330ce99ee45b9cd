"""Logical axis -> mesh axis. A sharding strategy is one `ShardingRules` value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class ShardingRules:
    """Mesh axes of each logical axis; None = not sharded. The default is FSDP (ZeRO-3) and tensor.

    A dim that its mesh axes do not divide stays whole.
    """

    batch: MeshAxes = ("data", "fsdp")
    embed: MeshAxes = "fsdp"
    vocab: MeshAxes = "tensor"
    heads: MeshAxes = "tensor"
    kv_heads: MeshAxes = "tensor"
    head_dim: MeshAxes = None
    mlp: MeshAxes = "tensor"
    layers: MeshAxes = None
    norm: MeshAxes = None
    lora_rank: MeshAxes = None


@dataclass(frozen=True)
class Placement:
    """A mesh and its rules: where the arrays of a model live."""

    mesh: Mesh
    rules: ShardingRules = field(default_factory=ShardingRules)

    def spec(self, shape: Sequence[int], names: Sequence[str | None]) -> PartitionSpec:
        """Mesh axes of each dim of an array with these logical axes."""
        axes = [getattr(self.rules, name) if name else None for name in names]

        def fits(dim: int, axis: MeshAxes) -> bool:
            return self.size(axis) > 1 and dim % self.size(axis) == 0

        return PartitionSpec(*(a if fits(d, a) else None for d, a in zip(shape, axes, strict=True)))

    def sharding(self, shape: Sequence[int], names: Sequence[str | None]) -> NamedSharding:
        """The same as a sharding."""
        return NamedSharding(self.mesh, self.spec(shape, names))

    def size(self, axes: MeshAxes) -> int:
        """Number of devices along mesh axes."""
        names = (axes,) if isinstance(axes, str) else axes or ()
        return math.prod(self.mesh.shape[name] for name in names)


def param_shardings(mesh: Mesh, axes: Any, shapes: Any, rules: ShardingRules) -> Any:
    """Tree of `NamedSharding` for parallel trees of logical axes and of arrays or shapes."""
    placement = Placement(mesh, rules)
    return jax.tree.map(lambda x, names: placement.sharding(x.shape, names), shapes, axes)


def batch_sharding(mesh: Mesh, rules: ShardingRules) -> NamedSharding:
    """Rows over the batch axes; every further dimension whole."""
    return NamedSharding(mesh, PartitionSpec(rules.batch))


def batch_devices(mesh: Mesh, rules: ShardingRules) -> int:
    """Number of devices, or groups of them, that hold different rows of a batch."""
    return Placement(mesh, rules).size(rules.batch)


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())
