"""Checksums of arrays on devices."""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.parallel.offload import on_device
from jaxrl.types import Array

_BLOCK = 2**14  # elements that XLA's CPU backend adds as vectors; these fit its nearest cache


def checksums(state: Any) -> dict[str, int]:
    """Return a number for the bits of each array, the same on every mesh.

    Orbax's files have no checksum of array data: a flipped bit would go unnoticed.
    """
    return start_checksums(state)()


def start_checksums(state: Any) -> Callable[[], dict[str, int]]:
    """Dispatch `checksums`; what is returned waits for them, in any thread.

    The arrays may be donated in the meantime.
    """
    parts: dict[Any, dict[str, Array]] = {}  # a program runs on one set of devices
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    for path, leaf in leaves:
        devices = leaf.sharding.device_set if isinstance(leaf, jax.Array) else ()
        part = parts.setdefault(tuple(sorted(device.id for device in devices)), {})
        part[jax.tree_util.keystr(path)] = leaf
    found = [_checksums(part, _in_blocks(part)) for part in map(on_device, parts.values())]

    def fetch() -> dict[str, int]:
        return {name: int(x) for part in jax.device_get(found) for name, x in part.items()}

    return fetch


def host_checksums(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return a number for the bytes of each array of the host, its CRC-32."""
    return {name: zlib.crc32(array.tobytes()) for name, array in arrays.items()}


def joined_checksum(parts: Sequence[int], size: int) -> int:
    """Return the CRC-32 of `size` bytes after `size` bytes and so on, from the CRC-32 of each.

    With A before B it is crc(A) x^(8 size) + crc(B), in polynomials over GF(2) modulo that of the
    CRC; their first coefficient is the last bit (as `crc32_combine` of zlib 1.2.12).
    """
    power, square, left = 1 << 31, 1 << 23, size  # 1, and x^8
    while left:
        power = _product(power, square) if left & 1 else power
        square, left = _product(square, square), left >> 1
    return functools.reduce(lambda joined, part: _product(power, joined) ^ part, parts, 0)


def _product(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        product ^= b if a >> bit & 1 else 0
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


def _in_blocks(arrays: Mapping[str, Array]) -> frozenset[str]:
    """Return the names of arrays that CPUs hold whole and whose indices fit in int32."""
    return frozenset(
        name
        for name, array in arrays.items()
        if isinstance(array, jax.Array)
        and array.sharding.is_fully_replicated
        and array.size < 2**31
        and next(iter(array.sharding.device_set)).platform == "cpu"
    )


@functools.partial(jax.jit, static_argnums=1)
def _checksums(arrays: dict[str, Array], in_blocks: frozenset[str]) -> dict[str, Array]:
    return {
        name: (_sum_of_blocks if name in in_blocks else _sum)(array)
        for name, array in arrays.items()
    }


def _sum(array: Array) -> Array:
    """Sum bits times position mod 2^32, with odd weights: any one changed element shows."""
    weights, stride = jnp.ones(array.shape, jnp.uint32), 2
    for dim in reversed(range(array.ndim)):
        weights += jnp.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, array.shape, dim)
        stride = stride * array.shape[dim] % 2**32
    return jnp.sum(_bits(array) * weights, dtype=jnp.uint32)


def _sum_of_blocks(array: Array) -> Array:
    """Return the number of `_sum` in a tenth of its time on CPUs.

    XLA's CPU backend sums integers one by one. A block of the flat array is multiplied and added
    elementwise, which it does with vectors.
    """
    flat = array.reshape(-1)
    blocks, rest = divmod(flat.size, _BLOCK)
    weights = 2 * jnp.arange(_BLOCK, dtype=jnp.uint32) + 1
    starts = jnp.uint32(2 * _BLOCK)

    def add(number: Array, total: Array) -> Array:
        bits = _bits(jax.lax.dynamic_slice(flat, (number * _BLOCK,), (_BLOCK,)))
        return total + bits * (weights + starts * number.astype(jnp.uint32))

    total = jax.lax.fori_loop(0, blocks, add, jnp.zeros(_BLOCK, jnp.uint32)) if blocks else 0
    tail = _bits(flat[blocks * _BLOCK :]) * (
        weights[:rest] + jnp.uint32(2 * blocks * _BLOCK % 2**32)
    )
    return jnp.sum(total, dtype=jnp.uint32) + jnp.sum(tail, dtype=jnp.uint32)


def _bits(array: Array) -> Array:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
