"""Attention to pages, against attention to whole rows."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.attention import attention
from jaxrl.models.kernels import paged_attention as kernels
from jaxrl.models.kernels.choice import Facts
from jaxrl.models.kernels.paged_attention import PAGED_ATTENTION, Pages, paged_attention
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
CAPPED = dataclasses.replace(MODEL, attention_softcap=2.0)
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


def paged(config, k, v, *, joined, seed=1, spare=3):
    """Keys and values in pages at random places, and the table."""
    number = len(k) * MOST + spare
    table = np.random.default_rng(seed).permutation(number)[: len(k) * MOST].reshape(-1, MOST)
    pages = Pages.empty(config, number, SIZE, k.dtype, joined=joined)
    at = np.arange(MOST * SIZE)
    for row, places in enumerate(table):
        given = (x[row].swapaxes(0, 1) for x in (k, v))
        pages = pages.write(jnp.asarray(places[at // SIZE]), jnp.asarray(at % SIZE), *given)
    return pages, jnp.asarray(table)


def expected(config, q, k, v, first, *, sliding):
    at, seen = first[:, None, None] + np.arange(q.shape[1])[:, None], np.arange(k.shape[2])
    mask = seen <= at
    if sliding:
        mask &= at - seen < config.sliding_window
    return attention(config, q, k, v, jnp.asarray(mask))


@pytest.mark.parametrize("tile_bytes", [1, 5000, 2**21])  # tiles of 1, 2 and all rows
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("config", "sliding"),
    [(MODEL, False), (WINDOW, True), (WINDOW, False), (CAPPED, False)],
    ids=["plain", "window", "whole layer", "cap"],
)
def test_pages_are_rows(monkeypatch, config, sliding, joined, queries, tile_bytes):
    monkeypatch.setattr(kernels, "TILE_BYTES", tile_bytes)
    q, k, v = rows(config, queries)
    pages, table = paged(config, k, v, joined=joined)
    out = jax.jit(lambda *given: paged_attention(config, *given, sliding=sliding))(
        q, pages, table, jnp.asarray(FIRST)
    )
    found = expected(config, q, k, v, FIRST, sliding=sliding)
    live = FIRST >= 0
    np.testing.assert_allclose(out[live], found[live], atol=2e-6)
    assert jnp.isfinite(out).all()


def test_a_window_reads_no_page_before_it():
    q, k, v = rows(WINDOW)
    first = np.full(len(FIRST), 40)  # the window of position 40 begins at 32
    broken = k.at[:, :, :32].set(jnp.nan), v.at[:, :, :32].set(jnp.nan)
    pages, table = paged(WINDOW, *broken, joined=False)
    out = paged_attention(WINDOW, q, pages, table, jnp.asarray(first), sliding=True)
    found = expected(WINDOW, q, k, v, first, sliding=True)
    np.testing.assert_allclose(out, found, atol=2e-6)


def test_neighbours_places_and_tiles_change_no_bit():
    q, k, v = rows()
    run = jax.jit(lambda *given: paged_attention(MODEL, *given))
    pages, table = paged(MODEL, k, v, joined=False)
    out = run(q, pages, table, jnp.asarray(FIRST))
    other_q, other_k, other_v = rows(seed=5)
    for row in np.flatnonzero(FIRST >= 0):
        # the row alone is kept, elsewhere in the batch and in memory; the others are longer
        place = (row + 3) % len(FIRST)
        first = np.where(np.arange(len(FIRST)) == place, FIRST[row], 44 - np.arange(len(FIRST)))
        mixed = [
            x.at[place].set(y[row])
            for x, y in zip((other_q, other_k, other_v), (q, k, v), strict=True)
        ]
        moved, places = paged(MODEL, *mixed[1:], joined=False, seed=row + 10)
        again = run(mixed[0], moved, places, jnp.asarray(first))
        assert np.array_equal(again[place], out[row])


def test_a_position_has_the_same_bits_wherever_its_tile_begins():
    """What a prompt's positions are given does not depend on how much of it was there before."""
    first, later = np.array([8, 8]), np.array([8, 12])  # tiles of 8 queries, of 4 of them again
    _, k, v = rows(first=first)
    pages, table = paged(MODEL, k, v, joined=False)
    q = jnp.asarray(np.random.default_rng(3).normal(size=(2, 8, 6, 16)), jnp.float32)
    shifted = q.at[1, :4].set(q[1, 4:])
    run = jax.jit(lambda *given: paged_attention(MODEL, *given))
    whole = run(q, pages, table, jnp.asarray(first))
    part = run(shifted, pages, table, jnp.asarray(later))
    assert np.array_equal(part[1, :4], whole[1, 4:])


def test_tokens_outside_of_all_pages_are_dropped():
    q, k, v = rows()
    for joined in (False, True):
        pages, _ = paged(MODEL, k, v, joined=joined)
        number = len(FIRST) * MOST + 3
        token = jnp.ones((2, 2, 16))
        written = pages.write(jnp.array([number, 5]), jnp.array([0, 3]), token, token)
        for before, after in zip(pages.arrays, written.arrays, strict=True):
            changed = np.flatnonzero((before != after).any(axis=(1, 2, 3)))
            assert changed.tolist() == [5]
        keys, values = written.read(jnp.array([5]))
        assert (keys[0, :, :, 3] == 1).all()
        assert (values[0, :, 3] == 1).all()


@pytest.mark.parametrize("joined", [False, True])
def test_copies_of_pages(joined):
    _, k, v = rows()
    pages, _ = paged(MODEL, k, v, joined=joined)
    number = len(FIRST) * MOST + 3
    copied = pages.copy(jnp.array([1, 2, 3]), jnp.array([7, number, 9]))
    for before, after in zip(
        pages.read(jnp.arange(number)), copied.read(jnp.arange(number)), strict=True
    ):
        wanted = np.array(before)
        wanted[[7, 9]] = wanted[[1, 3]]
        assert np.array_equal(after, wanted)


def test_the_tpus_kernel_is_asked_for_the_same(monkeypatch):
    """Its own reference stands in for it: no interpreter of Pallas runs it."""
    ragged = importlib.import_module("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
    kernel = importlib.import_module(f"{ragged.__name__}.kernel")

    def reference(*given, num_kv_pages_per_block, num_queries_per_block, **settings):
        assert num_kv_pages_per_block <= MOST
        assert num_queries_per_block == 32
        return kernel.ref_ragged_paged_attention(*given, **settings)

    monkeypatch.setattr(ragged, "ragged_paged_attention", reference)
    for config, sliding in ((MODEL, False), (WINDOW, True), (CAPPED, False)):
        for queries in (1, 4):
            q, k, v = rows(config, queries)
            pages, table = paged(config, k, v, joined=True)
            given = config, q, pages, table, jnp.asarray(FIRST)
            out = paged_attention(*given, sliding=sliding, kernel="ragged")
            found = paged_attention(*given, sliding=sliding)
            np.testing.assert_allclose(out[FIRST >= 0], found[FIRST >= 0], atol=2e-6)


@pytest.mark.parametrize(
    ("platform", "width", "heads", "dtype", "name"),
    [
        ("tpu", 128, 2, jnp.bfloat16, "ragged"),
        ("tpu", 128, 8, jnp.bfloat16, "ragged"),
        ("tpu", 128, 5, jnp.bfloat16, "xla"),  # five words of a key and a value
        ("tpu", 128, 2, jnp.float32, "ragged"),
        ("tpu", 128, 3, jnp.float32, "xla"),
        ("tpu", 64, 2, jnp.bfloat16, "xla"),
        ("gpu", 128, 2, jnp.bfloat16, "xla"),
    ],
)
def test_who_has_the_kernel(platform, width, heads, dtype, name):
    config = dataclasses.replace(MODEL, head_dim=width, num_heads=heads, num_kv_heads=heads)
    assert PAGED_ATTENTION.choose(Facts(platform, jnp.dtype(dtype), config)).name == name
    if platform == "tpu" and width == 128:  # as the kernel itself says
        ragged = importlib.import_module("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
        rule = importlib.import_module(f"{ragged.__name__}.kernel").get_min_heads_per_blk
        try:
            rule(heads, 2 * heads, jnp.dtype(dtype), jnp.dtype(dtype))
        except ValueError:
            assert name == "xla"
        else:
            assert name == "ragged"


@pytest.mark.parametrize("joined", [False, True])
def test_what_is_in_pages_of_others_is_nothing_to_a_row(joined):
    q, k, v = rows()
    behind = np.arange(MOST * SIZE) >= np.where(FIRST < 0, 0, FIRST + 4)[:, None]
    broken = [jnp.where(behind[:, None, :, None], jnp.inf, x) for x in (k, v)]
    pages, table = paged(MODEL, *broken, joined=joined)
    out = paged_attention(MODEL, q, pages, table, jnp.asarray(FIRST))
    found = expected(MODEL, q, k, v, FIRST, sliding=False)
    np.testing.assert_allclose(out[FIRST >= 0], found[FIRST >= 0], atol=2e-6)


def test_a_tpu_writes_and_reads_pages_where_they_are():
    """Compiled for one: a token is written in place, and nothing as large as they are is copied."""
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    mesh = jax.sharding.Mesh(np.array(topology_devices("v5e:2x4")[:1]), "x")
    one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    config = dataclasses.replace(MODEL, num_heads=12, head_dim=128)  # of Qwen2.5-1.5B
    slots, number, most = 64, 1024, 32

    def shape(*dims, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=one)

    pages = Pages((shape(number, 128, 4, 128, dtype=jnp.bfloat16),), True)
    token = shape(slots, 2, 128, dtype=jnp.bfloat16)

    def step(pages, q, k, v, table, first):
        at = jnp.take_along_axis(table, first[:, None] // 128, axis=1)[:, 0]
        pages = pages.write(at, first % 128, k, v)
        return pages, paged_attention(config, q, pages, table, first, kernel="ragged")

    given = pages, shape(slots, 1, 12, 128, dtype=jnp.bfloat16), token, token
    places = shape(slots, most), shape(slots)
    with jax.set_mesh(mesh):  # by which the kernel knows its chip
        compiled = jax.jit(step, donate_argnums=0).lower(*given, *places).compile()
    assert "custom_call" in compiled.as_text()
    whole = number * 128 * 4 * 128 * 2  # bytes
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= whole
    assert memory.temp_size_in_bytes < whole / 64
