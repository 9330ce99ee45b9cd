"""The kernel of the delta rule against chunks and steps, and what the TPU compiler makes of it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import forward, init_params
from jaxrl.models.architecture import DeltaNet, TransformerConfig
from jaxrl.models.delta_rule import chunked, step
from jaxrl.models.kernels import delta_rule as module
from jaxrl.models.kernels.choice import Facts, Implementation
from jaxrl.models.kernels.delta_rule import DELTA_RULE, delta_rule, pallas
from jaxrl.parallel import Placement, make_mesh
from jaxrl.rollout.native.programs import rule_kernel_of

KEYS, VALUES, WIDTH, VALUE_WIDTH, CHUNK = 2, 6, 8, 5, 16  # three value heads of a key head
interpreted = functools.partial(pallas, chunk=CHUNK, interpret=True)
MODEL = TransformerConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mixers=("delta", "attention"),
    delta_net=DeltaNet(key_heads=2, value_heads=4, key_dim=128, value_dim=128, window=4),
    initializer_range=0.1,
)


def draw(tokens, rows=2):
    """q, k, v, log_decay, strength and state of rows; heads forget nothing, some, or nearly all."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal
    q, k = (normal((rows, tokens, KEYS, WIDTH)) for _ in "qk")
    q, k = (np.float32(x / np.linalg.norm(x, axis=-1, keepdims=True)) for x in (q, k))
    v = np.float32(normal((rows, tokens, VALUES, VALUE_WIDTH)))
    rate = np.tile([0.01, 1.0, 20.0], KEYS)
    log_decay = np.float32(-rate * rng.exponential(1, (rows, tokens, VALUES)))
    strength = np.float32(rng.random((rows, tokens, VALUES)))
    return q, k, v, log_decay, strength, np.float32(normal((rows, VALUES, WIDTH, VALUE_WIDTH)))


def segments(tokens):
    """Of the first row: one that ends within a chunk, one as short, one over a chunk's border."""
    ids = np.ones((2, tokens), int)
    ids[0, tokens // 3 :] = 2
    ids[0, tokens // 2 :] = 3
    return ids


def step_by_step(q, k, v, log_decay, strength, ids, state):
    """The rule as its definition has it, token by token; states begin anew with segments."""
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))

    def one(state, of):
        (*token, begins) = of
        out, state = step(*token, jnp.where(begins[:, None, None, None], 0, state))
        return state, out

    by_token = [jnp.swapaxes(x, 0, 1) for x in (q, k, v, log_decay, strength, begins)]
    state, out = jax.lax.scan(one, state, by_token)
    return jnp.swapaxes(out, 0, 1), state


def value_and_gradients(run, given, ids):
    """Output and last state, and the gradients of both by all inputs, for weights drawn."""
    rng = np.random.default_rng(1)

    def whole(*given):
        return run(*given[:5], ids, given[5])

    @jax.jit
    def both(given):
        found, pull_back = jax.vjp(whole, *given)
        weights = [jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for x in found]
        return found, pull_back(tuple(weights))

    return both(given)


@pytest.mark.parametrize("tokens", [9, 48, 50])
def test_values_and_gradients_are_those_of_steps(tokens):
    """Less than a chunk, whole chunks, and some that are padded; each from a state.

    Once those of the rule in chunks, too; without a state tests/models/test_delta_rule.py has them.
    """
    given, ids = draw(tokens), segments(tokens)
    found, gradients = value_and_gradients(interpreted, given, ids)
    in_chunks = [functools.partial(chunked, chunk=CHUNK)] if tokens == 50 else []
    for reference in (step_by_step, *in_chunks):
        expected, expected_gradients = value_and_gradients(reference, given, ids)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-6)
        for one, other in zip(gradients, expected_gradients, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)


def test_segments_have_no_gradient_of_one_another():
    given, ids = draw(30), np.ones((2, 30), int)
    ids[:, 13:] = 2
    first = (np.arange(30) < 13)[None, :, None, None]

    def total(given):
        return jnp.sum(interpreted(*given[:5], ids, given[5])[0] * first)

    *by_token, state = jax.jit(jax.grad(total))(given)
    assert all(not np.any(np.asarray(x)[:, 13:]) for x in by_token)
    assert all(np.any(np.asarray(x)[:, :13]) for x in (*by_token, state))


def test_decays_of_nearly_nothing_overflow_nowhere():
    *qkv, log_decay, strength, state = draw(CHUNK)
    given = *qkv, np.full_like(log_decay, -40.0), strength, state
    found = value_and_gradients(interpreted, given, np.ones((2, CHUNK), int))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.fixture
def on_cpus(monkeypatch):
    """The kernel, interpreted."""
    there = Implementation(interpreted)
    monkeypatch.setitem(DELTA_RULE.implementations, "pallas", there)


def test_devices_have_the_heads_of_their_own_keys(on_cpus):
    """Two rows over two devices, two key heads and their values over two more."""
    *given, _ = draw(20)
    ids = segments(20)
    placement = Placement(make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4]))
    expected = jax.jit(delta_rule)(*given, ids)
    run = functools.partial(delta_rule, kernel="pallas", placement=placement)
    np.testing.assert_allclose(jax.jit(run)(*given, ids), expected, atol=2e-6)


def test_a_model_trains_by_it(on_cpus):
    """Its layer computed again, as training has it: the gradient is that of the reference."""
    net = dataclasses.replace(MODEL.delta_net, key_dim=8, value_dim=12)
    model = dataclasses.replace(MODEL, num_layers=1, mixers=("delta",), delta_net=net)
    params, ids = init_params(model, 0), segments(20)
    tokens = np.random.default_rng(0).integers(0, 61, ids.shape)
    positions = np.broadcast_to(np.arange(20), ids.shape)

    def gradient(kernel):
        def loss(params):
            given = params, tokens, positions, ids
            hidden = forward(model, *given, remat="full", rule_kernel=kernel)
            return jnp.mean(jnp.square(hidden))

        return jax.jit(jax.grad(loss))(params)

    leaves = [jax.tree.leaves(gradient(kernel)) for kernel in ("pallas", "xla")]
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * max(np.abs(other).max(), 1))


@pytest.mark.parametrize(
    ("changes", "need"),
    [
        ({}, ""),
        ({"value_dim": 96}, "heads whose widths 128 divides, not 128 and 96"),
        ({"value_heads": 32}, "at most 524,288 bytes of states for a key head"),
    ],
)
def test_what_the_kernel_misses_is_said(changes, need):
    model = dataclasses.replace(MODEL, delta_net=dataclasses.replace(MODEL.delta_net, **changes))
    facts = Facts("tpu", jnp.dtype("bfloat16"), model)
    choice = DELTA_RULE.choose(facts)
    assert choice.name == ("xla" if need else "pallas")
    assert choice.passed_over == ({"pallas": [need]} if need else {})
    assert DELTA_RULE.choose(facts._replace(platform="cuda")).name == "xla"
    assert DELTA_RULE.choose(facts._replace(platform="cpu")).name == "xla"


def test_an_engine_prefills_by_it():
    assert rule_kernel_of(MODEL, make_mesh(), jnp.bfloat16) == "xla"  # of CPUs
    with pytest.raises(ValueError, match="'pallas': on a cpu there is xla"):
        rule_kernel_of(MODEL, make_mesh(), jnp.bfloat16, "pallas")


def compiled_gradient(device, tokens, keys, values):
    """The rule's gradient by all its inputs, of a row of heads of 128, compiled for a TPU."""

    def array(*shape):
        return jax.ShapeDtypeStruct((1, tokens, *shape), jnp.float32, sharding=device)

    given = array(keys, 128), array(keys, 128), array(values, 128), array(values), array(values)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32, sharding=device)

    def gradient(given, ids, g):
        return jax.vjp(lambda given: pallas(*given, ids)[0], given)[1](g)

    return jax.jit(gradient).lower(given, ids, given[2]).compile()


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
def test_the_tpu_compiler_takes_it(topology):
    """No decays [C, C] of all chunks are anywhere: states, and what the kernels read and write."""
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    device = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])
    tokens, keys, values = 4096, 4, 8
    compiled = compiled_gradient(device, tokens, keys, values)
    text, chunk = compiled.as_text(), module.CHUNK
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    shapes = re.findall(r"f32\[([\d,]+)\]", text)
    assert not [shape for shape in shapes if shape.endswith(f"{chunk},{chunk}")]
    state = tokens // chunk * values * 128 * 128 * 4
    by_token = 4 * tokens * 128 * (2 * keys + 2 * values)
    memory = compiled.memory_analysis()
    assert state <= memory.temp_size_in_bytes <= state + 2 * by_token


def test_the_largest_states_fit_in_fast_memory():
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    device = jax.sharding.SingleDeviceSharding(topology_devices("v4:2x2x1")[0])
    values = module.TPU_STATES // (128 * 128 * 4)
    compiled_gradient(device, tokens=128, keys=1, values=values)


def test_a_tpu_splits_it_by_row_and_head():
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    mesh = make_mesh(fsdp=2, tensor=2, devices=topology_devices("v5e:2x2"))
    placement = Placement(mesh)

    def array(dtype, *shape):
        names = ("batch", None, "heads", None)[: len(shape)]
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.sharding(shape, names))

    float32 = functools.partial(array, jnp.float32, 2, 256)
    given = float32(2, 128), float32(2, 128), float32(4, 128), float32(4), float32(4)
    run = functools.partial(delta_rule, kernel="pallas", placement=placement)
    text = jax.jit(run).lower(*given, array(jnp.int32, 2, 256)).compile().as_text()
    assert "custom-call" in text
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", text)
