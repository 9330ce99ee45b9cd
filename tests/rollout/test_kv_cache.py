"""Writes into the cache: by the TPU's ways, and over a mesh, as by a plain scatter."""

import dataclasses
import functools
import itertools
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.kernels import decode_kernels
from jaxrl.parallel import Placement, make_mesh
from jaxrl.rollout.native import kv_cache
from jaxrl.rollout.native.kv_cache import LayerCache

SLOTS, HEADS, WIDTH, LENGTH = 8, 2, 64, 256
MESHES = [{"data": 8}, {"data": 4, "tensor": 2}]


# a CPU's, and a TPU's for heads of 128
LAYOUTS = pytest.mark.parametrize("transposed", [True, False], ids=["columns", "lines"])


def filled(seed, transposed=True):
    rng = np.random.default_rng(seed)
    keys, values = rng.normal(size=(2, SLOTS, HEADS, LENGTH, WIDTH))
    return LayerCache(*map(jnp.asarray, (laid_out(keys, transposed), values)), transposed)


def laid_out(keys, transposed):
    return keys.swapaxes(2, 3) if transposed else keys


def on_host(layer):
    """Copies of keys and values to write into, [S, K, L, h]; of the keys a view."""
    layer = jax.tree.map(np.array, layer)
    return layer, *layer.by_position()


def tokens(seed, rows, number):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.normal(size=(rows, HEADS, number, WIDTH))) for _ in range(2))


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@LAYOUTS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_the_kernel_writes_one_token_of_each_row(dtype, transposed):
    layer = jax.tree.map(lambda x: x.astype(dtype), filled(0, transposed))
    k, v = (x.astype(dtype) for x in tokens(1, SLOTS, 1))
    # the first, the edges of tiles and of blocks of 128, the last; 256 and more are outside
    positions = jnp.array([0, 15, 127, 128, 200, 255, 256, 1000])
    expected, keys, values = on_host(layer)
    for row, position in enumerate(positions[:6]):
        keys[row, :, position] = k[row, :, 0]
        values[row, :, position] = v[row, :, 0]
    given = layer.keys, layer.values, k[:, :, 0], v[:, :, 0], positions
    written = decode_kernels.tpu_write(*given, transposed=transposed, interpret=True)
    assert_same(LayerCache(*written, transposed), expected)
    assert_same(kv_cache.write_tokens(layer, positions, k, v), expected)


@pytest.mark.parametrize(("kernel", "calls"), [(None, True), ("pallas", True), ("xla", False)])
def test_tokens_are_written_by_a_kernel_where_they_are_read_by_one(kernel, calls):
    """Lowered for a TPU; nothing runs."""
    write = jax.jit(functools.partial(kv_cache.write_tokens, kernel=kernel))
    given = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (filled(0), *tokens(1, SLOTS, 1)))
    layer, k, v = given
    program = write.trace(layer, jnp.zeros(SLOTS, jnp.int32), k, v)
    text = program.lower(lowering_platforms=("tpu",)).as_text()
    assert ("tpu_custom_call" in text) == calls


@LAYOUTS
def test_chunks_as_windows(transposed):
    layer, (k, v) = filled(0, transposed), tokens(1, 5, 64)
    slots = jnp.array([3, 0, 7, SLOTS, 2])  # the fourth is padding
    # two hang over the end: 256 - 64 = 192 is the last start that does not
    starts = jnp.array([0, 17, 200, 5, 255])
    expected, keys, values = on_host(layer)
    for row in (0, 1, 2, 4):
        span = slice(int(starts[row]), min(int(starts[row]) + 64, LENGTH))
        size = span.stop - span.start
        keys[slots[row], :, span] = k[row, :, :size]
        values[slots[row], :, span] = v[row, :, :size]
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
    expected = jax.tree.map(np.array, cache)
    for x in jax.tree.leaves(expected):
        x[1] = x[6] = x[3] = x[0]
    copy = jax.jit(functools.partial(kv_cache.copy_slots, placement=placement))
    assert_same(copy(jax.device_put(cache, sharding), *pairs, 3), expected)
    assert_same(jax.jit(kv_cache.copy_slots)(cache, *pairs, 3), expected)


@LAYOUTS
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_rows_are_read_from_their_slots(sizes, transposed):
    placement, layer = Placement(make_mesh(**sizes)), filled(0, transposed)
    names = "batch", "kv_heads", None, None
    spread = jax.device_put(layer, placement.sharding(layer.keys.shape, names))
    slots = jnp.array([3, 0, 7, SLOTS, 2, 5, 6, SLOTS])  # mostly of other devices; two are padding
    rows = np.array([0, 1, 2, 4, 5, 6])
    _, keys, values = on_host(layer)
    keys, values = (x[slots[rows]][:, :, :192] for x in (keys, values))
    expected = LayerCache(laid_out(keys, transposed), values, transposed)
    take = functools.partial(kv_cache.take_rows, length=192)
    alone = jax.jit(take)(layer, slots)
    assert_same(jax.tree.map(lambda x: x[rows], alone), expected)
    apart = jax.jit(functools.partial(take, placement=placement))(spread, slots)
    assert_same(jax.tree.map(lambda x: np.asarray(x)[rows], apart), expected)


@LAYOUTS
def test_a_layer_is_lengthened_and_some_slots_taken_and_put_back(transposed):
    layer = filled(0, transposed)
    (longer,) = kv_cache.lengthen((layer,), LENGTH + 64)
    _, *arrays = on_host(longer)
    for found, expected in zip(arrays, layer.by_position(), strict=True):
        np.testing.assert_array_equal(found[:, :, :LENGTH], expected)
        assert found.shape[2] == LENGTH + 64 and not found[:, :, LENGTH:].any()
    slots = jnp.array([5, 2])
    (part,) = kv_cache.take_slots((layer,), slots, 96)
    for found, whole in zip(part.by_position(), layer.by_position(), strict=True):
        np.testing.assert_array_equal(found, whole[slots, :, :96])
    (back,) = kv_cache.put_slots((layer,), slots, (jax.tree.map(jnp.negative, part),), 96)
    for found, whole in zip(back.by_position(), layer.by_position(), strict=True):
        expected = whole.at[slots, :, :96].multiply(-1)
        np.testing.assert_array_equal(found, expected)


def test_keys_lie_as_values_where_a_token_is_a_tile_of_its_own():
    from tests.rollout.test_native import LLAMA

    wide = dataclasses.replace(LLAMA, head_dim=128)
    shapes = {}
    for model, platform in itertools.product((LLAMA, wide), ("cpu", "gpu", "tpu")):
        (layer, *_) = kv_cache.empty_cache(model, 2, 192, jnp.float32, platform)
        shapes[model.head_dim, platform] = layer.keys.shape[2:]
        assert layer.values.shape[2:] == (192, model.head_dim)
    narrow = LLAMA.head_dim
    assert shapes.pop((128, "tpu")) == (192, 128)
    for width in (narrow, 128):
        assert shapes.pop((width, "gpu")) == (192, width)
    assert shapes == {(w, p): (w, 192) for w, p in shapes} and (narrow, "tpu") in shapes


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


def test_a_block_of_a_tpu_moves_no_cache_sorts_nothing_and_multiplies_bfloat16():
    """Keys of a layer of 256 tokens are 8 MiB, values as many; XLA likes them there."""
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.operations import Program
    from jaxrl.tools.plan.topology import topology_devices

    mesh = make_mesh(devices=topology_devices("v5e:2x2")[:1])
    calls, layer = engine_calls(mesh, 1, 256, vocab_size=151_936, num_layers=4)
    program = Program(calls["decode"].lower().compile().as_text())
    copies = program.find(("copy", "copy-done", "slice-done", "transpose"), least=layer / 8)
    assert [one.array for one in copies if one.array.startswith("bf16[64,2,")] == []
    assert program.find(("sort",)) == []
    assert {one.array.split(" -> ")[0] for one in program.products()} == {"bf16 x bf16"}


def engine_calls(mesh, turns, length=4096, **shape):
    """Programs over 64 slots of `length` tokens on each device, and the bytes of a layer there."""
    from jaxrl.models.placement import placed_params
    from jaxrl.models.transformer import TransformerConfig
    from jaxrl.rollout.native.engine import NativeEngine
    from jaxrl.rollout.protocol import Request, Sampling

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"vocab_size": 512, "num_layers": 2, "head_dim": 128}
    model = TransformerConfig(**sizes | shape)
    groups, heads = mesh.shape["data"], 2 // mesh.shape["tensor"]
    options = {"dtype": jnp.bfloat16, "max_num_seqs": 64 * groups, "device_memory": 1e12}
    engine = NativeEngine(model, mesh, max_model_len=length, **options)
    sampling, over = Sampling(max_tokens=length * 3 // 4), (Future(),) * (turns > 1)
    params = placed_params(model, Placement(mesh))
    calls = engine.calls(params, [Request((0,) * (length // 4), ((0, 0),), sampling, None, over)])
    return calls, 2 * 64 * heads * 128 * length * 2
