"""Axis sizes -> `jax.sharding.Mesh`."""

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxrl.config_error import fail

# data: rows of a batch. fsdp: rows, parameters and optimizer state. expert: the same, but whole
# experts in place of parts of each. context: the tokens of each row, and parameters as fsdp.
# tensor: heads, MLP width and vocabulary. The last axes are neighbours on the machine: tensor
# communicates most, in every layer.
AXES = ("data", "fsdp", "context", "expert", "tensor")


def mesh_sizes(num_devices: int, **sizes: int) -> tuple[int, ...]:
    """Return the sizes of `AXES` for a number of devices.

    Args:
        sizes: by axis; at most one is -1 and takes the rest, which is `data` where it is not named
            and no other is. Every other axis that is not named has size 1.

    Raises:
        ConfigError: they do not multiply to the number of devices.
    """
    rest = 1 if -1 in sizes.values() else -1
    wanted = dict.fromkeys(AXES, 1) | {"data": rest} | sizes
    free = [axis for axis, size in wanted.items() if size == -1]
    fixed = math.prod(size for size in wanted.values() if size != -1)
    if len(free) > 1 or any(size < 1 and size != -1 for size in wanted.values()):
        fail("mesh", sizes, "every size must be at least 1, and one may be -1 (the rest)")
    if num_devices % fixed or (not free and fixed != num_devices):
        remedy = (
            f"the sizes must multiply to {num_devices}, the number of devices, or divide it where "
            f"one of them is -1 (the rest){_sizes_that_fit(wanted, num_devices)}"
            f"{_more_devices(fixed, num_devices)}"
        )
        fail("mesh", sizes, remedy)
    return tuple(num_devices // fixed if size == -1 else size for size in wanted.values())


def _sizes_that_fit(wanted: dict[str, int], num_devices: int) -> str:
    """Say by what size of one axis a mesh would fit; "" if one alone cannot make it."""
    fixed = math.prod(size for size in wanted.values() if size != -1)
    fits = []
    for axis, size in wanted.items():
        most, left = divmod(num_devices, fixed // size)
        if size in (1, -1) or left:
            continue
        sizes = [str(n) for n in range(1, most + 1) if most % n == 0]
        if -1 not in wanted.values():
            sizes = sizes[-1:]
        *others, last = sizes
        fits.append(f"{axis}: {', '.join(others)} or {last}" if others else f"{axis}: {last}")
    return f"; {', or '.join(fits)} would fit" if fits else ""


def _more_devices(needed: int, num_devices: int) -> str:
    """Say how a CPU, if that is what is here, becomes as many devices as a mesh needs."""
    if needed <= num_devices:
        return ""
    try:
        if jax.default_backend() != "cpu" or num_devices != jax.device_count():
            return ""
    except RuntimeError:  # no backend can be had here: the devices are another machine's
        return ""
    flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
    return f"; to make {needed} devices of this CPU start with {flag}"


def make_mesh(
    *, devices: Sequence[Any] | None = None, keep_order: bool = False, **sizes: int
) -> Mesh:
    """Make a mesh with all of `AXES` over all devices.

    Args:
        devices: default `jax.devices()`.
        keep_order: of the devices: programs that have arrays of two meshes need the same in both.
        sizes: by axis, see `mesh_sizes`; none is fsdp=-1.

    Raises:
        ValueError: the sizes do not fit the devices.
    """
    devices = list(devices if devices is not None else jax.devices())
    shape = mesh_sizes(len(devices), **(sizes or {"fsdp": -1}))
    grid = np.array(devices).reshape(shape) if keep_order else arranged(devices, shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arranged(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """Arrange devices in a mesh of a given shape; in their order, but for TPUs.

    Those of whole slices, or of a whole box of one, are put such that the axes run along links
    between neighbours: as JAX does, or in their order where that is nearer. Several slices, which
    no such links join, are along the first axis that they divide: `data`, if they can.
    """
    plain = np.array(devices).reshape(shape)
    slices: dict[int, list[Any]] = {}
    for device in devices:
        if device.platform != "tpu":
            return plain
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    number = len(slices)
    outer = next((axis for axis, size in enumerate(shape) if size % number == 0), None)
    if outer is None or not all(map(_is_box, slices.values())):
        return plain
    within = [size // number if axis == outer else size for axis, size in enumerate(shape)]
    parts = [_along_links(slices[index], within) for index in sorted(slices)]
    return np.concatenate(parts, axis=outer)


def _is_box(devices: Sequence[Any]) -> bool:
    """Return whether the chips of TPU devices fill a box."""
    chips = np.array([device.coords for device in devices])
    cores = len({getattr(device, "core_on_chip", 0) for device in devices})
    return cores * int(np.prod(np.ptp(chips, axis=0) + 1)) == len(devices)


def _along_links(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """Return the nearer of JAX's arrangement of TPU devices and their given order.

    JAX's is with whole sides of the box if they fit.
    """
    choices = [np.array(devices).reshape(shape)]
    for split in (False, True):
        with contextlib.suppress(NotImplementedError, AssertionError, ValueError):
            choices.insert(
                0,
                mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split),
            )
            break
    return min(choices, key=hops)


def hops(devices: np.ndarray) -> float:
    """Return the mean links between ring neighbours per axis of a TPU mesh, summed over axes."""
    flat = np.array([device.coords for device in devices.flat])
    chips = flat.reshape(*devices.shape, -1)
    axes = range(devices.ndim)
    return sum(np.abs(chips - np.roll(chips, 1, axis)).sum(-1).mean() for axis in axes)


def by_process(devices: Iterable[Any]) -> list[list[Any]]:
    """Return the devices of each process, in the order of the processes."""
    parts: dict[int, list[Any]] = {}
    for device in devices:
        parts.setdefault(device.process_index, []).append(device)
    return [parts[index] for index in sorted(parts)]


def hosts_of(mesh: Mesh) -> int:
    """Return the number of processes that have devices of a mesh."""
    return len({device.process_index for device in mesh.devices.flat})


def engine_meshes(
    devices: Iterable[Any], engines: int, tensor: int, experts: int = 1
) -> list[Mesh]:
    """Part devices into `engines` equal meshes, each with a tensor axis and data over the rest.

    They keep their order, that of the trainer's mesh.

    Args:
        experts: devices that have all experts together, those of the tensor axis among them.

    Raises:
        ValueError: they cannot be parted so.
    """
    devices = list(devices)
    each = max(tensor, experts)
    if each % tensor or len(devices) % (engines * each):
        raise ValueError(
            f"generator.inference_engine.num_engines={engines} x tensor_parallel_size={tensor}, "
            f"expert_parallel_size={experts}: the last must be 1 or a multiple of the one before, "
            f"and the larger times the engines divide {len(devices)} devices"
        )
    size = len(devices) // engines
    parts = (devices[first : first + size] for first in range(0, len(devices), size))
    axes = {"data": -1, "expert": each // tensor, "tensor": tensor}
    return [make_mesh(devices=part, keep_order=True, **axes) for part in parts]
