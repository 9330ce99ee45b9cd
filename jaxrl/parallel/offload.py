"""Arrays that wait in the host's memory until they are used.

`pinned_host` is the memory kind of JAX that TPUs, GPUs and the CPU backend share; computation takes
arrays from the device's own memory, so they are moved before and after each use.
"""

import warnings
from typing import Any

import jax

IN_HOST_MEMORY = "pinned_host"


def host_shardings(shardings: Any, field: str) -> Any:
    """Return shardings in host memory; where the backend has none, as they were, and warn.

    Args:
        field: of the config that asks for it, named by the warning.
    """
    devices = jax.tree.leaves(shardings)[0].device_set
    # those of other processes have no memory here
    kinds = {memory.kind for device in devices for memory in device.addressable_memories()}
    if IN_HOST_MEMORY not in kinds:
        kind = next(iter(devices)).device_kind
        warnings.warn(f"{field}=True has no effect: {kind} has no pinned_host memory", stacklevel=2)
        return shardings
    return jax.tree.map(lambda x: x.with_memory_kind(IN_HOST_MEMORY), shardings)


def on_device(tree: Any) -> Any:
    """Move the arrays of a tree that are in host memory to their devices; the others stay."""

    def move(x: Any) -> Any:
        waits = isinstance(x, jax.Array) and x.sharding.memory_kind == IN_HOST_MEMORY
        return jax.device_put(x, x.sharding.with_memory_kind("device")) if waits else x

    return jax.tree.map(move, tree)
