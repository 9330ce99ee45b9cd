"""Schedules, AdamW, and the update that skips a gradient that is not finite."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.config.model import SCHEDULERS
from jaxrl.models.transformer import TransformerConfig, init_params, logical_axes
from jaxrl.parallel import ShardingRules, make_mesh, param_shardings, replicated
from jaxrl.training.optim import (
    abstract_state,
    init_state,
    make_apply,
    make_optimizer,
    make_schedule,
)

# lr 1, 2 steps of warm-up, 6 in all: 0, 1/2, then 1 falls over 4 steps
#   linear 1 - k/4; cosine (1 + cos(pi k/4)) / 2 with cos(pi/4) = 0.7071068
RATES = {
    "constant": [1, 1, 1, 1, 1, 1, 1],
    "constant_with_warmup": [0, 0.5, 1, 1, 1, 1, 1],
    "linear": [0, 0.5, 1, 0.75, 0.5, 0.25, 0],
    "cosine": [0, 0.5, 1, 0.8535534, 0.5, 0.1464466, 0],
}


def test_every_scheduler_is_tested():
    assert set(RATES) == set(SCHEDULERS)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedule_literals(scheduler):
    schedule = make_schedule(scheduler, lr=1.0, num_warmup_steps=2, total_steps=6)
    np.testing.assert_allclose([schedule(k) for k in range(7)], RATES[scheduler], atol=1e-6)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_without_warmup_the_first_step_has_the_whole_rate(scheduler):
    assert make_schedule(scheduler, lr=3.0, num_warmup_steps=0, total_steps=5)(0) == 3.0


def test_an_unknown_scheduler_is_refused():
    with pytest.raises(ValueError, match=r"scheduler='cosin' is unknown.*'constant'"):
        make_schedule("cosin", lr=1.0, num_warmup_steps=0, total_steps=5)


def start(params, *, schedule=None, weight_decay=0.0, max_grad_norm=10.0):
    """Jitted apply and a fresh state on one device."""
    schedule = schedule or optax.constant_schedule(0.1)
    optimizer = make_optimizer(
        schedule, adam_betas=(0.9, 0.99), weight_decay=weight_decay, max_grad_norm=max_grad_norm
    )
    whole = replicated(make_mesh(devices=jax.devices()[:1]))
    params = jax.tree.map(jnp.asarray, params)
    state = init_state(optimizer, params, jax.tree.map(lambda _: whole, params), whole)
    return jax.jit(make_apply(optimizer, schedule)), state


def test_two_adamw_steps_by_hand():
    # p = 1, lr 0.1, betas 0.9 and 0.99, decay 0.01, eps 1e-8
    # g = 0.5:   m = 0.05, v = 0.0025; corrected 0.5 and 0.25; 0.5 / sqrt(0.25) = 1
    #            p = 1 - 0.1 (1 + 0.01 * 1) = 0.899
    # g = -0.25: m = 0.9 * 0.05 - 0.1 * 0.25 = 0.02, corrected 0.02 / 0.19 = 0.1052632
    #            v = 0.99 * 0.0025 + 0.01 * 0.0625 = 0.0031, corrected 0.0031 / 0.0199 = 0.1557789
    #            0.1052632 / sqrt(0.1557789) = 0.2666994
    #            p = 0.899 - 0.1 (0.2666994 + 0.01 * 0.899) = 0.8714311
    apply, state = start({"w": np.float32([1.0])}, weight_decay=0.01)
    state, metrics = apply(state, {"w": np.float32([0.5])})
    np.testing.assert_allclose(state.params["w"], [0.899], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], 0.5)
    state, _ = apply(state, {"w": np.float32([-0.25])})
    np.testing.assert_allclose(state.params["w"], [0.8714311], rtol=1e-6)


def test_the_gradient_is_clipped_by_its_global_norm():
    # norm of (3, 4) over two leaves = 5, limited to 1: (0.6, 0.8); first moments a tenth of it
    apply, state = start({"a": np.float32([0]), "b": np.float32([0])}, max_grad_norm=1.0)
    state, metrics = apply(state, {"a": np.float32([3]), "b": np.float32([4])})
    moments = optax.tree_utils.tree_get(state.opt_state, "mu")
    np.testing.assert_allclose(moments["a"], [0.06], rtol=1e-5)
    np.testing.assert_allclose(moments["b"], [0.08], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], 5.0, rtol=1e-6)  # before clipping


def test_the_logged_rate_is_the_one_of_this_update():
    schedule = make_schedule("linear", lr=1.0, num_warmup_steps=2, total_steps=6)
    apply, state = start({"w": np.float32([1.0])}, schedule=schedule)
    rates = []
    for _ in range(3):
        state, metrics = apply(state, {"w": np.float32([0.5])})
        rates.append(float(metrics["policy_lr"]))
    assert rates == [0, 0.5, 1]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(poison):
    schedule = make_schedule("linear", lr=1.0, num_warmup_steps=2, total_steps=6)
    apply, state = start({"w": np.float32([1.0, 2.0])}, schedule=schedule)
    state, metrics = apply(state, {"w": np.float32([0.5, 0.5])})
    assert int(metrics["skipped_updates"]) == 0
    after, metrics = apply(state, {"w": np.float32([0.5, poison])})
    assert int(metrics["skipped_updates"]) == int(after.skipped_updates) == 1
    before = jax.tree.leaves((state.params, state.opt_state))
    for old, new in zip(before, jax.tree.leaves((after.params, after.opt_state)), strict=True):
        np.testing.assert_array_equal(new, old)
    # the schedule stood still: the next update is the second, of rate 1/2
    _, metrics = apply(after, {"w": np.float32([0.5, 0.5])})
    assert float(metrics["policy_lr"]) == 0.5


MODEL = TransformerConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)


def test_a_fresh_state_takes_over_its_parameters():
    """Two copies of the parameters at the start of a run would need the most memory of all."""
    mesh = make_mesh(fsdp=8)
    shardings = param_shardings(mesh, logical_axes(MODEL), init_params(MODEL, 0), ShardingRules())
    params = init_params(MODEL, 0, shardings)
    optimizer = make_optimizer(
        optax.constant_schedule(0.1), adam_betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "some donated buffers were not usable"
        state = init_state(optimizer, params, shardings, replicated(mesh))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    expected = init_params(MODEL, 0)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), expected)


def test_moments_are_sharded_like_their_parameters():
    mesh = make_mesh(fsdp=4)
    params = init_params(MODEL, 0)
    shardings = param_shardings(mesh, logical_axes(MODEL), params, ShardingRules())
    assert shardings["layers"]["wq"].spec[1] == "fsdp"
    optimizer = make_optimizer(
        optax.constant_schedule(0.1), adam_betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0
    )
    state = init_state(optimizer, jax.device_put(params, shardings), shardings, replicated(mesh))
    for name in ("mu", "nu"):
        moments = optax.tree_utils.tree_get(state.opt_state, name)
        placed = jax.tree.map(
            lambda m, s: m.sharding.is_equivalent_to(s, m.ndim), moments, shardings
        )
        assert all(jax.tree.leaves(placed)), name
        # wq is [2 layers, 16, 2, 8]: a quarter of the second dimension on each device
        shard = moments["layers"]["wq"].addressable_shards[0].data
        assert shard.shape == (2, 4, 2, 8)
    assert state.step.sharding.is_fully_replicated
    abstract = abstract_state(optimizer, MODEL, shardings, replicated(mesh))
    same = jax.tree.map(
        lambda a, s: (
            (a.shape, a.dtype) == (s.shape, s.dtype)
            and a.sharding.is_equivalent_to(s.sharding, s.ndim)
        ),
        abstract,
        state,
    )
    assert all(jax.tree.leaves(same))
