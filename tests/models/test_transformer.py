"""The forward by itself: packing, padding, causality, remat. Parity is in test_hf.py."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import (
    TransformerConfig,
    forward,
    init_params,
    logical_axes,
    param_specs,
    unembed,
)
from jaxrl.models.linear import add_bias, rounded
from jaxrl.models.transformer import (
    by_partitioner,
    embed,
    fuse_projections,
    is_spec,
    normalise,
    project_gate_up,
    project_qkv,
)

LLAMA = TransformerConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    initializer_range=0.3,
)
QWEN2 = dataclasses.replace(LLAMA, attention_bias=True, tie_embeddings=False)
QWEN3 = dataclasses.replace(LLAMA, qk_norm=True, head_dim=16)
EVERYTHING = dataclasses.replace(QWEN2, qk_norm=True)  # every parameter there is
CONFIGS = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}


@pytest.fixture(params=CONFIGS, name="config")
def config_fixture(request):
    return CONFIGS[request.param]


def random_params(config: TransformerConfig) -> dict:
    """Random matrices, norms around 1 and biases around 0, none of them the identity."""
    rng = np.random.default_rng(0)
    center = {"normal": 0.0, "ones": 1.0, "zeros": 0.0}
    return jax.tree.map(
        lambda spec: jnp.asarray(rng.normal(center[spec.init], 0.3, spec.shape), jnp.float32),
        param_specs(config),
        is_leaf=is_spec,
    )


def tokens_of(config: TransformerConfig, shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, shape))


@partial(jax.jit, static_argnums=0, static_argnames=("dtype", "remat"))
def logits_of(config, params, tokens, positions, segment_ids, **options):
    hidden = forward(config, params, tokens, positions, segment_ids, **options)
    return unembed(config, params, hidden)


def alone(config, params, tokens):
    """Logits [T, V] of one unpadded sequence [T]."""
    positions = jnp.arange(tokens.shape[0])[None]
    return logits_of(config, params, tokens[None], positions, jnp.ones_like(positions))[0]


def test_init_params_has_the_shapes_of_param_specs(config):
    params = init_params(config, 0)
    specs = param_specs(config)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        lambda s: s.shape, specs, is_leaf=is_spec
    )
    axes_per_dim = jax.tree.map(lambda s: len(s.axes) == len(s.shape), specs, is_leaf=is_spec)
    assert all(jax.tree.leaves(axes_per_dim))
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    assert jax.tree.structure(logical_axes(config), is_leaf=is_axes) == jax.tree.structure(params)
    # 3 * 32 * 4 * 8 = 3072 values: the standard error of their deviation is 0.3 / sqrt(2 * 3072).
    assert float(jnp.std(params["layers"]["wq"])) == pytest.approx(0.3, abs=0.015)
    assert np.all(np.asarray(params["final_norm"]) == 1)


def test_number_of_parameters_of_the_quickstart_model():
    config = TransformerConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )
    # embed 32*64; per layer q and o 2*64*64, k and v 2*64*32, mlp 3*64*128, norms 2*64; norm 64.
    expected = 2048 + 2 * (8192 + 4096 + 24576 + 128) + 64
    sizes = jax.tree.map(lambda s: int(np.prod(s.shape)), param_specs(config), is_leaf=is_spec)
    assert sum(jax.tree.leaves(sizes)) == expected == 76096


def test_packed_and_padded_rows_give_the_logits_of_each_sequence_alone(config):
    params = random_params(config)
    a, b, junk = tokens_of(config, (3, 6), seed=1)
    # Row 0: a, b, padding made of real token ids; row 1: b, then padding.
    tokens = jnp.stack([jnp.concatenate([a, b, junk]), jnp.concatenate([b, junk, junk])])
    positions = jnp.array([[*range(6), *range(6), *[0] * 6], [*range(6), *[0] * 12]])
    segment_ids = jnp.array([[1] * 6 + [2] * 6 + [0] * 6, [1] * 6 + [0] * 12])
    packed = logits_of(config, params, tokens, positions, segment_ids)
    a_alone, b_alone = alone(config, params, a), alone(config, params, b)
    assert np.std(a_alone) > 0.5  # else the tolerance would mean little
    np.testing.assert_allclose(packed[0, :6], a_alone, atol=2e-5)
    np.testing.assert_allclose(packed[0, 6:12], b_alone, atol=2e-5)
    np.testing.assert_allclose(packed[1, :6], b_alone, atol=2e-5)
    assert np.all(np.isfinite(packed))


def test_a_token_changes_no_earlier_logits(config):
    params = random_params(config)
    tokens = tokens_of(config, (9,))
    changed = tokens.at[5].set((tokens[5] + 1) % config.vocab_size)
    before, after = alone(config, params, tokens), alone(config, params, changed)
    np.testing.assert_array_equal(before[:5], after[:5])
    assert np.all(np.max(np.abs(before[5:] - after[5:]), axis=-1) > 1e-3)


def test_logits_depend_on_relative_positions_only(config):
    params = random_params(config)
    tokens = tokens_of(config, (1, 9))
    positions, segment_ids = jnp.arange(9)[None], jnp.ones((1, 9), int)
    base = logits_of(config, params, tokens, positions, segment_ids)
    shifted = logits_of(config, params, tokens, positions + 100, segment_ids)
    stretched = logits_of(config, params, tokens, positions * 3, segment_ids)
    np.testing.assert_allclose(base, shifted, atol=5e-4)
    assert float(jnp.max(jnp.abs(base - stretched))) > 0.05


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_fused_projections_are_the_projections(shards):
    layer = jax.tree.map(lambda x: x[0], random_params(EVERYTHING)["layers"])
    y = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 32)), jnp.float32)
    work = by_partitioner(None)._replace(shards=shards)
    found, expected = (
        [
            *project_qkv(EVERYTHING, weights, y, work),
            *project_gate_up(EVERYTHING, weights, y, work),
        ]
        for weights in (fuse_projections(layer, shards), layer)
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_shard_of_a_fused_matrix_has_its_part_of_each():
    # columns 0 to 3 of gate, 10 to 13 of up; heads 0 to 3, then two of keys and two of values
    layer = {
        "w_gate": jnp.arange(4.0)[None],
        "w_up": 10 + jnp.arange(4.0)[None],
        "wq": jnp.arange(4.0).reshape(1, 4, 1),
        "wk": 10 + jnp.arange(2.0).reshape(1, 2, 1),
        "wv": 20 + jnp.arange(2.0).reshape(1, 2, 1),
    }
    fused = fuse_projections(layer, 2)
    assert fused["w_gate_up"].ravel().tolist() == [0, 1, 10, 11, 2, 3, 12, 13]
    assert fused["wqkv"].ravel().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    # 4 devices do not divide 2 heads
    assert set(fuse_projections(layer, 4)) == {"w_gate_up", "wq", "wk", "wv"}


def test_bfloat16_compute_keeps_float32_logits_near_the_float32_ones():
    config = EVERYTHING
    params = random_params(config)
    tokens, positions = tokens_of(config, (2, 9)), jnp.tile(jnp.arange(9), (2, 1))
    hidden = forward(config, params, tokens, positions, jnp.ones_like(tokens), dtype=jnp.bfloat16)
    assert hidden.dtype == jnp.bfloat16
    low = unembed(config, params, hidden)
    full = logits_of(config, params, tokens, positions, jnp.ones_like(tokens))
    assert low.dtype == jnp.float32
    assert float(jnp.corrcoef(low.ravel(), full.ravel())[0, 1]) > 0.999


# ---------------------------------------------------------------- bfloat16


def test_the_norm_multiplies_by_its_scale_before_it_rounds():
    """x = [1, 3] has the mean square 5: 3 / sqrt(5) * 1.0625 = 1.42549, and bfloat16 has steps of
    1/128 there: 182.46 -> 182. Rounded first, 3 / sqrt(5) = 1.34164 is 1.34375 (172 / 128), and
    1.34375 * 1.0625 = 182.75 / 128 would be 183.
    """
    config = dataclasses.replace(LLAMA, rms_norm_eps=0.0)
    x, scale = jnp.array([1, 3], jnp.bfloat16), jnp.full(2, 1.0625, jnp.bfloat16)
    assert normalise(x, scale, config)[1] == 182 / 128
    unit = dataclasses.replace(config, unit_offset_norm=True)
    assert normalise(x, scale - 1, unit)[1] == 182 / 128


def test_embeddings_are_scaled_in_the_compute_dtype():
    """sqrt(32) is 181.02 / 32, in bfloat16 181 / 32: 163 / 128 times it is 230.49 / 32 -> 230 / 32.
    Times 181.02 / 32 it would be 230.52 / 32, and 231 / 32.
    """
    config = dataclasses.replace(LLAMA, scale_embeddings=True)
    x = embed(config, {"embed": jnp.full((61, 32), 163 / 128)}, jnp.array([[5]]), jnp.bfloat16)
    assert x.dtype == jnp.bfloat16
    assert np.all(np.asarray(x) == 230 / 32)


def test_a_bias_is_rounded_before_it_is_added():
    """1 + 1/256 is 1 in bfloat16. It has steps of 2 above 256: 257 -> 256, but 257.004 -> 258."""
    assert add_bias(jnp.array([[256]], jnp.bfloat16), jnp.array([1 + 1 / 256])) == 256


def test_gradients_of_norms_and_biases_are_summed_in_float32():
    """Summed in bfloat16, over tokens or devices, each of them would be a number of bfloat16."""
    config = dataclasses.replace(EVERYTHING, attention_output_bias=True, post_norms=True)
    params = random_params(config)
    tokens = tokens_of(config, (4, 16))

    def loss(params):
        given = tokens, jnp.arange(16) + 0 * tokens, 1 + 0 * tokens
        return jnp.sum(jnp.square(forward(config, params, *given, dtype=jnp.bfloat16)))

    gradients = jax.jit(jax.grad(loss))(params)["layers"]
    vectors = {n: g for n, g in gradients.items() if "norm" in n or n in ("bq", "bk", "bv", "bo")}
    assert len(vectors) == 10
    for name, gradient in vectors.items():
        narrow = gradient.astype(jnp.bfloat16).astype(jnp.float32)
        assert gradient.dtype == jnp.float32
        assert np.mean(np.asarray(gradient == narrow)) < 0.1, name


def test_a_rounded_parameter_has_the_values_of_the_other_dtype_and_its_own_gradient():
    w = jnp.array([1.00390625, 1.001, -3.14159265, 0.0, 65504.0, 1e-30])  # 1 + 1/256: a tie
    narrow = w.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(rounded(w, jnp.bfloat16), narrow)
    assert rounded(w, jnp.float32) is w
    slope = jax.grad(lambda w: jnp.sum(rounded(w, jnp.bfloat16) * 1.001))(w)
    np.testing.assert_array_equal(slope, np.full(6, np.float32(1.001)))
