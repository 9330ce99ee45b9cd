"""Attention of one token per row: the kernels against the plain one, and where each runs."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.attention import attention
from jaxrl.models.kernels import decode_kernels
from jaxrl.models.kernels.decode_attention import cudnn, decode_attention
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel import Placement, make_mesh
from jaxrl.rollout.native.programs import kernel_of

ROWS, POSITIONS = 5, 256
MODEL = TransformerConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=32,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
)
GEMMA = dataclasses.replace(MODEL, attention_softcap=3.0, query_pre_attn_scalar=16)
# first position and one after the last, of each row: one, some, a window, all, the end
RUNS = ((0, 1), (0, 100), (90, 140), (0, POSITIONS), (POSITIONS - 3, POSITIONS))


def inputs(config=MODEL, dtype=jnp.float32, rows=ROWS):
    keys = iter(jax.random.split(jax.random.key(0), 3))
    heads, width = config.num_kv_heads, config.head_dim
    q = jax.random.normal(next(keys), (rows, 1, config.num_heads, width), dtype)
    k = jax.random.normal(next(keys), (rows, heads, width, POSITIONS), dtype)
    v = jax.random.normal(next(keys), (rows, heads, POSITIONS, width), dtype)
    places = np.arange(POSITIONS)
    mask = np.array([(places >= a) & (places < b) for a, b in RUNS])
    return q, k, v, np.resize(mask, (rows, POSITIONS))


def by_kernel(config, q, k, v, mask, columns=True):
    rows, _, heads, width = q.shape
    grouped = q.reshape(rows, k.shape[1], -1, width)
    scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
    given = grouped, (k if columns else k.swapaxes(2, 3)), v, mask
    settings = {"scale": scale, "cap": config.attention_softcap, "transposed": columns}
    out = decode_kernels.tpu_attention(*given, **settings, interpret=True)
    return out.reshape(rows, 1, heads, width)


@pytest.mark.parametrize("columns", [True, False], ids=["columns", "lines"])
@pytest.mark.parametrize("config", [MODEL, GEMMA], ids=["llama", "softcap"])
def test_a_kernel_is_the_plain_attention(config, columns):
    q, k, v, mask = inputs(config)
    expected = attention(config, q, k.swapaxes(2, 3), v, mask[:, None])
    found = by_kernel(config, q, k, v, mask, columns)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    keys = k if columns else k.swapaxes(2, 3)
    plain = decode_attention(config, q, keys, v, mask, transposed=columns)
    np.testing.assert_allclose(plain, expected, atol=2e-6)


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("columns", [True, False], ids=["columns", "lines"])
def test_what_cudnn_is_asked_for_is_the_plain_attention(columns, windows):
    """By JAX's own plain one; without windows all of a row from its first position is in use."""
    q, k, v, mask = inputs()
    if not windows:
        mask |= np.cumsum(mask[:, ::-1], 1)[:, ::-1] > 0
    mask[2] = False
    expected = attention(MODEL, q, k.swapaxes(2, 3), v, mask[:, None])
    grouped, keys = q.reshape(ROWS, 2, 3, 64), k if columns else k.swapaxes(2, 3)
    settings = {"scale": 64**-0.5, "cap": None, "transposed": columns, "windows": windows}
    found = cudnn(grouped, keys, v, mask, **settings, implementation="xla").reshape(q.shape)
    live = np.array([0, 1, 3, 4])
    np.testing.assert_allclose(found[live], expected[live], atol=2e-6)
    assert np.isfinite(found).all()


def test_what_is_not_in_use_is_not_read():
    q, k, v, mask = inputs()
    expected = by_kernel(MODEL, q, k, v, mask)
    outside = ~mask[:, None]
    k = jnp.where(outside[:, :, None], jnp.inf, k)
    v = jnp.where(outside[..., None], 1e30, v)
    np.testing.assert_array_equal(by_kernel(MODEL, q, k, v, mask), expected)


def test_a_row_without_a_position_in_use_is_zero_and_changes_no_other():
    q, k, v, mask = inputs()
    expected = by_kernel(MODEL, q, k, v, mask)
    mask[[0, 3]] = False
    k, v = (x.at[jnp.array([0, 3])].set(jnp.nan) for x in (k, v))
    out = by_kernel(MODEL, q, k, v, mask)
    np.testing.assert_array_equal(out[jnp.array([0, 3])], 0)
    live = np.array([1, 2, 4])
    np.testing.assert_array_equal(out[live], expected[live])


def test_dead_rows_are_finite_without_a_kernel():
    q, k, v, mask = inputs()
    expected = decode_attention(MODEL, q, k, v, mask, transposed=True)
    mask[[0, 3]] = False
    out = decode_attention(MODEL, q, k, v, mask, transposed=True)
    assert np.isfinite(out).all()
    live = np.array([1, 2, 4])
    np.testing.assert_array_equal(out[live], expected[live])


def test_the_tpu_fetches_blocks_in_use_alone():
    """Blocks of 128 positions that a grid of 6 rows x 2 blocks fetches, in order, no repeats."""
    mask = np.zeros((6, 256), bool)
    mask[1, :100] = mask[2, 90:140] = mask[5, 200:] = True  # rows 0, 3 and 4 are dead
    scalars = decode_kernels.runs(mask)
    steps = [
        tuple(map(int, decode_kernels.fetched_block(row, number, *scalars, block=128)))
        for row in range(6)
        for number in range(2)
    ]
    fetched = [at for at, before in zip(steps, [None, *steps], strict=False) if at != before]
    # the pipeline holds one block before anything is live
    assert fetched == [(0, 0), (1, 0), (2, 0), (2, 1), (5, 1)]


def test_bfloat16_is_as_near_as_the_plain_one():
    exact = attention(MODEL, *transposed(*inputs()))
    q, k, v, mask = inputs(dtype=jnp.bfloat16)
    plain = attention(MODEL, *transposed(q, k, v, mask)).astype(jnp.float32)
    found = by_kernel(MODEL, q, k, v, mask)
    assert np.abs(found - exact).max() <= 1.5 * np.abs(plain - exact).max()


def transposed(q, k, v, mask):
    return q, k.swapaxes(2, 3), v, mask[:, None]


@pytest.mark.parametrize("sizes", [{"data": 4, "tensor": 2}, {"data": 2, "tensor": 4}], ids=str)
def test_rows_and_heads_are_split_over_a_mesh(sizes):
    q, k, v, mask = inputs(rows=8)
    placement = Placement(make_mesh(**sizes))
    spread = jax.jit(lambda *given: decode_attention(MODEL, *given, placement, transposed=True))
    expected = decode_attention(MODEL, q, k, v, mask, transposed=True)
    np.testing.assert_allclose(spread(q, k, v, mask), expected, atol=1e-6)


def lowered(platform, config=MODEL, kernel=None):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(config, jnp.bfloat16)]
    call = jax.jit(lambda *given: decode_attention(config, *given, kernel=kernel, transposed=True))
    return call.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("config", [MODEL, GEMMA], ids=["llama", "softcap"])
def test_each_platform_gets_its_kernel(config):
    """Lowered for the platform; nothing runs."""
    assert "tpu_custom_call" in lowered("tpu", config)
    for platform in ("cuda", "cpu"):  # cuDNN has to be named: see test_cuda.py
        assert "custom_call" not in lowered(platform, config)


def test_a_named_kernel_outranks_the_fastest():
    assert "custom_call" not in lowered("tpu", kernel="xla")


@pytest.mark.parametrize(
    ("platform", "capability", "width", "name"),
    [
        ("tpu", None, 128, "pallas"),
        ("tpu", None, 80, "xla"),
        ("gpu", None, 128, "cudnn"),
        ("gpu", None, 100, "xla"),
        ("gpu", "9.0", 256, "cudnn"),
        ("gpu", "8.0", 256, "xla"),
        ("gpu", "8.0", 128, "cudnn"),
        ("gpu", "7.5", 128, "xla"),
        ("gpu", "gfx90a", 128, "xla"),
        ("cpu", None, 128, "xla"),
    ],
)
def test_shapes_and_devices_without_a_kernel(platform, capability, width, name):
    config = dataclasses.replace(MODEL, head_dim=width)
    device = SimpleNamespace(platform=platform, device_kind="", compute_capability=capability)
    mesh = SimpleNamespace(devices=np.array([device]))
    assert kernel_of(config, mesh, jnp.bfloat16) == name
    if platform == "tpu":
        assert ("custom_call" in lowered("tpu", config)) == (name == "pallas")


@pytest.mark.slow  # the TPU compiler
@pytest.mark.parametrize("columns", [True, False], ids=["columns", "lines"])
def test_the_kernel_compiles_for_a_tpu(columns):
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    mesh = make_mesh(devices=topology_devices("v5e:2x4"), data=4, tensor=2)
    placement = Placement(mesh)
    names = {4: ("batch", "kv_heads", None, None), 2: ("batch", None)}

    def array(x, names):
        sharding = placement.sharding(x.shape, names)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    q, k, v, mask = inputs(dtype=jnp.bfloat16, rows=8)
    k = k if columns else k.swapaxes(2, 3)
    given = (
        array(q, ("batch", None, "heads", None)),
        *(array(x, names[x.ndim]) for x in (k, v, mask)),
    )
    call = jax.jit(lambda *given: decode_attention(MODEL, *given, placement, transposed=columns))
    assert "custom_call" in call.lower(*given).compile().as_text()
