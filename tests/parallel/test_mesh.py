"""Axis sizes -> mesh, on eight host devices."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxrl.parallel import engine_meshes, make_mesh
from jaxrl.parallel.mesh import arranged, hops


@pytest.mark.parametrize(
    ("fsdp", "data"),
    [(-1, 1), (8, 1), (2, 4), (1, 8)],
)
def test_data_gets_what_fsdp_leaves(fsdp, data):
    mesh = make_mesh(fsdp=fsdp)
    assert mesh.axis_names == ("data", "fsdp", "context", "expert", "tensor")
    assert mesh.devices.shape == (data, 8 // data, 1, 1, 1)
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_devices_keep_their_order_and_fsdp_neighbours_are_adjacent():
    devices = jax.devices()[2:6]
    mesh = make_mesh(fsdp=2, devices=devices)
    np.testing.assert_array_equal(mesh.devices.reshape(2, 2), [devices[:2], devices[2:]])


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (1, 8, 1, 1, 1)),
        ({"tensor": 2}, (4, 1, 1, 1, 2)),  # data takes the rest
        ({"fsdp": -1, "tensor": 4}, (1, 2, 1, 1, 4)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 1, 1, 2)),
        ({"data": 2, "tensor": -1}, (2, 1, 1, 1, 4)),
    ],
)
def test_sizes(sizes, shape):
    assert make_mesh(**sizes).devices.shape == shape


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"fsdp": 3}, "'fsdp': 3}: the sizes must multiply to 8, the number of devices"),
        ({"fsdp": 16}, "'fsdp': 16}: the sizes must multiply to 8, the number of devices"),
        ({"data": 2, "fsdp": 2}, "'data': 2, 'fsdp': 2}: the sizes must multiply to 8,"),
        ({"fsdp": 0}, "'fsdp': 0}: every size must be at least 1"),
        ({"fsdp": -2}, "'fsdp': -2}: every size must be at least 1"),
        ({"fsdp": -1, "tensor": -1}, "'fsdp': -1, 'tensor': -1}: .* one may be -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        make_mesh(**sizes)


@pytest.mark.parametrize(
    ("sizes", "end"),
    [
        ({"fsdp": -1, "tensor": 3}, "(the rest); tensor: 1, 2, 4 or 8 would fit"),
        ({"data": 1, "fsdp": 3}, "(the rest); fsdp: 8 would fit"),
        ({"data": 2, "fsdp": 2}, "(the rest); data: 4, or fsdp: 4 would fit"),
        ({"fsdp": 3, "tensor": -1}, "(the rest); fsdp: 1, 2, 4 or 8 would fit"),
        # no change of one alone suffices
        (
            {"data": 1, "fsdp": 3, "tensor": 3},
            "(the rest); to make 9 devices of this CPU start with "
            "XLA_FLAGS=--xla_force_host_platform_device_count=9",
        ),
        (
            {"data": 1, "fsdp": 16},
            "; fsdp: 8 would fit; to make 16 devices of this CPU start with "
            "XLA_FLAGS=--xla_force_host_platform_device_count=16",
        ),
    ],
)
def test_what_would_fit_is_named(sizes, end):
    with pytest.raises(ValueError, match=re.escape(end) + "$"):
        make_mesh(**sizes)


def test_a_cpu_is_not_made_larger_for_devices_that_are_not_all_of_it():
    with pytest.raises(ValueError, match="; fsdp: 4 would fit$"):
        make_mesh(data=1, fsdp=8, devices=jax.devices()[:4])


class Chip:
    """Stands in for a TPU of a box, as much of it as the arrangement sees."""

    platform, device_kind, core_on_chip = "tpu", "TPU v5 lite", 0

    def __init__(self, number, coords, process_index=0, slice_index=0):
        self.id, self.coords, self.slice_index = number, coords, slice_index
        self.process_index = process_index


def slice_of(width, height, slice_index=0):
    """A v5e slice in JAX's order: by hosts of 2 x 2 chips."""
    corners = [(x, y) for y in range(0, height, 2) for x in range(0, width, 2)]
    chips = [(x + i, y + j, 0) for x, y in corners for j in range(2) for i in range(2)]
    return [Chip(n, at, n // 4, slice_index) for n, at in enumerate(chips)]


def steps(devices, axis):
    """Links between neighbours on the rings along an axis, each ring's."""
    rings = np.moveaxis(devices, axis, -1).reshape(-1, devices.shape[axis])
    coords = [[np.array(chip.coords) for chip in ring] for ring in rings]
    return [
        sum(int(abs(a - b).sum()) for a, b in zip(ring, ring[1:] + ring[:1], strict=True))
        for ring in coords
    ]


def test_axes_of_a_tpu_slice_run_along_its_links():
    chips = slice_of(4, 4)
    devices = arranged(chips, (1, 4, 1, 1, 4))
    assert set(devices.flat) == set(chips)
    # there and back along a side of four: 3 + 3; in JAX's order the chips of an fsdp ring are at
    # (0, 0), (2, 0), (0, 2), (2, 2): 2 + 4 + 2 + 4
    assert steps(devices, 1) == steps(devices, 4) == [6] * 4
    assert steps(np.array(chips).reshape(1, 4, 1, 1, 4), 1) == [12] * 4
    assert set(steps(arranged(chips, (1, 16, 1, 1, 1)), 1)) == {16}  # one ring of neighbours
    # a side is split where the axes need it
    assert arranged(chips, (1, 8, 1, 1, 2)).shape == (1, 8, 1, 1, 2)


def test_their_order_stays_where_it_is_nearer():
    chips = slice_of(2, 2)
    # as JAX has it the fsdp rings would be diagonals
    np.testing.assert_array_equal(arranged(chips, (1, 2, 1, 1, 2)).ravel(), chips)


def test_a_part_of_a_slice_keeps_its_order():
    chips = slice_of(4, 4)
    some = [*chips[:3], chips[10]]  # no box
    np.testing.assert_array_equal(arranged(some, (1, 4, 1, 1, 1)).ravel(), some)
    assert set(steps(arranged(chips[:8], (1, 4, 1, 1, 2)), 4)) == {2}  # a box of 4 x 2


@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 4, 1, 1, 4), 0), ((1, 8, 1, 1, 4), 1), ((1, 1, 1, 1, 32), 4)]
)
def test_slices_follow_one_another_on_the_first_axis_that_they_divide(shape, axis):
    chips = [chip for number in range(2) for chip in slice_of(4, 4, number)]
    devices = np.moveaxis(arranged(chips, shape), axis, 0)
    first, second = devices[: shape[axis] // 2], devices[shape[axis] // 2 :]
    assert {chip.slice_index for chip in first.flat} == {0}
    assert {chip.slice_index for chip in second.flat} == {1}


def test_engines_keep_the_order_of_the_trainers_mesh():
    mesh = make_mesh(devices=jax.devices()[::-1], fsdp=8)
    first, second = engine_meshes(mesh.devices.flat, 2, 2)
    assert [*first.devices.flat, *second.devices.flat] == jax.devices()[::-1]
    assert first.devices.shape == (2, 1, 1, 1, 2)


@pytest.mark.slow  # the TPU compiler's topologies
def test_slices_of_the_compiler():
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    for name, sizes, fewer in (
        ("v5e:8x8", {"fsdp": 8, "tensor": 8}, True),
        ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}, True),
        ("v5e:2x4", {"fsdp": 4, "tensor": 2}, False),  # JAX's order is no nearer
        ("tpu7x:2x2x1", {"fsdp": 8}, True),  # two cores on a chip
    ):
        devices = topology_devices(name)
        mesh = make_mesh(devices=devices, **sizes)
        plain = hops(np.array(devices).reshape(mesh.devices.shape))
        assert sorted(d.id for d in mesh.devices.flat) == sorted(d.id for d in devices)
        assert (hops(mesh.devices) < plain) == fewer, name
