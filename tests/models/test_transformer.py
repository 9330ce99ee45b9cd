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
from jaxrl.models.transformer import is_spec

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
