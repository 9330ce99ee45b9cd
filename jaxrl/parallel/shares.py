"""Arrays whose rows the processes of a job know, each some of them, on devices that need any.

A process that knows a row is seldom the one whose devices compute it. Each gives what it knows with
zeros elsewhere; every device receives from all processes what it needs, and adds that up. What is
not zero is so in one share alone, so the sum is exact in any dtype. No host sees another's rows.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.parallel.mesh import by_process
from jaxrl.pytrees import PyTree
from jaxrl.types import Array

Processes = tuple[tuple[Any, ...], ...]  # the devices of each, equally many


class Share(PyTree):
    """Hold the rows [R, L, ...] that this process knows, 0 elsewhere; `put` adds up all shares."""

    known: Array


def put_share(share: Share, sharding: NamedSharding) -> jax.Array:
    """Return the sum of the shares of all processes on devices; a collective.

    Args:
        sharding: of the rows; further dimensions are whole.
    """
    assert isinstance(sharding.mesh, Mesh)  # as that of all arrays on devices
    processes = tuple(map(tuple, by_process(sharding.mesh.devices.flat)))
    return sum_of_shares([share.known], sharding, processes)


def sum_of_shares(
    shares: Sequence[np.ndarray], sharding: NamedSharding, processes: Processes
) -> jax.Array:
    """Return the sum of arrays of one shape [R, L, ...] and dtype, of which one at most is not 0.

    A process holds R / processes rows at once on each of its devices, and sends to each other one
    what that needs: in all as many bytes as the array has.

    Args:
        shares: those of the processes that run this program: one in a job.
        processes: the devices of the mesh, by the process that they count as.
    """
    plan = _plan(shares[0].shape, sharding, processes)
    parts = np.stack([_for_each_process(share, plan, len(processes)) for share in shares])
    whole = (len(processes), *parts.shape[1:])
    given = jax.make_array_from_process_local_data(plan.given, parts, whole)
    rows = [shard.data for shard in plan.program(given).addressable_shards]
    return jax.make_array_from_single_device_arrays(shares[0].shape, sharding, rows)


class _Plan(NamedTuple):
    """Say how the shares of arrays of one shape go to the devices.

    Attributes:
        blocks: [P, n] numbers of the blocks of rows that the devices of each process need; the
            first once more where it needs fewer.
        places: R x L of a block.
        given: sharding of all shares [P, P, n places, ...], of which process p gives [p, q] to
            process q; the devices of a process have equally many places.
        program: makes of these each device's block.
    """

    blocks: np.ndarray
    places: int
    given: NamedSharding
    program: Callable[[jax.Array], jax.Array]


@functools.lru_cache
def _plan(shape: tuple[int, ...], sharding: NamedSharding, processes: Processes) -> _Plan:
    block = sharding.shard_shape(shape)
    assert block[1:] == shape[1:]
    slices = sharding.devices_indices_map(shape)
    needed = [[(slices[d][0].start or 0) // block[0] for d in devices] for devices in processes]
    each = [sorted(set(numbers)) for numbers in needed]
    most, places = max(map(len, each)), math.prod(block[:2])
    blocks = np.array([numbers + numbers[:1] * (most - len(numbers)) for numbers in each])
    place = np.array([[own.index(x) for x in row] for own, row in zip(each, needed, strict=True)])

    def run(given: jax.Array) -> jax.Array:
        of_processes = jax.lax.all_to_all(given[0], "process", 0, 0)
        mine = of_processes.sum(0, dtype=given.dtype)
        whole = jax.lax.all_gather(mine, "local", tiled=True)
        own = jnp.asarray(place)[jax.lax.axis_index("process"), jax.lax.axis_index("local")]
        return jax.lax.dynamic_slice_in_dim(whole, own * places, places).reshape(block)

    mesh = Mesh(np.array(processes), ("process", "local"))
    given, found = PartitionSpec("process", None, "local"), PartitionSpec(("process", "local"))
    program = jax.shard_map(run, mesh=mesh, in_specs=given, out_specs=found, check_vma=False)
    return _Plan(blocks, places, NamedSharding(mesh, given), jax.jit(program))


def _for_each_process(share: np.ndarray, plan: _Plan, processes: int) -> np.ndarray:
    """Return the places [P, n places, numbers] that each process needs, filled up for its devices.

    The numbers of a place stay together: TPUs lay them out by 128.
    """
    local, numbers = plan.given.mesh.shape["local"], math.prod(share.shape[2:])
    blocks = share.reshape(-1, plan.places, numbers)[plan.blocks]
    rows = blocks.reshape(processes, -1, numbers)
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % local), (0, 0)))
