"""Logical axis -> mesh axis."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxrl.parallel import ShardingRules, batch_sharding, make_mesh, param_shardings, replicated
from jaxrl.parallel.rules import batch_devices

SHAPES = {"wq": jax.ShapeDtypeStruct((3, 16, 2, 4), np.float32)}
AXES = {"wq": ("layers", "embed", "heads", "head_dim")}


def spec_of(mesh, shape=SHAPES, rules=None):
    return param_shardings(mesh, AXES, shape, rules or ShardingRules())["wq"].spec


def test_fsdp_shards_the_embedding_dimension():
    sharding = param_shardings(make_mesh(fsdp=4), AXES, SHAPES, ShardingRules())["wq"]
    assert sharding.spec == PartitionSpec(None, "fsdp", None, None)
    array = jax.device_put(np.zeros((3, 16, 2, 4), np.float32), sharding)
    # 16 / 4 on each device, the data axis holds copies
    assert {s.data.shape for s in array.addressable_shards} == {(3, 4, 2, 4)}
    assert len(array.addressable_shards) == 8


def test_rules_are_values():
    rules = ShardingRules(embed=None, heads="fsdp", layers=("data",))
    mesh = make_mesh(fsdp=2)
    # 2 heads over 2 devices; 3 layers are not divided by 4, so they stay whole
    assert spec_of(mesh, rules=rules) == PartitionSpec(None, None, "fsdp", None)


def test_a_dimension_over_two_mesh_axes():
    rules = ShardingRules(embed=("data", "fsdp"))
    assert spec_of(make_mesh(fsdp=2), rules=rules)[1] == ("data", "fsdp")
    # 12 is divided by 4 but not by 8
    shapes = {"wq": jax.ShapeDtypeStruct((3, 12, 2, 4), np.float32)}
    assert spec_of(make_mesh(fsdp=2), shapes, rules)[1] is None


@pytest.mark.parametrize(("width", "axis"), [(16, "fsdp"), (15, None), (4, None)])
def test_a_dimension_that_does_not_divide_stays_whole(width, axis):
    shapes = {"wq": jax.ShapeDtypeStruct((3, width, 2, 4), np.float32)}
    assert spec_of(make_mesh(), shapes) == PartitionSpec(None, axis, None, None)


def test_an_unnamed_dimension_stays_whole():
    shapes = {"x": jax.ShapeDtypeStruct((8, 8), np.float32)}
    found = param_shardings(make_mesh(), {"x": (None, "embed")}, shapes, ShardingRules())
    assert found["x"].spec == PartitionSpec(None, "fsdp")


def test_an_unknown_axis_name_is_an_error():
    with pytest.raises(AttributeError, match="hedas"):
        param_shardings(make_mesh(), {"wq": (None, "hedas", None, None)}, SHAPES, ShardingRules())


def test_rows_of_a_batch_are_spread_over_all_devices():
    mesh = make_mesh(fsdp=2)
    rows = np.arange(16).reshape(8, 2)
    array = jax.device_put(rows, batch_sharding(mesh, ShardingRules()))
    held = sorted(s.data.tolist() for s in array.addressable_shards)
    assert held == [[row] for row in rows.tolist()]
    assert batch_devices(mesh, ShardingRules()) == 8
    assert batch_devices(mesh, ShardingRules(batch="data")) == 4
    assert batch_devices(mesh, ShardingRules(batch=None)) == 1


def test_replicated_is_a_whole_copy_everywhere():
    array = jax.device_put(np.arange(4), replicated(make_mesh()))
    assert [s.data.tolist() for s in array.addressable_shards] == [[0, 1, 2, 3]] * 8
