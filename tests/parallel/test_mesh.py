"""Axis sizes -> mesh, on eight host devices."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxrl.parallel import make_mesh


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
        ({"fsdp": 3}, "fsdp=3 does not fit 8 devices"),
        ({"fsdp": 16}, "fsdp=16 does not fit 8 devices"),
        ({"data": 2, "fsdp": 2}, "data=2, fsdp=2 does not fit 8 devices: .* multiply to 8"),
        ({"fsdp": 0}, "fsdp=0: every size must be at least 1"),
        ({"fsdp": -2}, "fsdp=-2: every size must be at least 1"),
        ({"fsdp": -1, "tensor": -1}, "fsdp=-1, tensor=-1: .* one may be -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        make_mesh(**sizes)
