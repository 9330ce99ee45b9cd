"""Rows that each process knows some of, brought to the devices that compute them; here one process
stands for several, each with some of the eight devices."""

import math
import re
import zlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.parallel import make_mesh
from jaxrl.parallel.checksums import joined_checksum
from jaxrl.parallel.shares import sum_of_shares

NONE = np.iinfo(np.uint16).max  # of a token of which nothing is known


def shares_of(whole, count):
    """Row i is known by process i modulo `count`: nobody has its own rows."""
    owner = np.arange(len(whole)).reshape(-1, *[1] * (whole.ndim - 1)) % count
    return [np.where(owner == i, whole, whole.dtype.type(0)) for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"fsdp": 2, "context": 2, "tensor": 2}, {"tensor": 8}],
    ids=str,
)
def test_each_device_has_its_rows_to_the_bit(count, dtype, sizes):
    mesh = make_mesh(**sizes)
    by_rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    rng = np.random.default_rng(0)
    whole = rng.integers(0, np.iinfo(dtype).max + 1, (8, 3, 5, 1), dtype)  # 3 places a row, of 5
    whole[1] = np.iinfo(dtype).max  # is not known
    processes = tuple(map(tuple, mesh.devices.reshape(count, -1)))
    found = sum_of_shares(shares_of(whole, count), by_rows, processes)
    assert found.sharding == by_rows
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, whole)


def test_processes_whose_devices_lie_apart_in_the_mesh():
    """As on a TPU, whose hosts are boxes of chips: 0, 2, 4, 6 are of one process, in any order."""
    mesh = make_mesh(fsdp=4, tensor=2)
    by_rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    whole = np.arange(4 * 6, dtype=np.uint8).reshape(4, 6)
    devices = jax.devices()
    processes = (tuple(devices[i] for i in (6, 0, 4, 2)), tuple(devices[i] for i in (1, 3, 7, 5)))
    np.testing.assert_array_equal(sum_of_shares(shares_of(whole, 2), by_rows, processes), whole)
    # devices 2 i and 2 i + 1 have row i: the first of these needs row 0, the second rows 1 and 2
    pairs = ((0, 1), (2, 4), (3, 5), (6, 7))
    processes = tuple(tuple(devices[i] for i in pair) for pair in pairs)
    np.testing.assert_array_equal(sum_of_shares(shares_of(whole, 4), by_rows, processes), whole)


def test_what_moves_is_the_array_once():
    """In the program of each device: its part of the share for every process, and of their sum."""
    from jaxrl.parallel.shares import _plan

    mesh = make_mesh(fsdp=8)
    by_rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    processes = tuple(map(tuple, mesh.devices.reshape(2, 4)))
    plan = _plan((16, 32, 2, 2), by_rows, processes)  # 512 places, 256 of them for each process
    given = jax.ShapeDtypeStruct((2, 2, 256, 4), np.uint8, sharding=plan.given)
    text = plan.program.lower(given).compile().as_text()
    assert "u8[2,64,4]" in text  # of each process a quarter of what this one needs
    sizes = [math.prod(map(int, found.split(","))) for found in re.findall(r"u8\[([\d,]+)\]", text)]
    assert max(sizes) == 256 * 4  # what one process needs; the whole has 2048


def test_the_checksum_of_rows_is_that_of_the_array():
    rows = np.random.default_rng(1).integers(0, 256, (5, 37), np.uint8)
    parts = [zlib.crc32(row.tobytes()) for row in rows]
    assert joined_checksum(parts, 37) == zlib.crc32(rows.tobytes())
    assert joined_checksum(parts[:1], 37) == parts[0]
    assert joined_checksum([], 37) == 0
