"""Axis sizes -> `jax.sharding.Mesh`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp")


def make_mesh(*, fsdp: int = -1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with axes data (batch only) and fsdp (batch and parameters) over all devices.

    Args:
        fsdp: devices that share one copy of the parameters; -1 = all. The data axis gets the rest.
        devices: default `jax.devices()`.

    Raises:
        ValueError: fsdp does not divide the number of devices.
    """
    devices = list(devices if devices is not None else jax.devices())
    size = len(devices) if fsdp == -1 else fsdp
    if size < 1 or len(devices) % size:
        raise ValueError(
            f"fsdp_size={fsdp} must be -1 or divide the {len(devices)} devices present "
            f"({devices[0].platform})"
        )
    grid = np.array(devices).reshape(len(devices) // size, size)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
