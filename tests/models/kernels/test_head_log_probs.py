"""The head's kernels against logits of the whole vocabulary, and what compilers make of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.array_ops import entropy, token_log_probs
from jaxrl.models.architecture import TransformerConfig
from jaxrl.models.kernels import head_log_probs
from jaxrl.models.kernels.choice import Facts
from jaxrl.models.kernels.head_log_probs import (
    HEAD_LOG_PROBS,
    Scoring,
    Slopes,
    gradients,
    sums,
)
from jaxrl.models.transformer import abstract_params, head_axes, logical_axes
from jaxrl.parallel import Placement, make_mesh
from jaxrl.training.forward import Head, Targets, score

KERNELS = ("tiles", "interpret")
TOKENS, WANTED, WIDTH = 256, 130, 128  # two products of a TPU, the second with two wanted tokens
# Of 650 ids the TPU has three tiles of 256, of its two cores the second one alone; 200 are less
# than a tile. In plain XLA they are seven tiles of 96, and three.
VOCABULARIES = (650, 200)
# Measured here: 1.1e-6 and 3.0e-3, of the largest. The latter is the rounding of the gradient of
# the logits, 2^-9 of each, before its products.
TOLERANCE = {jnp.float32: 5e-6, jnp.bfloat16: 6e-3}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small blocks and tiles."""
    monkeypatch.setattr(head_log_probs, "XLA_IDS", 96)
    monkeypatch.setattr(head_log_probs, "TPU_TOKENS", 128)
    monkeypatch.setattr(head_log_probs, "TPU_TILES", 20 * WIDTH * 256)


def inputs(vocabulary, dtype):
    rng = np.random.default_rng(0)
    y = jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), dtype)
    w = jnp.asarray(0.2 * rng.normal(size=(vocabulary, WIDTH)), dtype)
    targets = jnp.asarray(rng.integers(0, vocabulary, TOKENS))
    wanted = np.arange(TOKENS) < WANTED
    given = [jnp.asarray(rng.normal(size=TOKENS) * wanted, jnp.float32) for _ in range(2)]
    return y, w, targets, given


@pytest.mark.some(12)
@pytest.mark.parametrize(("cap", "vocab_dim"), [(None, 0), (5.0, 0), (5.0, 1)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_values_and_gradients_are_those_of_all_logits(kernel, vocabulary, dtype, cap, vocab_dim):
    """The matrix as [V, D] and as [D, V]."""
    scoring, (y, w, targets, given) = Scoring(0.8, cap), inputs(vocabulary, dtype)
    w = w.T if vocab_dim else w

    def all_logits(y, w):
        reference = HEAD_LOG_PROBS.implementations["xla"].run
        found = reference(y, w, targets, jnp.int32(WANTED), scoring, vocab_dim)
        return found.log_probs()[:WANTED], found.entropy()[:WANTED]

    def by_tiles(y, w):
        found = sums(kernel, y, w, targets, jnp.int32(WANTED), scoring, vocab_dim)
        slopes = Slopes(found.log_total(), found.entropy(), *given)
        ones = jnp.ones(w.shape, jnp.float32)
        args = y, w, targets, jnp.int32(WANTED), slopes, ones, scoring, vocab_dim
        for_y, for_w = gradients(kernel, *args)
        return found.log_probs()[:WANTED], found.entropy()[:WANTED], for_y, for_w - 1

    wide = y.astype(jnp.float32), w.astype(jnp.float32)
    expected, pull_back = jax.vjp(all_logits, *wide)
    *scores, for_y, for_w = jax.jit(by_tiles)(y, w)
    for found, other in zip(scores, expected, strict=True):
        np.testing.assert_allclose(found, other, rtol=0, atol=5e-6)  # the products are exact
    for found, other in zip(
        (for_y, for_w), pull_back(tuple(g[:WANTED] for g in given)), strict=True
    ):
        atol = TOLERANCE[dtype] * np.abs(other).max()
        np.testing.assert_allclose(found, other, rtol=0, atol=atol)
    assert not np.any(for_y[WANTED:])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_certain_token_and_two_equal_ones(kernel):
    """Logits 100 and 0: log p = -e^-100 = 0, H = 0. Of two equal ones log p = -ln 2, H = ln 2."""
    w = jnp.zeros((650, WIDTH)).at[:, 1].set(-1e4).at[jnp.array([7, 649]), 1].set(0)
    w = w.at[649, 0].set(100)
    y = jnp.zeros((TOKENS, WIDTH)).at[:, 1].set(1.0).at[0, 0].set(1.0)
    targets = jnp.full(TOKENS, 649)
    found = sums(kernel, y, w, targets, jnp.int32(2), Scoring(1.0, None))
    np.testing.assert_allclose(found.log_probs()[:2], [0, -np.log(2)], atol=1e-7)
    np.testing.assert_allclose(found.entropy()[:2], [0, np.log(2)], atol=1e-7)


def test_the_reference_is_the_softmax_of_all_logits():
    y, w, targets, _ = inputs(650, jnp.float32)
    found = HEAD_LOG_PROBS.implementations["xla"].run(y, w, targets, None, Scoring(0.5, 2.0))
    z = 2 * jnp.tanh(y @ w.T / 2) / 0.5
    np.testing.assert_allclose(found.log_probs(), token_log_probs(z, targets), atol=5e-6)
    np.testing.assert_allclose(found.entropy(), entropy(z), atol=5e-6)


@pytest.mark.parametrize(
    ("changes", "width", "need"),
    [
        ({}, 896, ""),
        ({"kind": "TPU v5 lite"}, 896, ""),
        ({"kind": "TPU v4"}, 896, "a TPU v5e or later, not TPU v4"),
        ({"dtype": jnp.dtype("float32")}, 896, "trainer.bf16=True"),
        ({}, 576, "a hidden_size that 128 divides, not 576"),
    ],
)
def test_what_the_tpu_kernel_misses_is_said(changes, width, need):
    model = TransformerConfig(
        vocab_size=100,
        hidden_size=width,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
    )
    facts = Facts("tpu", jnp.dtype("bfloat16"), model)._replace(**changes)
    choice = HEAD_LOG_PROBS.choose(facts)
    assert choice.name == ("tiles" if need else "pallas")
    assert choice.passed_over == ({"pallas": [need]} if need else {})
    assert HEAD_LOG_PROBS.choose(facts._replace(platform="cuda")).name == "tiles"
    assert HEAD_LOG_PROBS.choose(facts._replace(platform="cpu")).name == "xla"


def test_products_on_a_gpu_are_of_the_compute_dtype():
    """One in the forward pass; in the backward that again, and two of the logits' gradient."""
    y, w, targets, given = inputs(200, jnp.bfloat16)
    zeros = jnp.zeros(w.shape, jnp.float32)
    count, scoring = jnp.int32(WANTED), Scoring(1.0, None)

    def forward(y, w):
        return sums("tiles", y, w, targets, count, scoring)

    def backward(y, w):
        slopes = Slopes(*given, *given)
        return gradients("tiles", y, w, targets, count, slopes, zeros, scoring)

    for call, products in ((forward, 1), (backward, 3)):
        text = jax.jit(call).trace(y, w).lower(lowering_platforms=("cuda",)).as_text()
        found = re.findall(r"dot_general .*: \((.*)\) -> (.*)", text)
        assert len(found) == products
        assert all(x.count("xbf16>") == 2 and out.endswith("xf32>") for x, out in found)


@pytest.mark.parametrize(
    ("topology", "width", "vocab_dim"),
    [("v5e:2x2", 896, 0), ("v5e:2x2", 2048, 1), ("v5p:2x2x1", 5120, 0), ("v5p:2x2x1", 5120, 1)],
)
def test_the_tpu_compiler_takes_them(monkeypatch, topology, width, vocab_dim):
    """Their tiles fit in fast memory, and the gradient is added up where it lies."""
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    monkeypatch.undo()
    device = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    tokens, scoring = head_log_probs.block_tokens("pallas", 10_000, width), Scoring(0.8, None)
    shape = (width, 151_936) if vocab_dim else (151_936, width)
    y, w = array(jnp.bfloat16, tokens, width), array(jnp.bfloat16, *shape)
    targets, count = array(jnp.int32, tokens), array(jnp.int32)
    slopes = Slopes(*[array(jnp.float32, tokens)] * 4)
    total = array(jnp.float32, *w.shape)

    @jax.jit
    def forward(y, w, targets, count):
        return sums("pallas", y, w, targets, count, scoring, vocab_dim)

    def backward(y, w, targets, count, slopes, total):
        args = y, w, targets, count, slopes, total, scoring, vocab_dim
        return gradients("pallas", *args)

    forward.lower(y, w, targets, count).compile()
    lowered = jax.jit(backward, donate_argnums=5).lower(y, w, targets, count, slopes, total)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == 4 * 151_936 * width
    assert memory.temp_size_in_bytes <= 3 * 4 * tokens * width  # one for each core, and one layout


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_tpu_keeps_one_copy_of_the_matrix(monkeypatch, tied):
    """The cast one, which both passes read as it lies; the gradient is the result."""
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    monkeypatch.undo()
    placement = Placement(make_mesh(devices=topology_devices("v5e:2x2")[:1]))
    model = TransformerConfig(
        vocab_size=65_536,
        hidden_size=2048,
        intermediate_size=128,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=128,
        tie_embeddings=tied,
    )
    head = Head(model, 1.0, jnp.bfloat16, True, kernel="pallas")

    def array(dtype, shape, names):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.sharding(shape, names))

    shapes, axes = abstract_params(model), logical_axes(model)
    weights = {
        name: array(jnp.float32, shapes[name].shape, axes[name]) for name in head_axes(model)
    }
    hidden = array(jnp.bfloat16, (4, 1024, 2048), ("batch", None, None))
    tokens = array(jnp.int32, (4, 1024), ("batch", None))
    wanted = array(jnp.bool_, (4, 1024), ("batch", None))

    def loss(weights, hidden, tokens, wanted):
        found = score(head, weights, hidden, Targets(tokens, None), wanted, placement)
        return sum(x.sum() for x in found)

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(weights, hidden, tokens, wanted).compile()
    one = 2 * 65_536 * 2048  # 0.25 GiB; before, an untied one was also turned: 0.533 GiB
    assert one <= compiled.memory_analysis().temp_size_in_bytes <= 1.2 * one
