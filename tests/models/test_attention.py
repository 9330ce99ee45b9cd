"""The fused kernels against the plain attention: values, gradients, lowering, limits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import attention
from jaxrl.models.attention import (
    Segments,
    choose_kernel,
    layer_views,
    self_attention,
    splash,
    training_mask,
    triton,
)
from jaxrl.models.transformer import TransformerConfig, abstract_params, forward
from jaxrl.parallel import make_mesh
from jaxrl.parallel.rules import Placement

MODEL = TransformerConfig(
    vocab_size=32,
    hidden_size=128,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
)
GEMMA = dataclasses.replace(
    MODEL,
    attention_softcap=5.0,
    sliding_window=40,
    sliding_layers=(True,),
    query_pre_attn_scalar=100.0,
)
# one row of 150 tokens: segments of 70 and 60, and 20 tokens of padding; not whole blocks
IDS = jnp.repeat(jnp.array([[1, 2, 0]]), jnp.array([70, 60, 20]), axis=1, total_repeat_length=150)
REAL = IDS > 0


def qkv(batch=1):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    length = IDS.shape[1]
    return draw(batch, length, 2, 64), draw(batch, 1, length, 64), draw(batch, 1, length, 64)


def value_and_gradient(config, kernel, mask):
    def loss(q, k, v):
        out = jnp.where(REAL[:, :, None, None], kernel(config, q, k, v, mask), 0)
        return jnp.sum(jnp.sin(3 * out)), out

    (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*qkv())
    return out, *grads


@pytest.mark.parametrize("blocks", [1, 3, 4, 100])
@pytest.mark.parametrize("config", [MODEL, GEMMA], ids=["plain", "gemma"])
def test_blocks_of_queries_are_the_whole(monkeypatch, config, blocks):
    monkeypatch.setattr(attention, "CAUSAL_BLOCKS", blocks)
    mask = training_mask(IDS, "xla")
    expected = value_and_gradient(config, attention.attention, mask)
    found = value_and_gradient(config, attention.causal_attention, mask)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("config", [MODEL, GEMMA], ids=["plain", "gemma"])
def test_splash_is_the_plain_attention(config, sliding):
    if sliding and config.sliding_window is None:
        pytest.skip("no layer slides")
    positions = jnp.concatenate([jnp.arange(70), jnp.arange(60), jnp.arange(20)])[None]
    masks = [
        layer_views(config, training_mask(IDS, kernel), positions, positions)(sliding).mask
        for kernel in ("xla", "splash")
    ]
    kernel = functools.partial(splash, interpret=True)
    expected = value_and_gradient(config, self_attention, masks[0])
    found = value_and_gradient(config, kernel, masks[1])
    for a, b in zip(expected, found, strict=True):
        assert float(jnp.max(jnp.abs(a))) > 0.1
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-4)


def test_triton_is_the_plain_attention():
    kernel = functools.partial(triton, interpret=True)
    expected = value_and_gradient(MODEL, self_attention, training_mask(IDS, "xla"))
    found = value_and_gradient(MODEL, kernel, training_mask(IDS, "triton"))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-4)


def test_a_kernel_over_a_mesh_is_the_kernel(monkeypatch):
    monkeypatch.setattr(attention, "splash", functools.partial(splash, interpret=True))
    config = dataclasses.replace(MODEL, num_kv_heads=2)
    q, k, v = (jnp.concatenate([x] * 4) for x in qkv())
    k, v = (jnp.concatenate([x, 2 * x], axis=1) for x in (k, v))
    segments = Segments(jnp.concatenate([IDS] * 4), False)
    mesh = make_mesh(devices=jax.devices()[:4], fsdp=2, tensor=2)
    run = functools.partial(self_attention, config, q, k, v, segments, kernel="splash")
    np.testing.assert_allclose(run(), run(placement=Placement(mesh)), atol=1e-6)


def test_no_mask_is_built_for_a_kernel():
    tokens = jnp.zeros((1, 256), jnp.int32)
    program = jax.make_jaxpr(
        functools.partial(forward, MODEL, dtype=jnp.bfloat16, kernel="triton")
    )(abstract_params(MODEL), tokens, tokens, tokens)
    assert "pallas_call" in str(program)
    assert "[1,256,256]" not in str(program).replace(" ", "")


def test_triton_lowers_for_cuda():
    """Forward and backward; nothing runs."""
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in qkv()]
    loss = lambda q, k, v: triton(MODEL, q, k, v, Segments(IDS, False)).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    text = gradient.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") >= 2


@pytest.mark.slow  # the TPU compiler
def test_splash_compiles_for_a_tpu():
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    mesh = make_mesh(devices=topology_devices("v5e:2x4"), fsdp=4, tensor=2)
    config = dataclasses.replace(GEMMA, num_heads=4, num_kv_heads=2)
    placement = Placement(mesh)

    def array(dtype, shape, *names):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.sharding(shape, names))

    q = array(jnp.bfloat16, (8, 1000, 4, 64), "batch", None, "heads", None)
    kv = array(jnp.bfloat16, (8, 2, 1000, 64), "batch", "kv_heads", None, None)
    ids = array(jnp.int32, (8, 1000), "batch", None)

    def loss(q, k, v, ids, sliding):
        segments = Segments(ids, sliding)
        out = self_attention(config, q, k, v, segments, kernel="splash", placement=placement)
        return out.astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, kv, kv, ids, True).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 1000 * 1000  # no scores


def test_flash_attn_picks_the_kernel_of_the_platform():
    choose = functools.partial(choose_kernel, MODEL, dtype=jnp.bfloat16)
    assert choose(True, "tpu") == "splash"
    assert choose(True, "gpu") == "triton"
    assert choose(True, "cpu") == "xla"
    assert {choose(False, platform) for platform in ("tpu", "gpu", "cpu")} == {"xla"}


@pytest.mark.parametrize(
    ("changes", "platform", "dtype", "need"),
    [
        ({"head_dim": 96}, "tpu", jnp.bfloat16, "a head_dim that 64 divides, not 96"),
        ({"head_dim": 256}, "gpu", jnp.bfloat16, "a head_dim of at most 128, not 256"),
        ({}, "gpu", jnp.float32, "trainer.bf16=True"),
        ({"attention_softcap": 5.0}, "gpu", jnp.bfloat16, "a model without attention softcap"),
        ({"sliding_window": 8}, "gpu", jnp.bfloat16, "a model without sliding window"),
    ],
)
def test_what_a_kernel_cannot_run_is_refused(changes, platform, dtype, need):
    config = dataclasses.replace(MODEL, **changes)
    with pytest.raises(ValueError, match=f"trainer.flash_attn=True: the {platform} .*{need}; set"):
        choose_kernel(config, True, platform, dtype)
