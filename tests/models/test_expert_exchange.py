"""Tokens that travel to experts on other devices: what is sent, and that none is left behind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.architecture import Experts
from jaxrl.models.expert_exchange import (
    ALL_TO_ALL,
    GATHER,
    Exchange,
    _places_of,
    _who_wants,
    exchange_of,
)
from jaxrl.models.experts import expert_mlp
from jaxrl.models.linear import LoraWeight
from jaxrl.parallel import Placement, make_mesh
from jaxrl.tools.plan import hlo
from tests.models.test_experts import PLAIN, assert_close, draw

QWEN3 = Experts(count=128, per_token=8, width=768)


def test_bytes_of_a_layer():
    """A device sends 1,024 places of 64 numbers to each of 3, and 2 ids with their weights.

    There 3 x 1024 x (64 x 2 + 2 x 8) bytes, back 3 x 1024 x 64 x 4; of gradients 3 x 1024 x (64 +
    64 + 2) x 4.
    """
    exchange = Exchange(ALL_TO_ALL, devices=4, places=1024)
    assert exchange.there(64, 2, 2) == 442_368
    assert exchange.back(64) == 786_432
    assert exchange.gradient(64, 2) == 1_597_440


@pytest.mark.parametrize(
    ("devices", "tokens", "way", "places"),
    [
        # 1 - C(112, 8) / C(128, 8) = 0.667: 1.25 x 0.667 x 4096 = 3424 of 4096 in eights
        (8, 4096, GATHER, 4096),
        # 1 - C(120, 8) / C(128, 8) = 0.412: 2112 of 4096
        (16, 4096, ALL_TO_ALL, 2112),
        # 1 - C(126, 8) / C(128, 8) = 0.122: 624 of 4096
        (64, 4096, ALL_TO_ALL, 624),
        # of 16 tokens 1.25 x 0.122 x 16 = 2.4, in eights: half, but no MiB of 63 x 8 x 4160 bytes
        (64, 8, GATHER, 8),
        (64, 16, ALL_TO_ALL, 8),
        (16, 16, GATHER, 16),
    ],
)
def test_the_rule(devices, tokens, way, places):
    """Of Qwen3-30B-A3B in bfloat16, 8 of 128 experts."""
    chosen = exchange_of(QWEN3, 2048, tokens, devices, size=2)
    assert chosen == Exchange(way, devices, places)
    assert exchange_of(QWEN3, 2048, tokens, devices, 2, GATHER) == (GATHER, devices, tokens)
    assert exchange_of(QWEN3, 2048, tokens, devices, 2, ALL_TO_ALL).way == ALL_TO_ALL


@pytest.mark.parametrize("load", ["even", "uneven", "one expert", "padding"])
def test_every_token_has_one_place_at_each_device_of_its_experts(load):
    """40 tokens, 3 of 12 experts on 4 devices, 8 places: a queue of 40 takes five rounds."""
    rng = np.random.default_rng(0)
    likely = np.ones(12) if load == "even" else np.array([9] * 3 + [1] * 9)
    ids = np.stack([rng.choice(12, 3, replace=False, p=likely / likely.sum()) for _ in range(40)])
    if load == "one expert":
        ids[:] = [5, 0, 4]
    if load == "padding":
        ids[10:] = 12  # which goes nowhere
    wanted = _who_wants(jnp.asarray(ids, jnp.int32), 4, 3)
    longest = int(np.asarray(wanted.upto)[:, -1].max())
    assert {"one expert": longest == 40, "padding": longest <= 10}.get(load, True)
    visits = np.zeros((40, 4), int)
    for number in range(-(-longest // 8)):
        token, of_token = map(np.asarray, _places_of(wanted, number, 8))
        taken = np.flatnonzero(token < 40)
        np.add.at(visits, (token[taken], taken // 8), 1)
        there = {(token[place], place) for place in taken}
        assert {(t, p) for t, row in enumerate(of_token) for p in row if p < 32} == there
    expected = (ids[:, :, None] // 3 == np.arange(4)).any(axis=1)
    np.testing.assert_array_equal(visits, expected)


ROWS, T = 64, 3
LOADS = ("even", "one expert", "the first rows", "padding")
PADDING = jnp.arange(T) == T - 1


def ids_of(load):
    """Of 8 experts two for each token: any, or the same for all, the first half, or padding."""
    rng = np.random.default_rng(1)
    ids = np.stack([rng.choice(8, 2, replace=False) for _ in range(ROWS * T)]).reshape(ROWS, T, 2)
    same = {"one expert": ROWS, "the first rows": ROWS // 2}.get(load, 0)
    ids[:same] = [6, 7]
    if load == "padding":
        ids[:, PADDING] = [6, 7]
    return jnp.asarray(ids, jnp.int32)


def with_gradients(**settings):
    """Output, routing and gradients of weights and rows, as a function of ids."""

    def loss(given, ids, real):
        how = {"replay": ids, "real": real, **settings}
        out, routing = expert_mlp(PLAIN, jax.nn.silu, *given, **how)
        out = jnp.where(real[..., None], out, 0)
        z = jnp.square(jax.nn.logsumexp(routing.logits, axis=-1)).sum()
        numbers = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (numbers * jnp.sin(out)).sum() + 0.1 * z, (out, routing)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def found(load):
        real = jnp.broadcast_to(~PADDING if load == "padding" else True, (ROWS, T))
        given = draw(PLAIN, rows=ROWS), ids_of(load), real
        (_, (out, routing)), (weights, y) = run(*given)
        return {"out": out, "weights": routing.weights, **weights, "y": y}

    return found


@functools.cache
def on_one_device():
    run = with_gradients()
    return {load: run(load) for load in LOADS}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "sizes",
    [{"expert": 8}, {"expert": 4, "fsdp": 2}, {"expert": 2, "tensor": 2, "fsdp": 2}],
    ids=str,
)
def test_value_and_gradients_are_those_of_one_device_whatever_the_load(sizes):
    """On (expert 4, fsdp 2) the first rows are those of one group: it alone has further rounds."""
    run = with_gradients(placement=Placement(make_mesh(**sizes)), exchange=ALL_TO_ALL)
    for load in LOADS:
        assert_close(run(load), on_one_device()[load])


def collectives_of(exchange, remat):
    """Bytes that a device sends in value and gradient of a layer, without further rounds."""
    placement = Placement(make_mesh(expert=8))
    weights, y = jax.eval_shape(functools.partial(draw, PLAIN, rows=ROWS))

    def layer(weights, y):
        how = {"placement": placement, "exchange": exchange}
        return expert_mlp(PLAIN, jax.nn.silu, weights, jnp.sin(y), **how)[0]

    run = jax.checkpoint(layer) if remat else layer

    def loss(weights, y):  # a loop keeps the compiler from merging what is computed twice
        y, _ = jax.lax.scan(lambda y, _: (run(weights, y), None), y, None, length=3)
        return jnp.sin(y).sum()

    text = jax.jit(jax.grad(loss, (0, 1))).lower(weights, y).compile().as_text()
    kinds = ("all-to-all",) if exchange == ALL_TO_ALL else ("all-gather", "reduce-scatter")
    found = hlo.collectives(text)
    return sum(x.moved * x.times for x in found if x.kind in kinds and "shard_map" in x.source)


@pytest.mark.some(2)
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("way", [GATHER, ALL_TO_ALL])
def test_the_compiler_sends_what_the_exchange_says(way, remat):
    """Three layers of 24 tokens on each of 8 devices, of which 8 find a place in a round."""
    exchange = exchange_of(PLAIN, 16, 24, 8, 4, way)
    assert exchange.places == {GATHER: 24, ALL_TO_ALL: 8}[way]
    there, back = exchange.there(16, 2, 4), exchange.back(16)
    expected = there * (1 + remat) + back + exchange.gradient(16, 2)
    assert collectives_of(way, remat) == 3 * expected


@pytest.mark.slow
def test_weights_under_adapters_have_no_gradient():
    """Only the adapters' own sums over rows are there: 8 x 12 and 4 x 16 numbers, not 16 x 12."""
    placement = Placement(make_mesh(expert=4, fsdp=2))
    weights, y = draw(PLAIN, rows=ROWS)
    rng = np.random.default_rng(2)
    adapters = {}
    for name in ("experts_gate", "experts_up", "experts_down"):
        e, rows, columns = weights[name].shape
        adapters[name] = tuple(
            jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32)
            for shape in ((e, rows, 4), (e, 4, columns))
        )

    def loss(adapters, y, ids, **settings):
        adapted = {
            name: LoraWeight(weights[name], *pair, scale=jnp.full(PLAIN.count, 2.0))
            for name, pair in adapters.items()
        }
        out, _ = expert_mlp(PLAIN, jax.nn.silu, weights | adapted, y, replay=ids, **settings)
        return jnp.sin(out).sum()

    given = adapters, y, ids_of("one expert")
    spread = functools.partial(loss, placement=placement, exchange=ALL_TO_ALL)
    expected = jax.jit(jax.grad(loss, (0, 1)))(*given)
    compiled = jax.jit(jax.grad(spread, (0, 1))).lower(*given).compile()
    found = compiled(*given)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(mine - other).max() <= 1e-5 * np.abs(other).max()
    lines = compiled.as_text().splitlines()
    outer = [line for line in lines if "ni,no->io" in line and " dot(" in line]
    shapes = {line.partition(" = ")[2].partition("{")[0] for line in outer}
    assert shapes == {"f32[16,4]", "f32[4,12]", "f32[12,4]", "f32[4,16]"}
