"""Attention to pages, against attention to whole rows."""

import dataclasses
import functools
import importlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.experimental.pallas import tpu as pltpu

from jaxrl.models.attention import attention
from jaxrl.models.kernels import paged_attention as kernels
from jaxrl.models.kernels.choice import Facts
from jaxrl.models.kernels.paged_attention import (
    PAGED_ATTENTION,
    Pages,
    layout_of,
    paged_attention,
)
from jaxrl.models.transformer import TransformerConfig

MODEL = TransformerConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
)
WINDOW = dataclasses.replace(MODEL, sliding_window=9, sliding_layers=(True, False))
THREE = dataclasses.replace(MODEL, num_kv_heads=3)  # heads, of which "joined" pages have four
CAPPED = dataclasses.replace(MODEL, attention_softcap=2.0)
LAYOUTS = ("transposed", "joined", "apart")
SIZE, MOST = 8, 6  # positions of a page, pages of a row
FIRST = np.array([0, 13, -1, 40, 7, 21, 36])  # one row is none; the longest has 44 of 48 positions


def rows(config=MODEL, queries=4, first=FIRST, dtype=jnp.float32, seed=0):
    """Queries, and keys and values [R, K, MOST * SIZE, h] of all positions."""
    rng = np.random.default_rng(seed)
    shapes = (
        (len(first), queries, config.num_heads, config.head_dim),
        *((len(first), config.num_kv_heads, MOST * SIZE, config.head_dim),) * 2,
    )
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def paged(config, k, v, *, layout="transposed", seed=1, spare=3):
    """Keys and values in pages at random places, and the table."""
    number = len(k) * MOST + spare
    table = np.random.default_rng(seed).permutation(number)[: len(k) * MOST].reshape(-1, MOST)
    shape = dataclasses.replace(MODEL, num_kv_heads=config.num_kv_heads)  # of whatever attention
    return written(k, v, table, config=shape, number=number, layout=layout), jnp.asarray(table)


@functools.partial(jax.jit, static_argnames=("config", "number", "layout"))
def written(k, v, table, *, config, number, layout):
    pages = Pages.empty(config, number, SIZE, k.dtype, layout=layout)
    of_page = jnp.tile(jnp.arange(SIZE), table.size)
    tokens = (x.swapaxes(1, 2).reshape(-1, *x.shape[1::2]) for x in (k, v))
    return pages.write(jnp.repeat(table, SIZE), of_page, *tokens)


@functools.partial(jax.jit, static_argnums=0, static_argnames="sliding")
def expected(config, q, k, v, first, sinks=None, *, sliding=False):
    at, seen = first[:, None, None] + np.arange(q.shape[1])[:, None], np.arange(k.shape[2])
    mask = seen <= at
    if sliding:
        mask &= at - seen < config.sliding_window
    return attention(config, q, k, v, mask, sinks)


def jitted(config, **options):
    """A program of its own: some tests put another function under it."""
    return jax.jit(lambda *given: paged_attention(config, *given, **options))


def assert_live(out, found):
    """Rows that are none have numbers, whatever they are."""
    out, found = np.asarray(out), np.asarray(found)
    np.testing.assert_allclose(out[FIRST >= 0], found[FIRST >= 0], atol=2e-6)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("way", ["cpu", "accelerator"])
@pytest.mark.parametrize("layout", ["transposed", "joined"])
def test_sinks_of_pages_are_those_of_rows(monkeypatch, way, layout):
    if way == "accelerator":
        run_as_accelerators(monkeypatch)
    sinks = jnp.linspace(-1.0, 3.0, THREE.num_heads)
    q, k, v = rows(THREE, 4)
    pages, table = paged(THREE, k, v, layout=layout)
    out = jitted(THREE)(q, pages, table, jnp.asarray(FIRST), sinks)
    assert_live(out, expected(THREE, q, k, v, FIRST, sinks))


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_a_model_with_sinks_has_the_reference(platform):
    sinks = dataclasses.replace(MODEL, attention_sinks=True)
    assert kernels.paged_kernel(Facts(platform, jnp.dtype(jnp.bfloat16), sinks)) == "xla"


def run_as_accelerators(monkeypatch, pages=2):
    """Attend to all rows at once, in steps of some pages, on the CPU as they do."""
    monkeypatch.setattr(kernels, "in_tiles", functools.partial(kernels.attend, step=pages))


@pytest.mark.some(27)
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize(
    ("layout", "way"),
    [
        *((layout, way) for layout in LAYOUTS for way in ("tiles of 2 rows", "accelerator")),
        ("transposed", "tiles of 1 row"),
        ("transposed", "one tile"),
    ],
)
@pytest.mark.parametrize(
    ("config", "sliding"),
    [(MODEL, False), (THREE, False), (WINDOW, True), (WINDOW, False), (CAPPED, False)],
    ids=["plain", "three heads", "window", "whole layer", "cap"],
)
def test_pages_are_rows(monkeypatch, config, sliding, layout, way, queries):
    if way == "accelerator":
        run_as_accelerators(monkeypatch, pages=4)  # which does not divide the pages of a row
    else:
        sizes = {"tiles of 1 row": 1, "tiles of 2 rows": 5000, "one tile": 2**21}
        monkeypatch.setattr(kernels, "TILE_BYTES", sizes[way])
    q, k, v = rows(config, queries)
    pages, table = paged(config, k, v, layout=layout)
    out = jitted(config, sliding=sliding)(q, pages, table, jnp.asarray(FIRST))
    assert_live(out, expected(config, q, k, v, FIRST, sliding=sliding))


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_a_cpu_alone_has_rows_in_tiles(platform):
    q, k, v = rows()
    pages, table = paged(MODEL, k, v, layout=layout_of(platform))
    given = q, pages, table, jnp.asarray(FIRST)
    text = jitted(MODEL).trace(*given).lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.sort" in text) == (platform == "cpu")


def test_a_window_reads_no_page_before_it():
    q, k, v = rows(WINDOW)
    first = np.full(len(FIRST), 40)  # the window of position 40 begins at 32
    early = np.arange(MOST * SIZE)[:, None] < 32
    pages, table = paged(WINDOW, *(np.where(early, np.float32(np.nan), x) for x in (k, v)))
    out = jitted(WINDOW, sliding=True)(q, pages, table, jnp.asarray(first))
    found = expected(WINDOW, q, k, v, first, sliding=True)
    np.testing.assert_allclose(out, found, atol=2e-6)


@pytest.mark.parametrize("way", ["cpu", "accelerator"])
def test_neighbours_places_and_tiles_change_no_bit(monkeypatch, way):
    if way == "accelerator":
        run_as_accelerators(monkeypatch)
    q, k, v = rows()
    run = jitted(MODEL)
    layout = layout_of(way)
    pages, table = paged(MODEL, k, v, layout=layout)
    out = np.asarray(run(q, pages, table, jnp.asarray(FIRST)))
    others = rows(seed=5)
    for row in np.flatnonzero(FIRST >= 0):
        # the row alone is kept, elsewhere in the batch and in memory; the others are longer
        place = (row + 3) % len(FIRST)
        first = np.where(np.arange(len(FIRST)) == place, FIRST[row], 44 - np.arange(len(FIRST)))
        mixed = [np.array(x) for x in others]
        for x, y in zip(mixed, (q, k, v), strict=True):
            x[place] = np.asarray(y)[row]
        moved, places = paged(MODEL, *mixed[1:], layout=layout, seed=row + 10)
        again = run(mixed[0], moved, places, jnp.asarray(first))
        assert np.array_equal(np.asarray(again)[place], out[row])


@pytest.mark.parametrize("way", ["cpu", "accelerator"])
def test_a_position_has_the_same_bits_wherever_its_tile_begins(monkeypatch, way):
    """What a prompt's positions are given does not depend on how much of it was there before."""
    if way == "accelerator":
        run_as_accelerators(monkeypatch)
    first, later = np.array([8, 8]), np.array([8, 12])  # tiles of 8 queries, of 4 of them again
    _, k, v = rows(first=first)
    pages, table = paged(MODEL, k, v, layout=layout_of(way))
    q = np.random.default_rng(3).normal(size=(2, 8, 6, 16)).astype(np.float32)
    shifted = q.copy()
    shifted[1, :4] = q[1, 4:]
    run = jitted(MODEL)
    given = (q, first), (shifted, later)
    whole, part = (np.asarray(run(x, pages, table, jnp.asarray(at))) for x, at in given)
    assert np.array_equal(part[1, :4], whole[1, 4:])


def test_tokens_outside_of_all_pages_are_dropped():
    q, k, v = rows()
    for layout in LAYOUTS:
        pages, _ = paged(MODEL, k, v, layout=layout)
        number = len(FIRST) * MOST + 3
        token = np.ones((2, 2, 16), np.float32)
        after = jax.jit(Pages.write)(pages, np.array([number, 5]), np.array([0, 3]), token, token)
        for x, y in zip(pages.arrays, after.arrays, strict=True):
            changed = np.flatnonzero((np.asarray(x) != np.asarray(y)).any(axis=(1, 2, 3)))
            assert changed.tolist() == [5]
        keys, values = map(np.asarray, jax.jit(Pages.read)(after, np.array([[5]])))
        assert (keys[0, :2, :16, 3] == 1).all()
        assert (values[0, :2, 3, :16] == 1).all()


def stand_in(monkeypatch, kernel, vmem=128):
    """Put a function in the place of the TPU's kernel, on a chip of so many MiB of VMEM."""
    ragged = importlib.import_module("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
    monkeypatch.setattr(ragged, "ragged_paged_attention", kernel)
    info = SimpleNamespace(vmem_capacity_bytes=vmem * 2**20)
    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: info)
    return importlib.import_module(f"{ragged.__name__}.kernel")


def test_the_tpus_kernel_is_asked_for_the_same(monkeypatch):
    """Its own reference stands in for it: no interpreter of Pallas runs it."""

    def reference(*given, num_kv_pages_per_block, num_queries_per_block, **settings):
        assert num_kv_pages_per_block <= MOST
        assert given[0].shape[-1] == given[1].shape[-1] == 128
        del settings["vmem_limit_bytes"]
        return kernel.ref_ragged_paged_attention(*given, **settings)

    kernel = stand_in(monkeypatch, reference)
    first = np.array([13, -1, 13])
    # All of three heads: the reference asks for concrete lengths, so that each of its operations
    # is compiled alone.
    window, capped = (dataclasses.replace(x, num_kv_heads=3) for x in (WINDOW, CAPPED))
    cases = (THREE, 1, False), (THREE, 4, False), (window, 4, True), (capped, 4, False)
    for config, queries, sliding in cases:
        q, k, v = rows(config, queries, first)
        pages, table = paged(config, k, v, layout="joined")
        given = q, pages, table, jnp.asarray(first)
        out = np.asarray(paged_attention(config, *given, sliding=sliding, kernel="ragged"))
        found = np.asarray(jitted(config, sliding=sliding)(*given))
        np.testing.assert_allclose(out[first >= 0], found[first >= 0], atol=2e-6)


@pytest.mark.parametrize(
    ("vmem", "queries", "block"), [(128, 1, 32), (128, 4, 4), (128, 256, 128), (16, 4, 32)]
)
def test_a_tile_is_a_block_of_the_tpus_kernel(monkeypatch, vmem, queries, block):
    def kernel(q, *_, num_queries_per_block, vmem_limit_bytes, **__):
        assert num_queries_per_block == block
        assert vmem_limit_bytes == (None if block == 32 else kernels.TILE_VMEM)
        return q

    stand_in(monkeypatch, kernel, vmem)
    q, k, v = rows(queries=queries)
    pages, table = paged(MODEL, k, v, layout="joined")
    out = jitted(MODEL, kernel="ragged")(q, pages, table, jnp.asarray(FIRST))
    assert np.array_equal(out, q)


@pytest.mark.parametrize("queries", [1, 4])
def test_cudnn_is_asked_for_the_same(monkeypatch, queries):
    """JAX's own plain attention stands in for it."""
    asked = []

    def plain(*, query, key, value, kv_seqlen, page_table_k, scale, **_):
        whole = (x[page_table_k[:, 0, :, 0]].reshape(len(query), -1, 2, 16) for x in (key, value))
        asked.append(kv_seqlen)
        return jax.nn.dot_product_attention(
            query, *whole, scale=scale, key_value_seq_lengths=kv_seqlen
        )

    monkeypatch.setattr(fused, "_dot_product_attention", plain)
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    q, k, v = rows(queries=queries)
    pages, table = paged(MODEL, k, v, layout="apart")
    given = q, pages, table, jnp.asarray(FIRST)
    assert_live(jitted(MODEL, kernel="cudnn")(*given), jitted(MODEL)(*given))
    assert len(asked) == (queries == 1)  # a tile is attended to in plain XLA


@pytest.mark.parametrize(
    ("platform", "width", "dtype", "name"),
    [
        ("tpu", 64, jnp.bfloat16, "ragged"),
        ("tpu", 128, jnp.float32, "ragged"),
        ("gpu", 128, jnp.bfloat16, "cudnn"),
        ("gpu", 256, jnp.bfloat16, "cudnn"),
        ("gpu", 100, jnp.bfloat16, "xla"),
        ("gpu", 128, jnp.float32, "xla"),
        ("rocm", 128, jnp.bfloat16, "xla"),
        ("cpu", 128, jnp.bfloat16, "xla"),
    ],
)
def test_who_has_the_kernel(platform, width, dtype, name):
    config = dataclasses.replace(MODEL, head_dim=width)
    assert PAGED_ATTENTION.choose(Facts(platform, jnp.dtype(dtype), config)).name == name


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_joined_pages_have_as_many_heads_as_the_tpus_kernel_takes(dtype):
    ragged = importlib.import_module("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
    rule = importlib.import_module(f"{ragged.__name__}.kernel").get_min_heads_per_blk
    room = []
    for heads in range(1, 18):
        config = dataclasses.replace(MODEL, num_heads=heads, num_kv_heads=heads)
        pages = functools.partial(Pages.empty, config, 1, SIZE, dtype, layout="joined")
        found = jax.eval_shape(pages).heads
        rule(3 * found, 2 * found, jnp.dtype(dtype), jnp.dtype(dtype))  # or it raises
        room.append(found)
    least = 8 if dtype == jnp.bfloat16 else 4  # heads of eight words
    assert room == [1, 2, 4, 4, *(-(-heads // least) * least for heads in range(5, 18))]


@pytest.mark.parametrize(
    ("config", "capability", "missing"),
    [
        (MODEL, 8.0, 0),
        (MODEL, 7.5, 1),
        (dataclasses.replace(MODEL, head_dim=256), 8.0, 1),
        (WINDOW, 9.0, 1),
        (CAPPED, 9.0, 1),
    ],
)
def test_what_cudnn_misses(config, capability, missing):
    facts = Facts("gpu", jnp.dtype(jnp.bfloat16), config, capability=capability)
    assert len(PAGED_ATTENTION.implementations["cudnn"].missing(facts)) == missing


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_in_pages_of_others_is_nothing_to_a_row(layout):
    q, k, v = rows()
    behind = np.arange(MOST * SIZE) >= np.where(FIRST < 0, 0, FIRST + 4)[:, None]
    broken = [np.where(behind[:, None, :, None], np.float32(np.inf), x) for x in (k, v)]
    pages, table = paged(MODEL, *broken, layout=layout)
    out = np.asarray(jitted(MODEL)(q, pages, table, jnp.asarray(FIRST)))
    found = np.asarray(expected(MODEL, q, k, v, FIRST))
    np.testing.assert_allclose(out[FIRST >= 0], found[FIRST >= 0], atol=2e-6)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "queries"),
    [
        (12, 2, 128, 1),  # of Qwen2.5-1.5B
        (14, 2, 64, 1),  # of Qwen2.5-0.5B
        (9, 3, 64, 1),  # of SmolLM2-135M
        (12, 2, 128, 128),
        (32, 8, 128, 128),  # of Qwen3-8B
        pytest.param(28, 4, 128, 128, marks=pytest.mark.slow),  # of Qwen2.5-7B: half a minute
    ],
)
def test_a_tpu_writes_and_reads_pages_where_they_are(heads, kv_heads, width, queries):
    """Compiled for one: a token is written in place, and nothing as large as they are is copied."""
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    mesh = jax.sharding.Mesh(np.array(topology_devices("v5e:2x4")[:1]), "x")
    one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    config = dataclasses.replace(MODEL, num_heads=heads, num_kv_heads=kv_heads, head_dim=width)
    slots, number, most = 64 if queries == 1 else 4, 2048, 32

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=one)

    def step(pages, q, k, v, table, first):
        at = (first[:, None] + jnp.arange(queries)).reshape(-1)
        places = jnp.repeat(table, queries, axis=0)[jnp.arange(len(at)), at // 128]
        pages = pages.write(places, at % 128, k, v)
        return pages, paged_attention(config, q, pages, table, first, kernel="ragged")

    empty = functools.partial(
        Pages.empty, config, number, 128, jnp.bfloat16, layout=layout_of("tpu")
    )
    pages = jax.tree.map(lambda x: shape(*x.shape), jax.eval_shape(empty))
    token = shape(slots * queries, kv_heads, width)
    places = shape(slots, most, dtype=jnp.int32), shape(slots, dtype=jnp.int32)
    given = pages, shape(slots, queries, heads, width), token, token, *places
    with jax.set_mesh(mesh):  # by which the kernel knows its chip
        compiled = jax.jit(step, donate_argnums=0).lower(*given).compile()
    assert "custom_call" in compiled.as_text()
    whole = sum(x.size * x.dtype.itemsize for x in pages.arrays)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= whole
    assert memory.temp_size_in_bytes < whole / 32
