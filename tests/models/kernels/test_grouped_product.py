"""Grouped products: value and gradients against one product per group."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.kernels import grouped_product as kernels
from jaxrl.models.kernels.choice import Facts
from jaxrl.models.kernels.grouped_product import GROUPED_PRODUCT, differentiable, grouped_product

ROWS, INNER, OUTER = 300, 128, 256
SIZES = {
    "some": [100, 60, 140],
    "empty groups": [0, 130, 0, 170, 0],
    "all in one": [0, 300, 0],
    "rows of no group": [90, 0, 77],
    "nothing": [0, 0],
    "one group": [300],
    "ends of tiles": [128, 128, 44],
}
INTERPRETED = differentiable(
    functools.partial(kernels.megablox_rows, interpret=True),
    functools.partial(kernels.megablox_outer, interpret=True),
)
# of the GPU's what runs here: its gradient by the matrices, a few visits at a time
BATCHED = differentiable(kernels.tile_rows, kernels.batched_outer)
RUNS = {"xla": grouped_product, "megablox": INTERPRETED, "batched": BATCHED}


@pytest.fixture(autouse=True)
def few_visits(monkeypatch):
    monkeypatch.setattr(kernels, "WIDE_TILE", 64)
    monkeypatch.setattr(kernels, "AT_ONCE", 3 * INNER * OUTER)


def inputs(sizes, dtype):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return draw(ROWS, INNER).astype(dtype), draw(len(sizes), INNER, OUTER) / 8, draw(ROWS, OUTER)


def by_group(sizes):
    """One product after the other."""
    ends = np.cumsum(sizes)

    def run(x, w, _):
        parts = [x[end - size : end] @ m for size, end, m in zip(sizes, ends, w, strict=True)]
        rest = jnp.zeros((len(x) - ends[-1], w.shape[2]), x.dtype)
        return jnp.concatenate([*parts, rest])

    return run


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(run, x, w, sizes, weights):
    def loss(x, w):
        out = run(x, w, sizes)
        return jnp.sum(weights * jnp.sin(out.astype(jnp.float32))), out

    (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, w)
    return out, *grads


@pytest.mark.some(3)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_value_and_gradients_are_those_of_single_products(name, sizes):
    x, w, weights = inputs(sizes, jnp.float32)
    given = x, w, np.array(sizes, np.int32), weights
    expected = value_and_gradients(by_group(sizes), *given)
    found = value_and_gradients(RUNS[name], *given)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_in_bfloat16_sums_are_float32_and_the_matrix_keeps_its_dtype(name):
    """As near to the exact one as products of bfloat16 rounded once."""
    sizes = SIZES["rows of no group"]
    x, w, weights = inputs(sizes, jnp.bfloat16)
    rounded = w.astype(jnp.bfloat16).astype(np.float32)
    run, given = by_group(sizes), np.array(sizes, np.int32)
    exact = value_and_gradients(run, x.astype(np.float32), rounded, given, weights)
    found = value_and_gradients(RUNS[name], x, w, given, weights)
    assert [y.dtype for y in found] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    for a, b in zip(exact, found, strict=True):
        scale = float(np.abs(a).max())
        assert float(np.abs(np.asarray(a) - np.asarray(b, np.float32)).max()) < 2**-6 * scale


@pytest.mark.parametrize("name", RUNS)
def test_what_rows_of_no_group_hold_is_not_read(name):
    sizes = np.array([90, 0, 77], np.int32)
    x, w, weights = inputs([90, 0, 77], jnp.float32)
    expected = value_and_gradients(RUNS[name], x, w, sizes, weights)
    spoilt = np.where(np.arange(ROWS)[:, None] < 167, x, np.float32(np.nan))
    found = value_and_gradients(RUNS[name], spoilt, w, sizes, weights)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_product_is_of_all_groups_with_all_rows():
    """Forward and backward go through 4,096 / 128 = 32 tiles and 32 groups."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 64), (32, 64, 64))]
    sizes = jax.ShapeDtypeStruct((32,), jnp.int32)
    loss = lambda x, w, sizes: grouped_product(x, w, sizes).sum()  # noqa: E731
    program = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*shapes, sizes))
    assert program.count("length=64") >= 3  # of the value, dx and dW
    assert "ragged_dot" not in program


def test_the_choice():
    facts = Facts("gpu", jnp.dtype("bfloat16"), capability=10.0)
    assert GROUPED_PRODUCT.choose(facts._replace(platform="tpu")).name == "megablox"
    assert GROUPED_PRODUCT.choose(facts._replace(platform="cpu")).name == "xla"
    assert GROUPED_PRODUCT.choose(facts).passed_over["tokamax"][-1] == (
        "a Hopper GPU, not compute capability 10.0"
    )


@pytest.mark.slow  # the TPU compiler
def test_on_a_tpu_the_gradient_costs_what_its_rows_cost():
    """4,096 rows x 512 x 256, 2 operations each, three products: 3.2e9, not 16 times that."""
    pytest.importorskip("libtpu")
    from jaxrl.tools.plan.topology import topology_devices

    place = jax.sharding.SingleDeviceSharding(topology_devices("v5e:2x2")[0])
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        for shape, dtype in (
            ((4096, 512), jnp.bfloat16),
            ((16, 512, 256), jnp.float32),
            ((16,), jnp.int32),
        )
    ]
    loss = lambda *given: grouped_product(*given, kernel="megablox").sum()  # noqa: E731
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    assert compiled.cost_analysis()["flops"] < 1.3 * 3 * 2 * 4096 * 512 * 256
