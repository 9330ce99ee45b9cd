"""Adapters of many models: gradients of the API's losses, updates, and no bit of one of another."""

import functools
from itertools import zip_longest

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.models.lora import LoraConfig, abstract_params_of_lora, attach, select_modules
from jaxrl.parallel import Placement, ShardingRules, make_mesh
from jaxrl.tools.tinker.losses import LOSSES
from jaxrl.tools.tinker.tenants import Adam, Tenants, new_tenant
from jaxrl.tools.tinker.tiles import Datum, cut, read, row_lengths
from jaxrl.training.forward import log_probs_and_entropy
from jaxrl.types import ModelRows
from tests.rollout.test_native import LLAMA, random_params

LORA = LoraConfig(LLAMA, select_modules(LLAMA, "all-linear"), rank=8, alpha=8)
NAMES = set(abstract_params_of_lora(LORA))
FORWARD = functools.partial(log_probs_and_entropy, LLAMA, temperature=1.0, dtype=jnp.float32)


@functools.cache
def tenants(devices=1):
    placement = Placement(make_mesh(devices=jax.devices()[:devices]), ShardingRules())
    return Tenants(FORWARD, random_params(LLAMA), LORA, placement, 4)


def model(seed, rank=8, chosen=NAMES):
    """A model that is not new: both sides of its adapters are drawn."""
    new, rng = new_tenant(LORA, seed, rank, 32.0, chosen), np.random.default_rng(seed)
    drawn = {
        name: {
            "a": pair["a"],
            "b": 0.05 * rng.standard_normal(pair["b"].shape, np.float32) * (pair["a"].any()),
        }
        for name, pair in new.adapters.items()
    }
    return new.replace(adapters=drawn)


def data(number, seed=0):
    rng, found = np.random.default_rng(seed), []
    for _ in range(number):
        length = int(rng.integers(2, 40))
        tokens = rng.integers(0, LLAMA.vocab_size, length + 1).astype(np.int32)
        inputs = {
            "weights": rng.standard_normal(length),
            "logprobs": -4 + rng.standard_normal(length),
            "advantages": rng.standard_normal(length),
        }
        inputs = {name: x.astype(np.float32) for name, x in inputs.items()}
        found.append(Datum(tokens[:-1], tokens[1:], inputs))
    return found


def tiles_of(data, loss="cross_entropy", slot=0, **settings):
    of_loss = [d._replace(inputs={n: d.inputs[n] for n in LOSSES[loss].inputs}) for d in data]
    rows = tenants().rows
    return cut(of_loss, loss, settings, slot=slot, rows=rows, full=64)


@jax.jit  # once for all losses
def through_adapters(adapters, scale, rows, slopes):
    """The log-probs of a row, and the gradient of what has these slopes in them."""

    def log_probs(adapters):
        scaled = {n: {"a": w["a"], "b": w["b"] * scale} for n, w in adapters.items()}
        params = attach(LORA, random_params(LLAMA), scaled)
        return FORWARD(params, rows, with_entropy=False)[0][0, 1:]

    x, back = jax.vjp(log_probs, adapters)
    return x, back(slopes)[0]


def straight(loss, data, one, **settings):
    """The loss of each datum in a row of its own, by its formula, and its gradient."""

    @jax.jit  # of one shape: rows are padded
    @jax.value_and_grad
    def of_log_probs(x, wanted, inputs):
        return jnp.where(wanted, of_tokens(loss, x, inputs, **settings), 0).sum()

    def padded(x, width):
        return np.append(x, np.zeros(width - len(x), x.dtype))

    found = []
    for d in data:
        tokens, targets = (padded(x, 41)[None] for x in (d.tokens, d.targets))
        positions = np.arange(41)[None]
        wanted = positions < len(d.tokens)
        segments = (positions <= len(d.tokens)).astype(np.int32)
        rows = ModelRows(tokens, positions, segments, targets, wanted)
        inputs = {n: padded(x, 40) for n, x in d.inputs.items()}
        x, _ = through_adapters(one.adapters, one.scale, rows, np.zeros(40, np.float32))
        value, slopes = of_log_probs(x, wanted[0, :-1], inputs)
        found.append((value, through_adapters(one.adapters, one.scale, rows, slopes)[1]))
    return jax.tree.map(lambda *x: sum(x), *found)


def of_tokens(loss, x, inputs, low=0.8, high=1.2, beta=0.05):
    weights, q, a = (inputs[name] for name in ("weights", "logprobs", "advantages"))
    ratio = jnp.exp(x - q)
    clipped = jnp.clip(ratio, low, high)
    return {
        "cross_entropy": -weights * x,
        "importance_sampling": -ratio * a,
        "ppo": -jnp.minimum(ratio * a, clipped * a),
        "cispo": -jax.lax.stop_gradient(clipped) * a * x,
        "dro": -(x * a - 0.5 * beta * (x - q) ** 2),
    }[loss]


SETTINGS = {
    "ppo": ({"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}, {"low": 0.5, "high": 3.0}),
    "cispo": ({"clip_high_threshold": 2.0}, {"high": 2.0}),
    "dro": ({"beta": 0.3}, {"beta": 0.3}),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_and_its_gradient_are_those_of_the_formula(loss):
    named, plain = SETTINGS.get(loss, ({}, {}))
    one, given = model(1), data(5)
    tenants().put(1, one)
    tiles, places = tiles_of(given, loss, 1, **named)
    log_probs, losses = tenants().run(tiles, learns=True)
    value, slopes = straight(loss, given, one, **plain)
    assert sum(x.sum() for x in losses) == pytest.approx(float(value), rel=1e-5)
    assert [len(x) for x in read(places, log_probs)] == [len(d.tokens) for d in given]
    found = tenants().take(1).gradients
    for name, pair in slopes.items():
        for side, slope in pair.items():
            largest = np.abs(slope).max()
            np.testing.assert_allclose(found[name][side], slope, atol=1e-5 * largest, rtol=0)
            assert largest > 0


def test_a_forward_alone_gives_the_same_numbers_and_no_gradient():
    tenants().put(0, model(2))
    tiles, _ = tiles_of(data(4))
    alone = tenants().run(tiles, learns=False)
    assert not any(x.any() for x in jax.tree.leaves(tenants().take(0).gradients))
    both = tenants().run(tiles, learns=True)
    for found, same in zip(alone, both, strict=True):
        for x, y in zip(found, same, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)


def learnt(slot, seed, others=()):
    """A model after two calls and updates, its tiles among those of others: all its numbers."""
    tenants().put(slot, model(seed, rank=4 if seed % 2 else 8))
    found = []
    for step in range(2):
        mine, places = tiles_of(data(7, seed=10 * seed + step), "ppo", slot)
        theirs = [tiles_of(data(5, seed=step), "dro", other)[0] for other in others]
        mixed = [tile for some in zip_longest(mine, *theirs) for tile in some if tile is not None]
        log_probs, losses = tenants().run(mixed, learns=True)
        where = [n for n, tile in enumerate(mixed) if any(tile is own for own in mine)]
        for numbers in (log_probs, losses):
            found += read(places, [numbers[n] for n in where])
        found.append(tenants().update(slot, Adam(1e-2, weight_decay=0.1, grad_clip_norm=1.0)))
    return found, tenants().take(slot)


def test_no_bit_of_a_model_depends_on_others_or_on_its_place():
    for slot in range(4):
        tenants().put(slot, model(20 + slot))
    alone, state = learnt(0, 3)
    for slot, others in ((0, (1, 2, 3)), (3, (0,)), (2, ())):
        found, same = learnt(slot, 3, others)
        jax.tree.map(np.testing.assert_array_equal, (alone, state), (found, same))


def test_an_update_is_that_of_adamw():
    one = model(4)
    tenants().put(2, one)
    adam = Adam(3e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2, grad_clip_norm=0.5)
    plain = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(3e-3, 0.8, 0.9, 1e-6, weight_decay=0.2)
    )
    expected, state = one.adapters, jax.jit(plain.init)(one.adapters)

    @jax.jit
    def plain_update(slopes, state, expected):
        updates, state = plain.update(slopes, state, expected)
        return optax.tree.norm(slopes), optax.apply_updates(expected, updates), state

    for step in range(3):
        tenants().run(tiles_of(data(3, seed=step), slot=2)[0], learns=True)
        slopes = tenants().take(2).gradients
        found = tenants().update(2, adam)
        norm, expected, state = plain_update(slopes, state, expected)
        assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
    after = tenants().take(2)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), after.adapters, expected)
    assert int(after.count) == 3
    assert not any(x.any() for x in jax.tree.leaves(after.gradients))


def test_a_gradient_that_is_not_finite_changes_nothing():
    tenants().put(1, model(5))
    (bad,) = data(1)
    bad.inputs["weights"][0] = np.float32(np.inf)
    tenants().run(tiles_of([bad], slot=1)[0], learns=True)
    assert tenants().update(1, Adam())["skipped_updates"] == 1
    after = tenants().take(1)
    jax.tree.map(np.testing.assert_array_equal, after.adapters, model(5).adapters)
    assert int(after.count) == 0


def test_what_is_beyond_a_rank_and_what_is_not_trained_stay_0():
    chosen = {name for name in NAMES if name in ("wq", "w_up")}
    tenants().put(3, new_tenant(LORA, 6, 4, 32.0, chosen))
    for step in range(2):
        tenants().run(tiles_of(data(3, seed=step), slot=3)[0], learns=True)
        tenants().update(3, Adam(1e-2, weight_decay=0.1))
    for name, pair in tenants().take(3).adapters.items():
        assert pair["a"].any() == pair["b"].any() == (name in chosen)
        assert not pair["a"][..., 4:].any()
        assert not pair["b"][:, 4:].any()


def test_rows_have_few_lengths_and_hold_what_they_must():
    assert row_lengths(500) == [64, 96, 128, 192, 256, 384, 512]
    rng = np.random.default_rng(0)
    for longest in (1, 30, 63, 64, 200):
        lengths = [longest, *rng.integers(1, longest + 1, 20).tolist()]
        some = [Datum(np.arange(n), np.arange(n), {}) for n in lengths]
        tiles, places = cut(some, "cross_entropy", {}, slot=0, rows=2, full=96)
        assert {t.tokens.shape for t in tiles} == {(2, tiles[0].tokens.shape[1])}
        assert tiles[0].tokens.shape[1] in row_lengths(200)
        assert not any(t.segment_ids[:, -1].any() for t in tiles)
        for n, found in zip(lengths, read(places, [t.tokens for t in tiles]), strict=True):
            np.testing.assert_array_equal(found, np.arange(n))


def test_a_model_may_be_spread_over_devices():
    spread = tenants(devices=4)
    spread.put(0, model(7))
    given = data(6)
    of_loss = [d._replace(inputs={"weights": d.inputs["weights"]}) for d in given]
    tiles, places = cut(of_loss, "cross_entropy", {}, slot=0, rows=spread.rows, full=64)
    log_probs, _ = spread.run(tiles, learns=True)
    value, slopes = straight("cross_entropy", given, model(7))
    total = 0.0
    for x, d in zip(read(places, log_probs), given, strict=True):
        total -= float(x @ d.inputs["weights"])
    assert total == pytest.approx(float(value), rel=1e-5)
    found = spread.take(0).gradients
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max()), found, slopes
    )
