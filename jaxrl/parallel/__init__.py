"""Meshes and the rules that place arrays on them."""

from jaxrl.parallel.mesh import by_process, engine_meshes, hosts_of, make_mesh, mesh_sizes
from jaxrl.parallel.processes import (
    ProcessError,
    agree,
    allgather,
    fetch,
    is_first,
    local_slice,
    put,
    record_folder,
    same_in_all,
    start_processes,
)
from jaxrl.parallel.rules import (
    Placement,
    ShardingRules,
    batch_sharding,
    param_shardings,
    replicated,
)
from jaxrl.parallel.shares import Share

__all__ = [
    "Placement",
    "ProcessError",
    "Share",
    "ShardingRules",
    "agree",
    "allgather",
    "batch_sharding",
    "by_process",
    "engine_meshes",
    "fetch",
    "hosts_of",
    "is_first",
    "local_slice",
    "make_mesh",
    "mesh_sizes",
    "param_shardings",
    "put",
    "record_folder",
    "replicated",
    "same_in_all",
    "start_processes",
]
