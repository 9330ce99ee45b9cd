"""Moments in 16 and 8 bits: what they hold, how they are rounded, where they are."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.config import TrainConfig, get_config_as_dict
from jaxrl.config.card import optimizer_line
from jaxrl.models.transformer import TransformerConfig, init_params, logical_axes
from jaxrl.parallel import ShardingRules, make_mesh, param_shardings, replicated
from jaxrl.records.resume_identity import changed_fields
from jaxrl.train import train
from jaxrl.training.moments import scale_by_resting_adam
from jaxrl.training.optim import abstract_state, init_state, make_optimizer
from jaxrl.training.resident_memory import device_bytes
from tests.test_train import assert_bitwise_equal, small

MODEL = TransformerConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)


def optimizer(state_dtype):
    return make_optimizer(
        optax.constant_schedule(0.1),
        adam_betas=(0.9, 0.99),
        weight_decay=0.01,
        max_grad_norm=1e9,
        state_dtype=state_dtype,
    )


def moments(state):
    return [optax.tree_utils.tree_get(state, name)["w"] for name in ("mu", "nu")]


def values(moment, most, power):
    """What eight bits mean, from the docstring."""
    code = np.asarray(moment.code, np.float64)
    return np.asarray(moment.scale) * np.sign(code) * (np.abs(code) / most) ** power


def after(state_dtype, *gradients):
    """Parameters and state after updates of one array "w"."""
    adamw = optimizer(state_dtype)
    params = {"w": jnp.ones(np.shape(gradients[0]), jnp.float32)}
    state, update = jax.jit(adamw.init)(params), jax.jit(adamw.update)
    for gradient in gradients:
        updates, state = update({"w": jnp.float32(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
    return params["w"], state


@pytest.mark.parametrize(
    ("state_dtype", "bytes_of_moments"),
    # of 4 rows of 8 numbers: 2 x 32 x 4, 2 x 32 x 2, 2 x (32 x 1 + 4 x 4)
    [("float32", 256), ("bfloat16", 128), ("int8", 96)],
)
def test_bytes_at_rest(state_dtype, bytes_of_moments):
    _, state = after(state_dtype, np.ones((4, 8)))
    leaves = jax.tree.leaves(moments(state))
    assert sum(x.nbytes for x in leaves) == bytes_of_moments
    kinds = {"float32": ["float32"] * 2, "bfloat16": ["bfloat16"] * 2}
    kinds["int8"] = ["int8", "float32", "uint8", "float32"]
    assert [x.dtype.name for x in leaves] == kinds[state_dtype]


def test_a_row_of_one_number_is_its_scale_so_two_steps_by_hand_are_those_of_float32():
    # tests/training/test_optim.py has the arithmetic of 0.899 and 0.8714311
    for state_dtype in ("float32", "int8"):
        params, _ = after(state_dtype, [0.5], [-0.25])
        np.testing.assert_allclose(params, [0.8714311], rtol=1e-6)


def test_two_steps_in_bfloat16_by_hand():
    # 0.5:   p = 0.899, m = 0.05 -> 0.0498046875 or 0.050048828125 (steps of 2^-12),
    #        v = 0.0025 -> 163 or 164 of 2^-16
    # -0.25: m = 0.9 m - 0.025, v = 0.99 v + 0.000625, corrected by 0.19 and 0.0199
    #        p = 0.899 - 0.1 (m / sqrt(v) + 0.01 * 0.899)
    possible = [
        0.899 - 0.1 * ((0.9 * m - 0.025) / 0.19 / np.sqrt((0.99 * v + 0.000625) / 0.0199) + 0.00899)
        for m, v in itertools.product((0.0498046875, 0.050048828125), (163 / 2**16, 164 / 2**16))
    ]
    params, _ = after("bfloat16", [0.5], [-0.25])
    assert min(abs(params[0] - p) for p in possible) < 1e-6


def test_codes_by_hand():
    # the first moment is 0.1 g: in units of its largest 1, (32/127)^2, -(64/127)^2, 0
    # the second 0.01 g^2, in units of the largest: 1, (32/127)^4 ...; its root of eighth order
    # 255 (32/127)^(1/2) = 128.003, 255 (64/127)^(1/2) = 181.02
    gradient = [0.5, 0.5 * (32 / 127) ** 2, -0.5 * (64 / 127) ** 2, 0.0]
    _, state = after("int8", [gradient])
    first, second = moments(state)
    np.testing.assert_array_equal(first.code, [[127, 32, -64, 0]])
    np.testing.assert_allclose(first.scale, [[0.05]], rtol=1e-6)
    assert list(second.code[0, [0, 3]]) == [255, 0]
    assert second.code[0, 1] in (128, 129)
    assert second.code[0, 2] in (181, 182)
    np.testing.assert_allclose(second.scale, [[0.0025]], rtol=1e-5)


def test_rounding_is_right_on_average():
    # 0.3 of the largest lies between (69/127)^2 = 0.2951826 and (70/127)^2 = 0.3038006; the mean of
    # 40,000 draws of two numbers 0.0086 apart has a deviation of at most 0.0043 / 200 = 2.2e-5
    _, state = after("int8", [[1.0] + [0.3] * 40_000])
    found = values(moments(state)[0], 127, 2)[0, 1:] / 0.1
    np.testing.assert_allclose(np.unique(found), [0.2951826, 0.3038006], rtol=1e-5)
    assert found.mean() == pytest.approx(0.3, abs=1e-4)
    # in bfloat16 0.1 lies between 204 and 205 of 2^-11, 0.0996094 and 0.1000977
    _, state = after("bfloat16", [[1.0] * 40_000])
    found = np.asarray(moments(state)[0], np.float32)
    np.testing.assert_allclose(np.unique(found), [204 / 2048, 205 / 2048])
    assert found.mean() == pytest.approx(0.1, abs=1e-5)


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_the_second_moment_falls_when_gradients_do(state_dtype):
    """Rounded to the nearest it would stay: 1e-3 of a number is less than half a step."""
    adam = scale_by_resting_adam(0.9, 0.999, state_dtype)
    start = np.geomspace(1, 1e-3, 4096, dtype=np.float32)[None]

    @jax.jit
    def second_moment(start):
        _, state = adam.update({"w": start}, adam.init({"w": start}))
        still = {"w": jnp.zeros_like(start)}
        state = jax.lax.fori_loop(0, 1000, lambda _, state: adam.update(still, state)[1], state)
        return moments(state)[1]

    second = jax.device_get(second_moment(start))
    found = values(second, 255, 8) if state_dtype == "int8" else np.asarray(second, np.float32)
    # 0.999^1000 = 0.3677 of 0.001 g^2. The random walk of 1000 roundings of a number is 7 % wide
    # in bfloat16, 4 % in 8 bits, whose scales fall exactly; of the mean of 4096 numbers 0.1 %
    ratio = np.mean(found / (0.001 * start**2))
    assert ratio == pytest.approx(0.3677, rel=0.01)


def test_a_positive_second_moment_is_never_rounded_to_zero():
    """A first moment of 1e-4 would be divided by nothing but epsilon."""
    _, state = after("int8", [[1.0, 1e-11, 0.0]])
    np.testing.assert_array_equal(moments(state)[1].code, [[255, 1, 0]])


def test_moments_are_where_their_parameters_are():
    mesh = make_mesh(fsdp=4, tensor=2)
    params = jax.device_get(init_params(MODEL, 0))
    shardings = param_shardings(mesh, logical_axes(MODEL), params, ShardingRules())
    adamw = optimizer("int8")
    state = init_state(adamw, jax.device_put(params, shardings), shardings, replicated(mesh))
    abstract = abstract_state(adamw, MODEL, shardings, replicated(mesh))
    for planned, real in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (planned.shape, planned.dtype) == (real.shape, real.dtype)
        assert planned.sharding.is_equivalent_to(real.sharding, real.ndim)
    mu = optax.tree_utils.tree_get(state.opt_state, "mu")["layers"]
    # wo [2 layers, 2 heads, 8, 16]: 16 in quarters, heads in halves; wq [2, 16, 2, 8]
    assert shard_shapes(mu["wo"]) == [(2, 1, 8, 4), (2, 1, 8, 1)]
    assert shard_shapes(mu["wq"]) == [(2, 4, 1, 8), (2, 4, 1, 1)]


def shard_shapes(tree):
    return [x.addressable_shards[0].data.shape for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_rounding_is_the_same_on_every_mesh(state_dtype):
    adam = scale_by_resting_adam(0.9, 0.999, state_dtype)
    gradients = {"w": np.random.default_rng(0).standard_normal((8, 96), np.float32)}

    def twice(gradients):
        state = adam.init(gradients)
        for _ in range(2):
            _, state = adam.update(gradients, state)
        return state

    found = []
    for axes, spec in (((1, 1), ()), ((4, 2), ("fsdp", "tensor"))):
        mesh = make_mesh(devices=jax.devices()[: axes[0] * axes[1]], fsdp=axes[0], tensor=axes[1])
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        found.append(jax.jit(twice)(jax.device_put(gradients, sharding)))
    assert_bitwise_equal(found[1], found[0])


@pytest.mark.slow
def test_a_run_stopped_and_resumed_is_the_run_and_takes_what_was_planned(tmp_path):
    """The second half of it with the moments in host memory."""
    field = "trainer.policy.optimizer_config"
    rest = {f"{field}.state_dtype": "int8", "trainer.eval_interval": -1}
    whole = train(small(tmp_path / "whole", **rest))
    train(small(tmp_path / "parts", **rest, **{"trainer.max_training_steps": 2}))
    resumed = train(small(tmp_path / "parts", **rest, **{f"{field}.offload_after_step": True}))
    assert int(resumed.state.step) == 4
    assert_bitwise_equal(resumed.state, whole.state)
    moments = jax.tree.leaves(resumed.state.opt_state)
    assert {x.sharding.memory_kind for x in moments} == {"pinned_host"}
    held = sum(x.addressable_shards[0].data.nbytes for x in moments)
    assert device_bytes(whole.abstract_state.opt_state) == held


def test_moments_of_another_form_are_of_another_run():
    before, now = TrainConfig(), TrainConfig()
    now.trainer.critic.optimizer_config.state_dtype = "int8"
    changed = changed_fields(get_config_as_dict(before), get_config_as_dict(now))
    assert changed == {"trainer.critic.optimizer_config.state_dtype": ("float32", "int8")}


def test_the_card_names_the_form():
    settings = TrainConfig().trainer.policy.optimizer_config
    assert "moments" not in optimizer_line(settings)
    settings.state_dtype = "int8"
    assert optimizer_line(settings).endswith(", moments in int8")
