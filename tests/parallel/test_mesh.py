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
    assert mesh.axis_names == ("data", "fsdp")
    assert dict(mesh.shape) == {"data": data, "fsdp": 8 // data}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


def test_devices_keep_their_order_and_fsdp_neighbours_are_adjacent():
    devices = jax.devices()[2:6]
    mesh = make_mesh(fsdp=2, devices=devices)
    np.testing.assert_array_equal(mesh.devices, [devices[:2], devices[2:]])


@pytest.mark.parametrize("fsdp", [3, 16, 0, -2])
def test_a_size_that_does_not_divide_the_devices_is_refused(fsdp):
    with pytest.raises(ValueError, match=rf"fsdp_size={fsdp} must be -1 or divide the 8 devices"):
        make_mesh(fsdp=fsdp)
