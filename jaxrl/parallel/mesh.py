"""Axis sizes -> `jax.sharding.Mesh`."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

# data: rows of a batch. fsdp: rows, parameters and optimizer state. tensor: heads, MLP width and
# vocabulary. context (positions) and expert are named, and of size 1 until they are built. The last
# axes are neighbours on the machine: tensor communicates most, in every layer.
AXES = ("data", "fsdp", "context", "expert", "tensor")


def mesh_sizes(num_devices: int, **sizes: int) -> tuple[int, ...]:
    """Sizes of `AXES` for that many devices.

    Args:
        sizes: by axis; at most one is -1 and takes the rest, which is `data` where it is not named
            and no other is. Every other axis that is not named has size 1.

    Raises:
        ValueError: they do not multiply to the number of devices.
    """
    said = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    rest = 1 if -1 in sizes.values() else -1
    wanted = dict.fromkeys(AXES, 1) | {"data": rest} | sizes
    free = [axis for axis, size in wanted.items() if size == -1]
    fixed = math.prod(size for size in wanted.values() if size != -1)
    if len(free) > 1 or any(size < 1 and size != -1 for size in wanted.values()):
        raise ValueError(
            f"mesh {said}: every size must be at least 1, and one may be -1 (the rest)"
        )
    if num_devices % fixed or (not free and fixed != num_devices):
        raise ValueError(
            f"mesh {said} does not fit {num_devices} devices: the sizes must multiply to "
            f"{num_devices}, or divide it where one of them is -1 (the rest)"
        )
    return tuple(num_devices // fixed if size == -1 else size for size in wanted.values())


def make_mesh(*, devices: Sequence[Any] | None = None, **sizes: int) -> Mesh:
    """A mesh with all of `AXES` over all devices.

    Args:
        devices: default `jax.devices()`.
        sizes: by axis, see `mesh_sizes`; none is fsdp=-1.

    Raises:
        ValueError: the sizes do not fit the devices.
    """
    devices = list(devices if devices is not None else jax.devices())
    shape = mesh_sizes(len(devices), **(sizes or {"fsdp": -1}))
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def by_process(devices: Iterable[Any]) -> list[list[Any]]:
    """The devices of each process, in the order of the processes."""
    parts: dict[int, list[Any]] = {}
    for device in devices:
        parts.setdefault(device.process_index, []).append(device)
    return [parts[index] for index in sorted(parts)]


def engine_meshes(devices: Iterable[Any], engines: int, tensor: int) -> list[Mesh]:
    """The devices in `engines` equal parts, each with a tensor axis and data over the rest.

    Raises:
        ValueError: they cannot be parted so.
    """
    given = list(devices)
    if len(given) % (engines * tensor):
        raise ValueError(
            f"generator.inference_engine.num_engines={engines} x tensor_parallel_size={tensor} "
            f"does not divide {len(given)} devices; choose sizes whose product does"
        )
    size = len(given) // engines
    parts = (given[first : first + size] for first in range(0, len(given), size))
    return [make_mesh(devices=part, data=-1, tensor=tensor) for part in parts]
