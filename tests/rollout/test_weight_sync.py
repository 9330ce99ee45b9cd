"""Parameters in groups of bounded size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.architecture import Experts
from jaxrl.models.hf import load_config
from jaxrl.models.linear import merge
from jaxrl.models.lora import LoraConfig, attach, select_modules
from jaxrl.models.transformer import abstract_params, init_params, logical_axes
from jaxrl.parallel import ShardingRules, make_mesh, param_shardings
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.programs import compiled
from jaxrl.rollout.weights.groups import (
    Assembly,
    Piece,
    layer_ranges,
    local_copy,
    named,
    plan,
    sums,
    take,
    whole_pieces,
)
from tests.test_train import assert_bitwise_equal

MODEL = load_config("configs/tiny_char_model")
MIXED = dataclasses.replace(
    MODEL, num_layers=3, experts=Experts(count=4, per_token=2, width=32, dense_layers=(1,))
)
MODELS = pytest.mark.parametrize("model", [MODEL, MIXED], ids=["dense", "mixed"])
HALF = jnp.bfloat16


def placed(mesh, model=MODEL, seed=0):
    return init_params(model, seed, shardings(mesh, model))


def shardings(mesh, model=MODEL):
    return param_shardings(mesh, logical_axes(model), abstract_params(model), ShardingRules())


def shapes_of(groups):
    return [[(p.name, p.starts, p.shape) for p in group] for group in groups]


def test_layers_are_grouped_and_what_is_too_large_is_cut():
    """Four layers of 3 x 4 float32, 48 bytes each, and of 2, 8 bytes: 56 a layer."""
    shapes = {"embed": (5, 4), "layers/w": (4, 3, 4), "layers/b": (4, 2), "norm": (2,)}
    whole = whole_pieces({n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()})
    assert [p.nbytes for p in whole] == [80, 192, 32, 8]
    assert shapes_of(plan(whole, 120)) == [
        [("embed", (0, 0), (5, 4)), ("norm", (0,), (2,))],  # 88
        [("layers/w", (0, 0, 0), (2, 3, 4)), ("layers/b", (0, 0), (2, 2))],  # 2 x 56
        [("layers/w", (2, 0, 0), (2, 3, 4)), ("layers/b", (2, 0), (2, 2))],
    ]
    rows = [[("embed", (i, 0), (min(2, 5 - i), 4))] for i in (0, 2, 4)]  # 16 a row
    rows[2] += [("norm", (0,), (2,))]  # 16 + 8
    layer = [  # 16 a row of w
        [[("layers/w", (i, 0, 0), (1, 2, 4))], [("layers/w", (i, 2, 0), (1, 1, 4)), ("b", i)]]
        for i in range(4)
    ]
    for i, (_, second) in enumerate(layer):
        second[1] = ("layers/b", (i, 0), (1, 2))
    assert shapes_of(plan(whole, 40)) == [*rows, *(group for pair in layer for group in pair)]


def test_the_last_group_has_the_layers_that_are_left():
    """Five layers of 40 bytes, two of which fit into 100."""
    stacked = [Piece("layers/w", (0, 0), (5, 10), "float32")]
    assert layer_ranges(stacked, 100) == [(0, 2), (2, 2), (4, 1)]


@MODELS
@pytest.mark.parametrize("group_bytes", [1000, 20_000, 10**9])
def test_every_element_comes_once_and_no_group_is_larger(group_bytes, model):
    whole = whole_pieces(named(abstract_params(model)), HALF)
    groups = plan(whole, group_bytes)
    assert max(sum(p.nbytes for p in group) for group in groups) <= group_bytes
    counts = {p.name: np.zeros(p.shape, int) for p in whole}
    for piece in (p for group in groups for p in group):
        ends = [slice(a, a + n) for a, n in zip(piece.starts, piece.shape, strict=True)]
        counts[piece.name][tuple(ends)] += 1
    assert all((count == 1).all() for count in counts.values())
    assert next(p for p in whole if p.name == "final_norm").dtype == "float32"


def test_put_together_on_another_mesh_every_bit_is_there():
    params, there = (
        placed(make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])),
        jax.devices()[5:7],
    )
    there = shardings(make_mesh(devices=there, tensor=2))
    whole = whole_pieces(named(params), HALF)
    assembly = Assembly(whole, named(there))
    for group in plan(whole, 20_000):
        taken = take(named(params), group)
        moved = jax.device_put(taken, jax.devices()[7])
        assert sums(moved) == sums(taken)
        assembly.put(group, moved)
    found = assembly.finish()
    for name, wanted in named(params).items():
        kept = wanted if name == "final_norm" else wanted.astype(HALF)
        np.testing.assert_array_equal(found[name], kept)
        assert found[name].sharding == named(there)[name]


def test_a_checksum_sees_one_bit_and_two_that_are_swapped():
    x = np.arange(6, dtype=np.float32)
    flipped = x.view(np.uint32) ^ np.array([0, 0, 1, 0, 0, 0], np.uint32)
    assert len({sums([jnp.array(a)])[0] for a in (x, flipped.view(np.float32), x[::-1])}) == 3


def test_pieces_of_another_model_are_refused():
    assembly = Assembly([Piece("w", (0, 0), (4, 2), "float32")], {"w": None})
    for piece, said in [
        (Piece("v", (0, 0), (4, 2), "float32"), "v is none of this model's arrays"),
        (Piece("w", (2, 0), (3, 2), "float32"), r"not a part of w, which has shape \(4, 2\)"),
        (Piece("w", (0,), (4,), "float32"), "not a part of w"),
        (Piece("w", (0, 0), (4, 2), "bfloat16"), "comes as bfloat16; here it is float32"),
    ]:
        with pytest.raises(ValueError, match=said):
            assembly.put((piece,), [jnp.zeros(piece.shape)])
    with pytest.raises(ValueError, match="8 elements of the weights have not come"):
        assembly.finish()


@MODELS
@pytest.mark.parametrize("tensor", [1, 2])
def test_an_engine_on_other_devices_gets_the_same_bits_in_groups(tensor, model):
    """As the decode layout of parameters that were there before."""
    params = placed(make_mesh(devices=jax.devices()[:4], fsdp=4), model)
    mesh = make_mesh(devices=jax.devices()[4:6], data=-1, tensor=tensor)
    engine = NativeEngine(model, mesh, dtype=HALF, max_num_seqs=2, group_bytes=20_000)
    engine.update_weights(params, 1)
    functions = compiled(model, engine.programs.placement, jnp.dtype(HALF))
    near = jax.device_put(jax.device_get(params), functions.whole)
    assert_bitwise_equal(engine.programs.params, functions.decode_params(near))
    found, wanted = (
        jax.tree.map(lambda x: x.sharding, tree)
        for tree in (engine.programs.params, functions.decode_params(near))
    )
    assert jax.tree.leaves(found) == jax.tree.leaves(wanted)


def test_adapters_travel_merged():
    lora = LoraConfig(MODEL, select_modules(MODEL, ["q_proj", "down_proj"]), rank=2, alpha=4.0)
    adapters = jax.tree.map(lambda x: x + 0.5, init_params(lora, 1))
    params = attach(lora, init_params(MODEL, 0), adapters)
    assert not np.array_equal(merge(params)["layers"]["wq"], params["layers"]["wq"].w)
    for group in plan(whole_pieces(named(params), jnp.float32), 20_000):
        for piece, array in zip(group, take(named(params), group), strict=True):
            ends = zip(piece.starts, piece.shape, strict=True)
            part = named(merge(params))[piece.name][tuple(slice(a, a + n) for a, n in ends)]
            np.testing.assert_allclose(array, part, rtol=1e-6)


def test_one_process_copies_nothing():
    params = {"w": jnp.ones(3)}
    assert local_copy(params) is params
