"""The fused kernels against the plain attention: values, gradients, lowering, limits."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import config as cfg
from jaxrl.models import attention
from jaxrl.models.architecture import LayerFlags
from jaxrl.models.attention import Segments, layer_views
from jaxrl.models.kernels import packed_attention, tokamax_package
from jaxrl.models.kernels.choice import Facts, Implementation, facts_of
from jaxrl.models.kernels.packed_attention import (
    PACKED_ATTENTION,
    self_attention,
    splash,
    training_mask,
)
from jaxrl.models.transformer import TransformerConfig, abstract_params, forward
from jaxrl.parallel import make_mesh
from jaxrl.parallel.rules import Placement
from jaxrl.training.build import attention_kernel, role_kernels

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
IDS = np.repeat(np.array([[1, 2, 0]], np.int32), [70, 60, 20], axis=1)
REAL = IDS > 0


def qkv(batch=1):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    length = IDS.shape[1]
    return draw(batch, length, 2, 64), draw(batch, 1, length, 64), draw(batch, 1, length, 64)


def mask_of(config, kernel, sliding):
    """What a layer that slides, or does not, masks with."""
    positions = np.concatenate([np.arange(70), np.arange(60), np.arange(20)])[None]
    return layer_views(config, training_mask(jnp.asarray(IDS), kernel), positions, positions)(
        LayerFlags(sliding, True)
    ).mask


def value_and_gradient(config, kernel, mask_of, real=REAL):
    """Of `kernel`, with the mask that `mask_of()` gives within its program."""

    def loss(q, k, v):
        out = jnp.where(real[:, :, None, None], kernel(config, q, k, v, mask_of()), 0)
        return jnp.sum(jnp.sin(3 * out)), out

    call = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, out), grads = call(*qkv())
    return out, *grads


@functools.cache
def plain(config, sliding):
    """What every kernel has to give."""
    return value_and_gradient(
        config, self_attention, functools.partial(mask_of, config, "xla", sliding)
    )


@pytest.mark.some(1)
@pytest.mark.parametrize("blocks", [3, 1, 4, 100])
@pytest.mark.parametrize("config", [MODEL, GEMMA], ids=["plain", "gemma"])
def test_blocks_of_queries_are_the_whole(monkeypatch, config, blocks):
    monkeypatch.setattr(attention, "CAUSAL_BLOCKS", blocks)
    mask = functools.partial(training_mask, IDS, "xla")
    expected = value_and_gradient(config, attention.attention, mask)
    found = value_and_gradient(config, attention.causal_attention, mask)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("config", [MODEL, GEMMA], ids=["plain", "gemma"])
def test_splash_is_the_plain_attention(config, sliding):
    if sliding and config.sliding_window is None:
        pytest.skip("no layer slides")
    kernel = functools.partial(splash, interpret=True)
    mask = functools.partial(mask_of, config, "splash", sliding)
    found = value_and_gradient(config, kernel, mask)
    for a, b in zip(plain(config, sliding), found, strict=True):
        assert float(jnp.max(jnp.abs(a))) > 0.1
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-4)


@pytest.mark.some(2)
@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("config", [MODEL, GEMMA], ids=["plain", "gemma"])
def test_chunks_are_the_plain_attention(monkeypatch, config, sliding):
    """Chunks of 16 queries, 10 of them in 4 quarters of at most 3: the last has one."""
    monkeypatch.setattr(packed_attention, "CHUNK", 16)
    mask = functools.partial(mask_of, config, "chunked", sliding)
    found = value_and_gradient(config, packed_attention.chunked, mask)
    for a, b in zip(plain(config, sliding), found, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-4)


SINKS = np.array([0.5, 2.0], np.float32)  # of two heads


def test_a_sink_is_a_key_of_its_score_whose_value_is_zero():
    q, k, v = qkv()
    mask = np.asarray(training_mask(jnp.asarray(IDS), "xla"))
    # without sinks: a head's softmax has total z; with them z + e^sink
    scores = np.einsum("bthd,bsd->bhts", q, k[:, 0]) / 8  # sqrt(64)
    total = np.where(mask[:, None], np.exp(scores), 0).sum(-1)  # [B, H, T]
    share = (total / (total + np.exp(SINKS)[:, None])).transpose(0, 2, 1)[..., None]
    attend = jax.jit(functools.partial(attention.attention, MODEL))
    expected = share * attend(q, k, v, mask)
    found = attend(q, k, v, mask, SINKS)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_blocks_chunks_and_devices_have_the_same_sinks(monkeypatch):
    monkeypatch.setattr(packed_attention, "CHUNK", 16)
    given = qkv()
    placement = Placement(make_mesh(tensor=2, devices=jax.devices()[:2]))
    segments = training_mask(IDS, "chunked")
    ways = {
        "whole": lambda *x: attention.attention(MODEL, *x[:3], training_mask(IDS, "xla"), x[3]),
        "blocks": lambda *x: self_attention(MODEL, *x[:3], training_mask(IDS, "xla"), x[3]),
        "chunks": lambda *x: self_attention(MODEL, *x[:3], segments, x[3], kernel="chunked"),
        "spread": lambda *x: self_attention(
            MODEL, *x[:3], segments, x[3], kernel="chunked", placement=placement
        ),
    }

    def loss(way, *x):
        return jnp.sin(3 * jnp.where(REAL[:, :, None, None], ways[way](*x), 0)).sum()

    wanted, *found = (
        jax.grad(functools.partial(loss, way), argnums=(0, 1, 2, 3))(*given, SINKS) for way in ways
    )
    assert float(jnp.abs(wanted[3]).min()) > 0.1
    for grads in found:
        for a, b in zip(wanted, grads, strict=True):
            np.testing.assert_allclose(a, b, atol=3e-5, rtol=2e-4)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_no_kernel_without_sinks_is_chosen_for_a_model_that_has_them(platform):
    sinks = dataclasses.replace(MODEL, attention_sinks=True)
    facts = Facts(platform, jnp.dtype(jnp.bfloat16), sinks, packed=False)
    choice = PACKED_ATTENTION.choose(facts)
    assert choice.name == "chunked"
    assert all("a model without attention sinks" in why for why in choice.passed_over.values())


@pytest.mark.parametrize("window", [None, 40])
def test_rows_of_one_segment_need_none(window):
    """What cuDNN is asked for, by JAX's own plain attention: causal, padding at the end."""
    ids = np.where(np.arange(150) < 120, 1, 0)[None]
    config = dataclasses.replace(MODEL, sliding_window=window, sliding_layers=(window is not None,))
    positions = np.arange(150)[None]

    def mask():
        views = layer_views(config, training_mask(jnp.asarray(ids), "xla"), positions, positions)
        return views(LayerFlags(True, True)).mask

    kernel = functools.partial(packed_attention.cudnn, implementation="xla")
    expected = value_and_gradient(config, self_attention, mask, ids > 0)
    segments = functools.partial(Segments, jnp.asarray(ids), True)
    found = value_and_gradient(config, kernel, segments, ids > 0)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-4)


def test_bounds_of_keys_are_the_mask():
    """What tokamax is asked for: the first key of each query; the last is the query itself."""
    place = jnp.arange(IDS.shape[1])
    for config, sliding in ((MODEL, False), (GEMMA, False), (GEMMA, True)):
        first = packed_attention.first_keys(config, Segments(IDS, sliding))
        found = (place >= first[:, :, None]) & (place <= place[:, None])
        np.testing.assert_array_equal(found, mask_of(config, "xla", sliding))


def test_a_kernel_over_a_mesh_is_the_kernel(monkeypatch):
    anywhere = Implementation(functools.partial(splash, interpret=True))
    monkeypatch.setitem(PACKED_ATTENTION.implementations, "splash", anywhere)
    config = dataclasses.replace(MODEL, num_kv_heads=2)
    q, k, v = (np.concatenate([x] * 4) for x in qkv())
    k, v = (np.concatenate([x, 2 * x], axis=1) for x in (k, v))
    segments = Segments(jnp.asarray(np.concatenate([IDS] * 4)), False)
    mesh = make_mesh(devices=jax.devices()[:4], fsdp=2, tensor=2)
    run = functools.partial(self_attention, config, q, k, v, segments, kernel="splash")
    alone, spread = jax.jit(run), jax.jit(functools.partial(run, placement=Placement(mesh)))
    np.testing.assert_allclose(alone(), spread(), atol=1e-6)


def test_no_mask_is_built_for_a_kernel():
    tokens = jnp.zeros((1, 1024), jnp.int32)
    program = jax.make_jaxpr(
        functools.partial(forward, MODEL, dtype=jnp.bfloat16, kernel="chunked")
    )(abstract_params(MODEL), tokens, tokens, tokens)
    assert "[1,1024,1024]" not in str(program).replace(" ", "")


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


FACTS = Facts("gpu", jnp.dtype("bfloat16"), MODEL, packed=False)


def test_the_fastest_that_can_is_chosen(monkeypatch):
    assert PACKED_ATTENTION.choose(FACTS._replace(platform="tpu")).name == "splash"
    assert PACKED_ATTENTION.choose(FACTS._replace(platform="cpu")).name == "xla"
    assert PACKED_ATTENTION.choose(FACTS._replace(platform="of tomorrow")).name == "xla"
    assert str(PACKED_ATTENTION.choose(FACTS)) == "packed_attention cudnn"
    monkeypatch.setattr(tokamax_package, "missing", list)
    packed = PACKED_ATTENTION.choose(FACTS._replace(packed=True))
    assert str(packed) == (
        "packed_attention tokamax (cudnn needs trainer.use_sample_packing=False)"
    )


def test_without_tokamax_packed_rows_on_a_gpu_go_by_chunks(monkeypatch):
    monkeypatch.setattr(tokamax_package, "missing", lambda: ["the package tokamax"])
    choice = PACKED_ATTENTION.choose(FACTS._replace(packed=True))
    assert choice.name == "chunked"
    assert choice.passed_over["tokamax"] == ["the package tokamax"]


@pytest.mark.parametrize(
    ("tokamax", "jax", "missing"),
    [
        ("0.0.12", "0.10.2", []),
        ("0.0.12", "0.11.2", ["tokamax 0.0.17 or later with jax 0.11.2, not 0.0.12"]),
        ("0.0.17", "0.12.0", []),
    ],
)
def test_a_tokamax_that_is_not_for_this_jax_is_passed_over(monkeypatch, tokamax, jax, missing):
    versions = {"tokamax": tokamax, "jax": jax}
    monkeypatch.setattr(tokamax_package.importlib.metadata, "version", versions.get)
    assert tokamax_package.missing() == missing


@pytest.mark.parametrize(
    ("changes", "facts", "name", "need"),
    [
        ({"head_dim": 96}, {"platform": "tpu"}, "splash", "a head_dim that 64 divides, not 96"),
        ({"head_dim": 320}, {}, "cudnn", "a head_dim that 8 divides, of at most 256, not 320"),
        ({"head_dim": 256}, {"capability": 8.0}, "cudnn", "of at most 128, not 256"),
        ({}, {"capability": 7.5}, "cudnn", "an Ampere GPU or later, not compute capability 7.5"),
        ({}, {"dtype": jnp.dtype("float32")}, "cudnn", "trainer.bf16=True"),
        ({"attention_softcap": 5.0}, {}, "cudnn", "a model without attention softcap"),
        ({}, {"packed": True}, "cudnn", "trainer.use_sample_packing=False"),
        ({}, {"capability": 8.0}, "tokamax", "a Hopper GPU or a B200, not compute capability 8.0"),
        ({}, {"capability": 12.0}, "tokamax", "or a B200, not compute capability 12.0"),
        ({"head_dim": 96}, {}, "tokamax", "a head_dim of 64, 128 or 256, not 96"),
    ],
)
def test_what_a_named_kernel_misses_is_said(changes, facts, name, need):
    facts = FACTS._replace(**{"model": dataclasses.replace(MODEL, **changes), **facts})
    assert PACKED_ATTENTION.choose(facts).name != name
    with pytest.raises(ValueError, match=rf"'packed_attention'\]='{name}' needs .*{need}"):
        PACKED_ATTENTION.choose(facts, name)


@pytest.mark.parametrize(
    ("capability", "platform", "known"), [("8.0", "gpu", 8.0), ("gfx90a", "rocm", None)]
)
def test_gpus_of_amd_have_the_reference(capability, platform, known):
    device = SimpleNamespace(platform="gpu", device_kind="", compute_capability=capability)
    facts = facts_of(device, jnp.bfloat16, MODEL, packed=False)
    assert (facts.platform, facts.capability) == (platform, known)
    assert PACKED_ATTENTION.choose(facts).name == ("cudnn" if known else "xla")


def test_a_name_of_another_platform_is_refused():
    with pytest.raises(ValueError, match="'splash': on a gpu there are cudnn, tokamax, chunked"):
        PACKED_ATTENTION.choose(FACTS, "splash")
    named = PACKED_ATTENTION.choose(FACTS, "chunked")
    assert str(named) == "packed_attention chunked (trainer.kernels)"


def test_the_config_names_kernels():
    trainer = cfg.resolve(cfg.TrainConfig()).trainer
    (device,) = jax.devices()[:1]
    choice = attention_kernel(trainer, MODEL, device)
    assert str(choice) == "packed_attention xla (trainer.flash_attn=False)"
    trainer.kernels = {"packed_attention": "chunked"}
    assert attention_kernel(trainer, MODEL, device).name == "chunked"
    for kernels, message in (
        ({"atention": "xla"}, "trainer.kernels='atention'"),
        ({"packed_attention": "flash"}, r"trainer.kernels\['packed_attention'\]='flash'"),
    ):
        config = cfg.apply_overrides(cfg.TrainConfig(), {"trainer.kernels": kernels})
        with pytest.raises(ValueError, match=message):
            cfg.validate(config)
    config = cfg.apply_overrides(cfg.TrainConfig(), {"trainer.kernels": {"grouped_product": "xla"}})
    with pytest.raises(ValueError, match=r"'grouped_product'\]='xla' has no effect: the model has"):
        role_kernels(config, MODEL, device, "policy")
