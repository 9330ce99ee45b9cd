"""Rows spread over devices: the order of their tokens, and that nothing depends on it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.trainer import CONTEXT_STRATEGIES
from jaxrl.data.packing import one_per_row
from jaxrl.models.attention import Segments, attention, causal_mask
from jaxrl.models.kernels.context_attention import context_attention, keys_received
from jaxrl.models.kernels.packed_attention import splash_near, splash_over
from jaxrl.models.lora import LoraConfig, select_modules
from jaxrl.models.transformer import init_params
from jaxrl.parallel import Placement, make_mesh
from jaxrl.parallel.context import order_of_places, row_length, split_rows
from jaxrl.tools.plan import hlo
from jaxrl.training.forward import state_values
from tests.training.test_router_losses import MIXED
from tests.training.test_router_replay import with_routes
from tests.training.test_update import (
    MODEL,
    ROWS,
    WIDTH,
    algorithm_with,
    assert_same,
    gradient,
    make_batch,
)

strategies = pytest.mark.parametrize("strategy", CONTEXT_STRATEGIES)


def test_each_device_has_a_piece_of_both_halves():
    assert order_of_places(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert [row_length(n, 2) for n in (7, 8, 9)] == [8, 8, 12]
    assert row_length(7, 1) == 7


def test_rows_know_where_their_tokens_went():
    """Two rows of 6 tokens, of which the second has 4, over 2 devices: rows of 8 places."""
    tokens = np.arange(12).reshape(2, 6)
    rows = one_per_row(tokens, np.array([6, 4]), np.ones((2, 6)))
    split = split_rows(rows, 2)
    assert split.tokens.tolist() == [[0, 1, 0, 0, 2, 3, 4, 5], [6, 7, 0, 0, 8, 9, 10, 11]]
    assert split.targets.tolist() == [[1, 2, 0, 0, 3, 4, 5, 0], [7, 8, 0, 0, 9, 10, 11, 0]]
    assert split.source.tolist() == [[0, 1, 4, 5, 6, 7], [8, 9, 12, 13, 14, 15]]
    np.testing.assert_array_equal(split.tokens.reshape(-1)[split.source], tokens)
    packed = rows.replace(source=np.array([[0, 1, 2, 12, 13, 14], [6, 7, 15, 16, 17, 18]]))
    moved = split_rows(packed, 2).source
    assert moved.tolist() == [[0, 1, 4, 16, 17, 18], [8, 9, 19, 20, 21, 22]]


ATTENTIONS = {
    "plain": MODEL,
    "windows": dataclasses.replace(MODEL, sliding_window=5, sliding_layers=(True, False)),
    "windows over 3 pieces": dataclasses.replace(
        MODEL, sliding_window=16, sliding_layers=(True, False)
    ),
    "softcap": dataclasses.replace(MODEL, attention_softcap=2.0),
}


LENGTH = 48
IDS = np.repeat([[1, 2, 3, 0], [1, 1, 2, 0]], 12, axis=1)


def drawn(*shapes):
    """Queries, keys and values, and cotangents of what comes out."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=s).astype(np.float32) for s in (*shapes, shapes[0])]


Q, K, V, G = drawn((2, LENGTH, 8, 8), (2, 4, LENGTH, 8), (2, 4, LENGTH, 8))


def with_gradient(run, g):
    return jax.jit(lambda q, k, v: (run(q, k, v), jax.vjp(run, q, k, v)[1](g)))


@functools.cache
def of_whole_rows(name):
    model = dataclasses.replace(ATTENTIONS[name], num_heads=8, num_kv_heads=4)
    mask = causal_mask(IDS)
    if model.sliding_window is not None:
        ahead = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
        mask &= ahead < model.sliding_window
    return jax.device_get(with_gradient(lambda *x: attention(model, *x, mask), G)(Q, K, V))


@pytest.mark.some(10)
@strategies
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("sizes", [{"context": 4}, {"context": 2, "tensor": 2, "data": 2}], ids=str)
def test_attention_and_its_gradient_are_those_of_whole_rows(strategy, name, sizes):
    model = dataclasses.replace(ATTENTIONS[name], num_heads=8, num_kv_heads=4)
    count = int(np.prod(list(sizes.values())))
    placement = Placement(make_mesh(devices=jax.devices()[:count], **sizes))
    order = order_of_places(LENGTH, sizes["context"])
    back = np.argsort(order)

    def spread(q, k, v):
        how = {"strategy": strategy, "kernel": "chunked", "placement": placement}
        given = q[:, order], k[:, :, order], v[:, :, order]
        segments = Segments(jnp.asarray(IDS[:, order]), name.startswith("windows"))
        return context_attention(model, *given, segments, **how)[:, back]

    expected, gradients = of_whole_rows(name)
    out, found = with_gradient(spread, G)(Q, K, V)
    real = IDS[:, :, None, None] > 0
    np.testing.assert_allclose(np.where(real, out, 0), np.where(real, expected, 0), atol=2e-6)
    for mine, other in zip(found, gradients, strict=True):
        np.testing.assert_allclose(mine, other, atol=5e-6)


@pytest.mark.parametrize("window", [None, 40])
def test_the_kernel_of_tpus_attends_over_devices(window):
    """Interpreted: splash attention with queries in parts, whose order its mask knows."""
    model = dataclasses.replace(MODEL, head_dim=64, sliding_window=window)
    length = 512
    q, k, v, g = drawn((2, length, 4, 64), (2, 2, length, 64), (2, 2, length, 64))
    ids = np.repeat([[1, 1, 2, 2], [1, 2, 3, 0]], 128, axis=1)
    mask = causal_mask(ids)
    if window is not None:
        mask &= np.arange(length)[:, None] - np.arange(length) < window
    placement = Placement(make_mesh(devices=jax.devices()[:4], context=2, tensor=2))
    order = order_of_places(length, 2)

    def spread(q, k, v):
        given = q[:, order], k[:, :, order], v[:, :, order]
        segments = Segments(jnp.asarray(ids[:, order]), window is not None)
        axes = None, "context", "tensor"
        how = {"order": order, "placement": placement, "axes": axes, "interpret": True}
        return splash_over(model, *given, segments, **how)[:, np.argsort(order)]

    real = (ids > 0)[:, :, None, None]
    expected, gradients = with_gradient(lambda *x: attention(model, *x, mask), g * real)(q, k, v)
    out, found = with_gradient(spread, g * real)(q, k, v)
    np.testing.assert_allclose(out * real, expected * real, atol=1e-5)
    for mine, other in zip(found, gradients, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


def test_the_kernel_of_tpus_attends_to_what_is_in_front():
    """Interpreted: 256 queries after 128 keys in front of them, of which the first row has none."""
    model = dataclasses.replace(MODEL, head_dim=64, sliding_window=100)
    q, k, v, g = drawn((2, 256, 4, 64), (2, 2, 384, 64), (2, 2, 384, 64))
    key_ids = np.repeat([[-1, 1, 1], [3, 3, 4]], 128, axis=1)
    ahead = np.arange(256)[:, None] + 128 - np.arange(384)
    mask = (ahead >= 0) & (ahead < 100) & (key_ids[:, 128:, None] == key_ids[:, None])

    expected, gradients = with_gradient(lambda *x: attention(model, *x, mask), g)(q, k, v)
    ids, key_ids = jnp.asarray(key_ids[:, 128:]), jnp.asarray(key_ids)
    near = functools.partial(splash_near, model, ids=ids, key_ids=key_ids, interpret=True)
    out, found = with_gradient(near, g)(q, k, v)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for mine, other in zip(found, gradients, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


@pytest.mark.parametrize("strategy", ["gather", "ring"])
def test_a_layer_that_slides_is_sent_what_its_window_holds(strategy):
    """Rows of 1,024 over 8 devices, in pieces of 64: a window of 101 looks back over two of them.

    In front of each of a device's two pieces are 100 keys; all others are 1,024 - 128. The layer
    has two branches, and what is sent in the one that slides are the 200 keys and their ids.
    """
    windows = None, 101, 448, 449, 450
    assert [keys_received(1024, 8, w) for w in windows] == [896, 200, 894, 896, 896]
    model = dataclasses.replace(MODEL, sliding_window=101, sliding_layers=(True, False))
    placement = Placement(make_mesh(context=8))
    how = {"strategy": strategy, "kernel": "chunked", "placement": placement}
    q, k = jnp.zeros((1, 1024, 4, 8)), jnp.zeros((1, 2, 1024, 8))
    ids = jnp.zeros((1, 1024), jnp.int32)

    def layer(q, k, v, ids):
        return context_attention(model, q, k, v, Segments(ids, True), **how)

    text = jax.jit(layer).lower(q, k, k, ids).compile().as_text()
    found = hlo.collectives(text)
    assert {one.kind for one in found} == {"collective-permute"}
    floats = [one for one in found if one.array.startswith("f32") and len(one.group) == 8]
    assert sum(one.moved for one in floats) == 2 * 200 * (2 * 8 * 4)  # 2 heads of 8 float32


@pytest.mark.parametrize("strategy", ["gather", "ring"])
def test_what_a_query_sees_is_not_kept_for_a_loop_of_layers(strategy):
    """It is the same in all of them: XLA would compute L^2 of it once, for every head."""
    placement = Placement(make_mesh(devices=jax.devices()[:2], context=2))
    ints = jnp.zeros((1, 2048), jnp.int32)
    q, k = jnp.zeros((1, 2048, 4, 8)), jnp.zeros((1, 2, 2048, 8))
    how = {"strategy": strategy, "kernel": "chunked", "placement": placement}

    @jax.checkpoint
    def layer(q, k, ids):
        return context_attention(MODEL, q, k, k, Segments(ids, False), **how)

    def temporaries(run):
        gradient = jax.jit(jax.grad(lambda q, k, ids: run(q, k, ids).sum(), (0, 1)))
        return gradient.lower(q, k, ints).compile().memory_analysis().temp_size_in_bytes

    def layers(q, k, ids):
        return jax.lax.scan(lambda x, _: (layer(x, k, ids), None), q, jnp.arange(4))[0]

    assert temporaries(layers) < 1.2 * temporaries(layer)


MESHES = [
    (("context", 2),),
    (("context", 8),),
    (("context", 2), ("fsdp", 2), ("tensor", 2)),
]
CUTS = [
    {"microbatch_rows": 4, "widths": (WIDTH,)},
    {"microbatch_rows": 4, "packed": True, "packed_length": 32},
]


def devices_of(sizes):
    return int(np.prod([size for _, size in sizes]))


def check(strategy, sizes, cut):
    algorithm, batch = algorithm_with(), make_batch()
    whole = gradient(algorithm, batch, microbatch_rows=ROWS)
    given = {"devices": devices_of(sizes), "sizes": sizes, "context": strategy}
    assert_same(gradient(algorithm, batch, **given, **cut), whole)


@pytest.mark.parametrize(("strategy", "mesh", "cut"), [("gather", 1, 0), ("ring", 2, 1)])
def test_the_gradient_does_not_depend_on_the_context_axis(strategy, mesh, cut):
    check(strategy, MESHES[mesh], CUTS[cut])


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS, ids=["padded", "packed"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("strategy", ["gather", "ring"])
def test_the_gradient_does_not_depend_on_the_context_axis_all(strategy, sizes, cut):
    check(strategy, sizes, cut)


WINDOWS = dataclasses.replace(MODEL, sliding_window=5, sliding_layers=(True, False))
KINDS = {
    "gspo": {"loss": "gspo"},
    "clip_cov": {"loss": "clip_cov"},
    "windows": {"model": WINDOWS, "context": "ring"},
    "windows, gathered": {"model": WINDOWS},
    "ulysses": {
        "model": dataclasses.replace(MODEL, num_kv_heads=4),
        "context": "ulysses",
        "kernel": "chunked",
    },
    "adapters": {"lora": LoraConfig(MODEL, select_modules(MODEL, [".*"]), rank=4, dropout=0.3)},
    "experts": {"model": MIXED, "replay": "forward", "loss": "regular"},
}


SLOW = "clip_cov", "windows, gathered", "ulysses", "adapters"  # the default run has the others


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in KINDS]
)
def test_every_kind_of_update_is_that_of_one_device(kind):
    given = dict(KINDS[kind])
    losses = {"router_balance_loss_coef": 0.3, "router_z_loss_coef": 0.02}
    mixed = given.get("model") is MIXED
    algorithm = algorithm_with(
        policy_loss_type=given.pop("loss", "regular"), **(losses if mixed else {})
    )
    batch = with_routes(make_batch()) if mixed else make_batch()
    over = ("expert", 2) if mixed else ("tensor", 2)
    how = {name: given.pop(name) for name in ("context", "kernel") if name in given}
    whole = gradient(algorithm, batch, microbatch_rows=ROWS, **given)
    sizes = (("context", 2), ("fsdp", 2), over)
    packed = {"packed": True, "packed_length": 32}
    cut = {"microbatch_rows": 4, "devices": 8, "sizes": sizes, **packed}
    assert_same(gradient(algorithm, batch, **given, **how, **cut), whole)


def test_a_critic_scores_states_as_on_one_device():
    batch, critic = make_batch(), dataclasses.replace(MODEL, value_head="score")
    rows = one_per_row(batch.tokens, batch.lengths, batch.loss_mask)
    params = init_params(critic, 0)
    (whole,) = jax.jit(functools.partial(state_values, critic, dtype=jnp.float32))(params, rows)
    placement = Placement(make_mesh(**{"context": 4, "fsdp": 2}))
    spread = jax.jit(
        functools.partial(state_values, critic, dtype=jnp.float32, placement=placement)
    )
    (found,) = spread(params, split_rows(rows, 4))
    np.testing.assert_allclose(found, whole, atol=1e-5)
