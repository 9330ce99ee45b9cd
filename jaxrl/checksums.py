"""Checksums of arrays on devices."""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.offload import on_device
from jaxrl.types import Array


def checksums(state: Any) -> dict[str, int]:
    """A number for the bits of each array, the same on every mesh.

    Orbax's files have no checksum of array data: a flipped bit would go unnoticed.
    """
    parts: dict[Any, dict[str, Array]] = {}  # a program runs on one set of devices
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    for path, leaf in leaves:
        devices = leaf.sharding.device_set if isinstance(leaf, jax.Array) else ()
        part = parts.setdefault(tuple(sorted(device.id for device in devices)), {})
        part[jax.tree_util.keystr(path)] = leaf
    found = [jax.device_get(_checksums(on_device(part))) for part in parts.values()]
    return {name: int(number) for part in found for name, number in part.items()}


def host_checksums(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """A number for the bytes of each array of the host."""
    return {name: zlib.crc32(np.ascontiguousarray(array)) for name, array in arrays.items()}


@jax.jit
def _checksums(arrays: dict[str, Array]) -> dict[str, Array]:
    return {name: _checksum(array) for name, array in arrays.items()}


def _checksum(array: Array) -> Array:
    """Sum of bits times position mod 2^32; odd weights, so that any one changed element shows."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    weights, stride = jnp.ones(array.shape, jnp.uint32), 2
    for dim in reversed(range(array.ndim)):
        weights += jnp.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, array.shape, dim)
        stride = stride * array.shape[dim] % 2**32
    return jnp.sum(bits * weights, dtype=jnp.uint32)
