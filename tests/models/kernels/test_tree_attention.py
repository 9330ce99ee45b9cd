"""Attention over prefix trees in plain XLA, against the one with a mask [T, T]; the choice."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.attention import Intervals, attention
from jaxrl.models.kernels.choice import Facts
from jaxrl.models.kernels.tree_attention import (
    TREE_ATTENTION,
    blockwise,
    pairs_that_meet,
    tree_attention,
)
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel import Placement, make_mesh
from tests.models.kernels.test_tree_attention_tpu import FAR, draw, forest, sees

MODEL = TransformerConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
MODELS = {
    "plain": MODEL,
    "window": dataclasses.replace(MODEL, sliding_window=20, sliding_layers=(True,)),
    "cap and sinks": dataclasses.replace(MODEL, attention_softcap=3.0, attention_sinks=True),
}


@pytest.mark.parametrize("model", MODELS)
def test_it_is_the_attention_with_a_mask(model):
    """Values and gradients, of the sinks as well; 180 places are no whole number of blocks."""
    config = MODELS[model]
    q, k, v, ends, positions = draw(4)
    mask = sees(ends, positions, config.sliding_window or FAR)
    slope = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape), jnp.float32)
    given = q, k, v
    if config.attention_sinks:
        given += (jnp.array([0.5, -1.0, 2.0, 0.0]),)

    def formula(q, k, v, *sinks):
        return jnp.sum(slope * attention(config, q, k, v, mask, *sinks))

    def by_blocks(q, k, v, *sinks):
        tree = Intervals(ends, positions, True)
        return jnp.sum(slope * blockwise(config, q, k, v, tree, *sinks, block=16))

    numbers = tuple(range(len(given)))
    expected = jax.jit(jax.value_and_grad(formula, numbers))(*given)
    found = jax.jit(jax.value_and_grad(by_blocks, numbers))(*given)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_only_blocks_that_meet_are_computed():
    """A prompt of 64 tokens and four answers of 32, in blocks of 32.

    Of six blocks two are the prompt's, which meet in three pairs; each answer meets both and
    itself: 3 + 4 x 3 = 15 pairs of 21 that are not ahead. A window of 40 tokens ends the sight of
    the first block where the second ends: an answer meets two, itself and the one before it, less
    than 40 places: 3 + 4 x 2 = 11.
    """
    ends = np.array([[192] * 64 + [96] * 32 + [128] * 32 + [160] * 32 + [192] * 32])
    depth = np.array([[*range(64), *[*range(64, 96)] * 4]])
    for window, count in ((FAR, 15), (33, 11)):
        find = jax.jit(pairs_that_meet, static_argnums=3)
        pairs = find(jnp.asarray(ends), jnp.asarray(depth), jnp.int32(window), 32)
        assert int(pairs.number) == count
        met = set(zip(pairs.queries[:count].tolist(), pairs.keys[:count].tolist(), strict=True))
        own = {(1, 0), *((n, n) for n in range(6)), *((n, 1) for n in range(2, 6))}
        assert met == (own | {(n, 0) for n in range(2, 6)} if window == FAR else own)


def test_what_a_block_that_does_not_meet_holds_is_never_read():
    """Two trees of 64 tokens: NaN in the second changes nothing of the first."""
    rng = np.random.default_rng(0)
    shapes = (1, 128, 4, 16), *((1, 2, 128, 16),) * 2
    q, k, v = (jnp.asarray(rng.standard_normal(x), jnp.float32) for x in shapes)
    ends = jnp.array([[64] * 64 + [128] * 64])
    tree = Intervals(ends, jnp.tile(jnp.arange(64), 2)[None], False)
    run = jax.jit(functools.partial(blockwise, MODEL, block=32))
    whole = run(q, k, v, tree)
    first = np.arange(128)[:, None] < 64
    spoiled = run(q, *(np.where(first, x, np.float32(np.nan)) for x in (k, v)), tree)
    np.testing.assert_array_equal(np.asarray(whole)[:, :64], np.asarray(spoiled)[:, :64])


def test_no_array_has_all_pairs_of_tokens():
    t = 2048
    q, k = jnp.zeros((1, t, 4, 16)), jnp.zeros((1, 2, t, 16))
    tree = Intervals(jnp.full((1, t), t), jnp.arange(t)[None], False)
    gradient = jax.grad(lambda q: blockwise(MODEL, q, k, k, tree).sum())
    text = str(jax.make_jaxpr(gradient)(q))
    assert "2048,4" in text
    assert "2048,2048" not in text


def test_it_is_split_over_rows_and_heads():
    rng = np.random.default_rng(0)
    q, k, v, *_ = draw(4)
    rows = [forest(rng, 180, (0,), 180) for _ in range(2)]
    tree = Intervals(*(jnp.stack(x) for x in zip(*rows, strict=True)), False)
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    run = functools.partial(tree_attention, MODEL, placement=Placement(mesh))
    np.testing.assert_allclose(
        jax.jit(run)(q, k, v, tree),
        jax.jit(functools.partial(blockwise, MODEL))(q, k, v, tree),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("platform", "changes", "name"),
    [
        ("cpu", {}, "xla"),
        ("tpu", {"head_dim": 64}, "mosaic"),
        ("tpu", {"head_dim": 96}, "xla"),
        ("tpu", {"head_dim": 64, "attention_sinks": True}, "xla"),
        ("gpu", {"head_dim": 64}, "triton"),
        ("gpu", {"head_dim": 512}, "xla"),
    ],
)
def test_the_fastest_that_can_is_chosen(platform, changes, name):
    model = dataclasses.replace(MODEL, **changes)
    facts = Facts(platform, jnp.dtype(jnp.bfloat16), model)
    assert TREE_ATTENTION.choose(facts).name == name
