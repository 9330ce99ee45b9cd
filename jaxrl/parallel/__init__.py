"""Meshes and the rules that place arrays on them."""

from jaxrl.parallel.mesh import engine_meshes, make_mesh, mesh_sizes
from jaxrl.parallel.rules import (
    Placement,
    ShardingRules,
    batch_sharding,
    param_shardings,
    replicated,
)

__all__ = [
    "Placement",
    "ShardingRules",
    "batch_sharding",
    "engine_meshes",
    "make_mesh",
    "mesh_sizes",
    "param_shardings",
    "replicated",
]
