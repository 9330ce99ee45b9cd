"""Meshes and the rules that place arrays on them."""

from jaxrl.parallel.mesh import make_mesh
from jaxrl.parallel.rules import ShardingRules, batch_sharding, param_shardings, replicated

__all__ = ["ShardingRules", "batch_sharding", "make_mesh", "param_shardings", "replicated"]
