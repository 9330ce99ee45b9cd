"""Writes into the cache: by the TPU's ways, and over a mesh, as by a plain scatter."""

import functools
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import decode_kernels
from jaxrl.parallel import Placement, make_mesh
from jaxrl.rollout.native import kv_cache
from jaxrl.rollout.native.kv_cache import LayerCache

SLOTS, HEADS, WIDTH, LENGTH = 8, 2, 64, 256
MESHES = [{"data": 8}, {"data": 4, "tensor": 2}]


def filled(seed, slots=SLOTS):
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(slots, HEADS, WIDTH, LENGTH))
    return LayerCache(jnp.asarray(keys), jnp.asarray(rng.normal(size=keys.swapaxes(2, 3).shape)))


def tokens(seed, rows, number):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.normal(size=(rows, HEADS, number, WIDTH))) for _ in range(2))


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_the_kernel_writes_one_token_of_each_row(dtype):
    layer = jax.tree.map(lambda x: x.astype(dtype), filled(0))
    k, v = (x.astype(dtype) for x in tokens(1, SLOTS, 1))
    # the first, the edges of blocks of 128, the last; 256 and more are outside
    positions = jnp.array([0, 1, 127, 128, 200, 255, 256, 1000])
    expected = (np.array(x) for x in layer)
    expected = LayerCache(*expected)
    for row, position in enumerate(positions[:6]):
        expected.keys[row, :, :, position] = k[row, :, 0]
        expected.values[row, :, position] = v[row, :, 0]
    given = *layer, k[:, :, 0], v[:, :, 0], positions
    assert_same(LayerCache(*decode_kernels.tpu_write(*given, interpret=True)), expected)
    assert_same(kv_cache.write_tokens(layer, positions, k, v), expected)


def test_chunks_as_windows():
    layer, (k, v) = filled(0), tokens(1, 5, 64)
    slots = jnp.array([3, 0, 7, SLOTS, 2])  # the fourth is padding
    # two hang over the end: 256 - 64 = 192 is the last start that does not
    starts = jnp.array([0, 17, 200, 5, 255])
    expected = LayerCache(*(np.array(x) for x in layer))
    for row in (0, 1, 2, 4):
        span = slice(int(starts[row]), min(int(starts[row]) + 64, LENGTH))
        size = span.stop - span.start
        expected.keys[slots[row], :, :, span] = k[row, :, :size].swapaxes(1, 2)
        expected.values[slots[row], :, span] = v[row, :, :size]
    assert_same(jax.jit(kv_cache.write_windows)(layer, slots, starts, k, v), expected)
    assert_same(kv_cache.write_chunks(layer, slots, starts, k, v), expected)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_each_device_writes_its_slots(sizes):
    placement, layer = Placement(make_mesh(**sizes)), filled(0)
    names = "batch", "kv_heads", None, None
    spread = jax.device_put(layer, placement.sharding(layer.keys.shape, names))
    slots, starts = jnp.array([3, 0, 7, SLOTS, 2]), jnp.array([0, 17, 200, 5, 255])
    given = slots, starts, *tokens(1, 5, 64)
    write = jax.jit(functools.partial(kv_cache.write_chunks, placement=placement))
    assert_same(write(spread, *given), kv_cache.write_chunks(layer, *given))
    given = jnp.arange(0, 8 * 33, 33), *tokens(2, SLOTS, 1)
    write = jax.jit(functools.partial(kv_cache.write_tokens, placement=placement))
    assert_same(write(spread, *given), kv_cache.write_tokens(layer, *given))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_slots_are_copied_within_and_between_devices(sizes):
    placement = Placement(make_mesh(**sizes))
    cache = filled(0), filled(1)
    sharding = placement.sharding(cache[0].keys.shape, ("batch", "kv_heads", None, None))
    # a neighbour, another device, and the copy of a copy; the last pair is not asked for
    pairs = jnp.array([(0, 1), (1, 6), (6, 3), (4, 0)]).T
    expected = tuple(LayerCache(*(np.array(x) for x in layer)) for layer in cache)
    for layer in expected:
        for x in layer:
            x[1] = x[6] = x[3] = x[0]
    copy = jax.jit(functools.partial(kv_cache.copy_slots, placement=placement))
    assert_same(copy(jax.device_put(cache, sharding), *pairs, 3), expected)
    assert_same(jax.jit(kv_cache.copy_slots)(cache, *pairs, 3), expected)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_rows_are_read_from_their_slots(sizes):
    placement, layer = Placement(make_mesh(**sizes)), filled(0)
    names = "batch", "kv_heads", None, None
    spread = jax.device_put(layer, placement.sharding(layer.keys.shape, names))
    slots = jnp.array([3, 0, 7, SLOTS, 2, 5, 6, SLOTS])  # mostly of other devices; two are padding
    rows = np.array([0, 1, 2, 4, 5, 6])
    expected = LayerCache(
        np.asarray(layer.keys)[slots[rows]][..., :192],
        np.asarray(layer.values)[slots[rows]][:, :, :192],
    )
    take = functools.partial(kv_cache.take_rows, length=192)
    alone = jax.jit(take)(layer, slots)
    assert_same(jax.tree.map(lambda x: x[rows], alone), expected)
    apart = jax.jit(functools.partial(take, placement=placement))(spread, slots)
    assert_same(jax.tree.map(lambda x: np.asarray(x)[rows], apart), expected)


@pytest.mark.slow  # the TPU compiler
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("sizes", [{"data": 1}, *MESHES], ids=str)
def test_the_cache_of_a_tpu_is_written_in_place(sizes, turns):
    """No program needs as much as a copy of one layer beside the cache: 2 layers, bfloat16."""
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    devices = topology_devices("v5e:2x4")[: 8 if len(sizes) > 1 or sizes["data"] > 1 else 1]
    calls, layer = engine_calls(make_mesh(devices=devices, **sizes), turns)
    for name in ("prefill", "decode", "copy"):
        stats = calls[name].lower().compile().memory_analysis()
        assert stats.alias_size_in_bytes == 2 * layer
        assert stats.temp_size_in_bytes < layer / 2, name


def engine_calls(mesh, turns):
    """Programs over 64 slots of 4096 tokens on each device, and the bytes of a layer there."""
    from jaxrl.models.placement import placed_params
    from jaxrl.models.transformer import TransformerConfig
    from jaxrl.rollout.native.engine import NativeEngine
    from jaxrl.rollout.protocol import Request, Sampling

    model = TransformerConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
    )
    groups, heads = mesh.shape["data"], 2 // mesh.shape["tensor"]
    options = {"dtype": jnp.bfloat16, "max_num_seqs": 64 * groups, "device_memory": 1e12}
    engine = NativeEngine(model, mesh, max_model_len=4096, **options)
    sampling, over = Sampling(max_tokens=3072), (Future(),) * (turns > 1)
    params = placed_params(model, Placement(mesh))
    calls = engine.calls(params, [Request((0,) * 1024, ((0, 0),), sampling, None, over)])
    return calls, 2 * 64 * heads * 128 * 4096 * 2
