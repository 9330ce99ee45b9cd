"""Parameters on their way to a sampler."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.parallel import by_process


def local_copy(params: Any) -> Any:
    """Parameters that span processes, whole on the devices of each; others as they are.

    A collective. Each leaf is split over the devices of a process, if a dim of it can be.
    """
    if jax.process_count() == 1:
        return params
    return jax.tree.map(_local, params)


def _local(leaf: jax.Array) -> jax.Array:
    processes = by_process(sorted(leaf.sharding.device_set, key=lambda device: device.id))
    devices = np.array(processes)
    spec = PartitionSpec()
    for dim in _split_first(leaf):
        if leaf.shape[dim] % devices.shape[1] == 0:
            spec = PartitionSpec(*(None,) * dim, "local")
            break
    everywhere = NamedSharding(Mesh(devices, ("process", "local")), spec)
    here = NamedSharding(Mesh(devices[jax.process_index()], ("local",)), spec)
    shards = jax.device_put(leaf, everywhere).addressable_shards
    return jax.make_array_from_single_device_arrays(leaf.shape, here, [s.data for s in shards])


def _split_first(leaf: jax.Array) -> list[int]:
    """The dims of a leaf, those that are split already before the others: less has to move."""
    assert isinstance(leaf.sharding, NamedSharding)
    split = leaf.sharding.spec
    return sorted(range(leaf.ndim), key=lambda d: d >= len(split) or split[d] is None)
