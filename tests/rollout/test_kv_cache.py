"""The cache's pages: written, copied, taken to the host and put back, on one device and on many."""

import dataclasses
import functools
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.parallel import Placement, make_mesh
from jaxrl.rollout.native import kv_cache
from tests.rollout.test_native import LLAMA

PAGES, SIZE = 6, 8  # of each part
# two key/value heads: over four devices the positions of a page are spread
MESHES = [{"data": 8}, {"data": 4, "tensor": 2}, {"data": 2, "tensor": 4}]
sizes = pytest.mark.parametrize("sizes", MESHES, ids=str)
layouts = pytest.mark.parametrize("layout", ["transposed", "joined", "apart"])


def filled(parts, layout):
    """A cache of two layers and of routes, with random contents, on the host."""
    empty = functools.partial(kv_cache.empty_cache, LLAMA, parts * PAGES, SIZE, jnp.float32)
    empty = jax.eval_shape(functools.partial(empty, layout=layout))
    routes = jax.ShapeDtypeStruct((parts * PAGES, SIZE, 6), jnp.uint8)
    empty = empty._replace(layers=empty.layers[:2], routes=routes)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: (10 + rng.normal(size=x.shape)).astype(x.dtype), empty)


def on_mesh(sizes, layout):
    placement = Placement(make_mesh(**sizes))
    cache = filled(sizes["data"], layout)
    return placement, cache, jax.device_put(cache, kv_cache.cache_shardings(cache, placement))


def part_of(cache, part):
    return jax.tree.map(lambda x: x[part * PAGES : (part + 1) * PAGES], cache)


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.some(6)
@sizes
@layouts
@pytest.mark.parametrize("sliding", [False, True])
def test_each_device_writes_and_reads_the_pages_of_its_rows(sizes, layout, sliding):
    placement, cache, spread = on_mesh(sizes, layout)
    rng, rows, tokens = np.random.default_rng(1), 2 * sizes["data"], 4
    shape = rows, tokens, LLAMA.num_heads, LLAMA.head_dim
    q = rng.normal(size=shape).astype(np.float32)
    held = rows, LLAMA.num_kv_heads, tokens, LLAMA.head_dim
    k, v = rng.normal(size=(2, *held)).astype(np.float32)
    table = np.array([[0, 2, 4], [5, 1, 3]] * sizes["data"], np.int32)
    first, count = (np.array(x * sizes["data"], np.int32) for x in ([6, 17], [4, 2]))
    model = dataclasses.replace(LLAMA, sliding_window=6)  # the row at 17 does not see page 0
    run = functools.partial(kv_cache.write_and_attend, model, sliding=sliding, kernel="xla")
    given = q, k, v, table, first, count
    rounding = 5e-7 if sizes.get("tensor") == 4 else 1e-7  # four sums of numbers near 10
    layer, out = jax.jit(functools.partial(run, placement=placement))(spread.layers[0], *given)
    layer, out, run = jax.tree.map(np.asarray, layer), np.asarray(out), jax.jit(run)
    for part in range(sizes["data"]):
        here = slice(2 * part, 2 * part + 2)
        alone, expected = run(part_of(cache.layers[0], part), *(x[here] for x in given))
        assert_same(part_of(layer, part), alone)
        near = functools.partial(np.testing.assert_allclose, rtol=rounding, atol=1e-6)
        near(out[here.start], np.asarray(expected)[0])
        near(out[here.start + 1, :2], np.asarray(expected)[1, :2])
    heads, width = LLAMA.num_kv_heads, LLAMA.head_dim  # there may be room for more

    read = jax.jit(lambda layer, table: layer.read(table))

    def page(layer, number):
        keys, values = (np.asarray(x)[0, :heads] for x in read(layer, np.array([[number]])))
        return keys[:, :width], values[..., :width]

    np.testing.assert_array_equal(page(layer, 0)[0][..., 6:], k[0].swapaxes(1, 2)[..., :2])
    np.testing.assert_array_equal(page(layer, 2)[1][:, :2], v[0, :, 2:])
    # row 1 writes 17 and 18, and no 19
    np.testing.assert_array_equal(page(layer, 3)[1][:, 1:3], v[1, :, :2])
    np.testing.assert_array_equal(page(layer, 3)[1][:, 3:], page(cache.layers[0], 3)[1][:, 3:])


@sizes
@layouts
def test_pages_are_copied_within_their_part_when_they_are_due(sizes, layout):
    placement, cache, spread = on_mesh(sizes, layout)
    parts = sizes["data"]
    pairs = np.array([[(0, 1), (1, 3), (5, 0)]] * parts, np.int32).reshape(-1, 2)
    # two pairs in step 0, one in step 1; of the last part all in step 1
    until = np.array([[0, 2, 3]] * (parts - 1) + [[0, 0, 3]], np.int32)
    copy = jax.jit(functools.partial(kv_cache.copy_pages, placement=placement))
    expected = jax.tree.map(np.array, cache)
    for step in range(2):
        spread = copy(spread, pairs, until, step)
        for part in range(parts):
            for source, target in pairs[until[part, step] : until[part, step + 1]]:
                for x in jax.tree.leaves(expected):
                    x[part * PAGES + target] = x[part * PAGES + source]
        assert_same(spread, expected)
    alone = jax.jit(kv_cache.copy_pages)(part_of(cache, 0), pairs[:3], until[:1], 0)
    assert_same(alone, jax.tree.map(lambda x: x[[0, 0, 2, 0, 4, 5]], part_of(cache, 0)))


@sizes
@layouts
def test_pages_go_to_the_host_and_come_back_elsewhere(sizes, layout):
    placement, cache, spread = on_mesh(sizes, layout)
    parts = sizes["data"]
    ids = np.full((parts, 3), PAGES)
    ids[1, :2] = 4, 2  # of one part; the others take nothing
    take = jax.jit(functools.partial(kv_cache.take_pages, placement=placement))
    held = jax.tree.map(np.asarray, take(spread, ids.ravel()))
    theirs = jax.tree.map(lambda x: x[[PAGES + 4, PAGES + 2]], cache)
    assert_same(jax.tree.map(lambda x: x[3:5], held), theirs)
    put = jax.jit(functools.partial(kv_cache.put_pages, placement=placement))
    ids[1, :2] = 0, 5
    expected = jax.tree.map(np.array, cache)
    for x in jax.tree.leaves(expected):
        x[[PAGES, PAGES + 5]] = x[[PAGES + 4, PAGES + 2]]
    assert_same(put(spread, ids.ravel(), held), expected)


@sizes
def test_a_cache_that_grows_keeps_what_is_there(sizes):
    placement, cache, spread = on_mesh(sizes, "transposed")
    longer = jax.jit(functools.partial(kv_cache.lengthen, placement=placement), static_argnums=1)
    for x, old in zip(*map(jax.tree.leaves, (longer(spread, 2), cache)), strict=True):
        by_part = np.asarray(x).reshape(sizes["data"], PAGES + 2, *x.shape[1:])
        np.testing.assert_array_equal(by_part[:, :PAGES].reshape(old.shape), old)
        assert not by_part[:, PAGES:].any()


@pytest.mark.slow  # the TPU compiler
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("sizes", [{"data": 1}, *MESHES], ids=str)
def test_the_cache_of_a_tpu_is_written_in_place(sizes, turns):
    """No program needs as much as a copy of one layer beside the cache: 2 layers, bfloat16."""
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    devices = topology_devices("v5e:2x4")[: 8 if len(sizes) > 1 or sizes["data"] > 1 else 1]
    call, layer = block_of(make_mesh(devices=devices, **sizes), turns)
    stats = call.lower().compile().memory_analysis()
    assert stats.alias_size_in_bytes == 2 * layer
    # where positions are spread, XLA turns a layer's share round to read it
    assert stats.temp_size_in_bytes < (1.25 if sizes.get("tensor") == 4 else 0.5) * layer


def test_a_block_of_a_tpu_moves_no_cache_sorts_nothing_and_multiplies_bfloat16():
    """Of a layer of 64 rows of 256 tokens the pages are 16 MiB."""
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.operations import Program
    from jaxrl.tools.plan.topology import topology_devices

    mesh = make_mesh(devices=topology_devices("v5e:2x2")[:1])
    call, layer = block_of(mesh, 1, 256, vocab_size=151_936, num_layers=4)
    program = Program(call.lower().compile().as_text())
    copies = program.find(("copy", "copy-done", "slice-done", "transpose"), least=layer / 8)
    assert [one.array for one in copies if one.array.startswith("bf16[128,128,4,128]")] == []
    assert program.find(("sort",)) == []
    assert {one.array.split(" -> ")[0] for one in program.products()} == {"bf16 x bf16"}


def block_of(mesh, turns, length=4096, **shape):
    """The block of 64 rows of `length` tokens on each device, and the bytes of a layer there."""
    from jaxrl.models.placement import placed_params
    from jaxrl.models.transformer import TransformerConfig
    from jaxrl.rollout.native.engine import NativeEngine
    from jaxrl.rollout.protocol import Request, Sampling

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"vocab_size": 512, "num_layers": 2, "head_dim": 128}
    model = TransformerConfig(**sizes | shape)
    groups, heads = mesh.shape["data"], 2 / mesh.shape["tensor"]
    options = {"dtype": jnp.bfloat16, "max_num_seqs": 64 * groups, "device_memory": 1e12}
    engine = NativeEngine(model, mesh, max_model_len=length, **options)
    sampling, over = Sampling(max_tokens=length * 3 // 4), (Future(),) * (turns > 1)
    params = placed_params(model, Placement(mesh))
    calls = engine.calls(params, [Request((0,) * (length // 4), ((0, 0),), sampling, None, over)])
    return calls["decode"], 2 * 64 * heads * 128 * length * 2


@pytest.mark.parametrize(
    ("kv_heads", "tensor", "axes"),
    [
        (8, 4, ("tensor", None)),
        (4, 8, (None, "tensor")),
        (3, 3, (None, None)),  # bfloat16 fills 3 heads up to 4; 3 divides no page
        (12, 6, (None, None)),  # up to 16
    ],
)
def test_heads_are_split_or_positions_or_nothing(kv_heads, tensor, axes):
    model = dataclasses.replace(LLAMA, num_heads=24, num_kv_heads=kv_heads, head_dim=8)
    placement = Placement(make_mesh(devices=jax.devices()[:tensor], tensor=tensor))
    empty = functools.partial(kv_cache.empty_cache, model, 4, 128, jnp.bfloat16, layout="joined")
    cache = jax.eval_shape(empty)
    (sharding,) = kv_cache.cache_shardings(cache, placement).layers[0].arrays
    assert (sharding.spec[2], sharding.spec[1]) == axes
    sharding.shard_shape(cache.layers[0].arrays[0].shape)  # it can be


def test_programs_split_a_cache_as_its_pages_can_be():
    """8 devices divide a page of 64 positions; a program's cache is what `empty` makes."""
    from jaxrl.rollout.native.programs import RULES, compiled

    placement = Placement(make_mesh(tensor=8), RULES)
    for page, positions in ((64, 8), (4, 4)):  # 4 positions are not divided
        made = compiled(LLAMA, placement, jnp.dtype("float32"), page=page)
        cache = made.empty(pages=2, size=page)
        keys, _ = cache.layers[0].arrays
        assert keys.sharding.shard_shape(keys.shape)[3] == positions
