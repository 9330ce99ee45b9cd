"""Every remat policy gives the same gradient; what a policy keeps is what the compiler needs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.remat import REMAT_POLICIES
from jaxrl.models.transformer import TransformerConfig, forward, init_params

MODEL = TransformerConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=128,
    num_layers=6,  # more than MAX_UNROLLED_LAYERS: scanned
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
)


@functools.cache
def gradient(policy):
    """The gradient of the hidden states' squares, and its temporaries."""
    tokens = jnp.arange(4 * 64).reshape(4, 64) % 32
    positions = jnp.broadcast_to(jnp.arange(64), tokens.shape)

    def loss(params):
        hidden = forward(MODEL, params, tokens, positions, jnp.ones_like(tokens), remat=policy)
        return jnp.sum(jnp.square(hidden))

    params = init_params(MODEL, 0)
    compiled = jax.jit(jax.grad(loss)).lower(params).compile()
    return compiled(params), compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("policy", [name for name in REMAT_POLICIES if name != "none"])
def test_gradient_is_that_of_no_remat(policy):
    layers = [jax.tree.leaves(gradient(p)[0]["layers"]) for p in ("none", policy)]
    for a, b in zip(*layers, strict=True):
        assert float(jnp.max(jnp.abs(a))) > 0
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(a))))


def test_the_less_is_kept_the_smaller_the_temporaries():
    """Kept per layer of 256 tokens, float32, beside what one layer takes at its peak:

    full        x: 32 wide                                                 32 KiB
    attention   and 2 heads of 16                                     and  32 KiB
    dots        and q, k, v, o 32 + 16 + 16 + 32, gate, up, down 288  and 384 KiB
    none        and scores, probabilities, activations                more than all these
    """
    sizes = [gradient(policy)[1] for policy in ("full", "attention", "dots", "none")]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 4
    assert sizes[2] - sizes[0] > 6 * 128 * 1024
    assert sizes[3] - sizes[2] > 6 * 384 * 1024


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="remat='minimal' is unknown; choose one of .*'dots'"):
        forward(MODEL, {}, jnp.zeros((1, 4), int), *[jnp.zeros((1, 4), int)] * 2, remat="minimal")
