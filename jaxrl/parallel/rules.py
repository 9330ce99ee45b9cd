"""Logical axis -> mesh axis. A sharding strategy is one `ShardingRules` value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class ShardingRules:
    """Mesh axes of each logical axis; None = not sharded. The default is FSDP (ZeRO-3)."""

    batch: MeshAxes = ("data", "fsdp")
    embed: MeshAxes = "fsdp"
    vocab: MeshAxes = None
    heads: MeshAxes = None
    kv_heads: MeshAxes = None
    head_dim: MeshAxes = None
    mlp: MeshAxes = None
    layers: MeshAxes = None
    norm: MeshAxes = None


def param_shardings(mesh: Mesh, axes: Any, shapes: Any, rules: ShardingRules) -> Any:
    """Tree of `NamedSharding` for a tree of logical axes and a parallel tree of arrays or shapes.

    A dimension that its mesh axes do not divide stays whole.
    """

    def place(array: Any, names: Sequence[str | None]) -> NamedSharding:
        wanted = [getattr(rules, name) if name else None for name in names]
        parts = [
            axis if axis and dim % _size(mesh, axis) == 0 else None
            for dim, axis in zip(array.shape, wanted, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*parts))

    return jax.tree.map(place, shapes, axes)


def batch_sharding(mesh: Mesh, rules: ShardingRules) -> NamedSharding:
    """Rows over the batch axes; every further dimension whole."""
    return NamedSharding(mesh, PartitionSpec(rules.batch))


def batch_devices(mesh: Mesh, rules: ShardingRules) -> int:
    """Number of devices that hold different rows of a batch."""
    return _size(mesh, rules.batch)


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def _size(mesh: Mesh, axes: MeshAxes) -> int:
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[name] for name in names)
