"""Frequencies of each rope type against numbers worked out by hand; parity is in test_families."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.rope import (
    QueryGrowth,
    RopeScaling,
    _by_product,
    amplitude,
    inverse_frequency,
    parse_scaling,
    rotary,
    rotate,
)

# head_dim 8, theta 10^4: 10^-(0, 1, 2, 3) radians per position.
PLAIN = [1.0, 0.1, 0.01, 0.001]


def test_default_and_linear():
    np.testing.assert_allclose(inverse_frequency(8, 1e4, None), PLAIN, rtol=1e-6)
    linear = inverse_frequency(8, 1e4, RopeScaling("linear", 4.0))
    np.testing.assert_allclose(linear, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-6)


def test_llama3_stretches_long_wavelengths_only():
    scaling = RopeScaling("llama3", 8.0, 200, low_freq_factor=1.0, high_freq_factor=4.0)
    # Turns in 200 tokens: 31.8, 3.18, 0.318, 0.0318. Above 4: kept. Below 1: / 8. Between: the
    # share (3.183 - 1) / (4 - 1) = 0.7277 is kept, 0.1 (0.7277 + 0.2723 / 8) = 0.07617.
    expected = [1.0, 0.07617, 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(inverse_frequency(8, 1e4, scaling), expected, rtol=1e-4)


def test_yarn_ramps_between_two_numbers_of_turns():
    scaling = RopeScaling("yarn", 4.0, 400, beta_fast=32.0, beta_slow=1.0)
    # dim of n turns: 8 ln(400 / (2 pi n)) / (2 ln 10^4); n = 32: 0.30 -> 0, n = 1: 1.80 -> 2.
    # Stretched shares 0, 1/2, 1, 1: 0.1 (1/2 + 1/8) = 0.0625.
    expected = [1.0, 0.0625, 0.0025, 0.00025]
    np.testing.assert_allclose(inverse_frequency(8, 1e4, scaling), expected, rtol=1e-5)
    assert amplitude(scaling) == pytest.approx(0.1 * math.log(4) + 1)
    assert amplitude(RopeScaling("yarn", 4.0, 400, attention_factor=1.5)) == 1.5
    assert amplitude(RopeScaling("linear", 4.0)) == amplitude(None) == 1.0
    cos, sin = (x.ravel() for x in rotary(np.array([[3]]), 8, 1e4, scaling))
    np.testing.assert_allclose(cos**2 + sin**2, [amplitude(scaling) ** 2] * 4, rtol=1e-6)


def test_a_quarter_turn():
    cos, sin = rotary(np.array([[1]]), 2, 1e4, None)
    np.testing.assert_allclose([cos.item(), sin.item()], [math.cos(1), math.sin(1)], rtol=1e-6)
    x = np.array([3.0, 4.0]).reshape(1, 1, 1, 2)
    turned = rotate(x, np.zeros((1, 1, 1, 1)), np.ones((1, 1, 1, 1)))
    np.testing.assert_array_equal(turned.ravel(), [-4.0, 3.0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_the_form_of_tpus_is_that_of_halves(dtype):
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.normal(size=(2, 7, 3, 8)), dtype) for _ in range(2))
    angle = rotary(np.arange(14).reshape(2, 7), 8, 1e4, None)
    turned, back = jax.vjp(lambda x: rotate(x, *angle), x)
    # two products and a sum, rounded to float32 each or all at once, then to the dtype
    exact = {"rtol": 3 * jnp.finfo(dtype).eps, "atol": 3e-7}
    wide = [y.astype(jnp.float32) for y in (_by_product(x, *angle), turned)]
    np.testing.assert_allclose(*wide, **exact)
    cos, sin = angle
    wide = [y.astype(jnp.float32) for y in (_by_product(g, cos, -sin), back(g)[0])]
    np.testing.assert_allclose(*wide, **exact)


def test_the_gradient_of_a_turn_is_the_turn_back():
    rng = np.random.default_rng(1)
    x, g = (rng.normal(size=(1, 5, 2, 8)).astype(np.float32) for _ in range(2))
    angle = rotary(np.arange(5)[None], 8, 1e4, None)
    turned, back = jax.vjp(rotate, x, *angle)
    dx, *rest = back(g)
    # with R the turn: <R x, g> = <x, R' g>, and R R' = 1
    np.testing.assert_allclose(np.vdot(turned, g), np.vdot(x, dx), rtol=1e-5)
    np.testing.assert_allclose(rotate(dx, *angle), g, atol=1e-6)
    assert not any(np.any(y) for y in rest)


@pytest.mark.parametrize("pairs", [False, True])
def test_part_of_a_head_turns(pairs):
    # a quarter turn of 4 of 6 dims: (a, b) -> (-b, a), of dims i and i + 2, or 2 i and 2 i + 1
    x = np.arange(1.0, 7.0, dtype=np.float32).reshape(1, 1, 1, 6)
    cos, sin = np.zeros((1, 1, 1, 2), np.float32), np.ones((1, 1, 1, 2), np.float32)
    expected = [-2, 1, -4, 3, 5, 6] if pairs else [-3, -4, 1, 2, 5, 6]
    np.testing.assert_array_equal(rotate(x, cos, sin, pairs).ravel(), expected)
    np.testing.assert_array_equal(_by_product(x, cos, sin, pairs).ravel(), expected)
    turned, back = jax.vjp(lambda x: rotate(x, cos, sin, pairs), x)
    np.testing.assert_array_equal(back(turned)[0], x)


def test_longrope_divides_by_the_short_factors():
    scaling = RopeScaling("longrope", 4.0, 16, short_factor=(1, 2, 4, 8), long_factor=(9,) * 4)
    expected = [1.0, 0.05, 0.0025, 0.000125]
    np.testing.assert_allclose(inverse_frequency(8, 1e4, scaling), expected, rtol=1e-6)
    # sqrt(1 + ln 4 / ln 16) = sqrt(1.5)
    assert amplitude(scaling) == pytest.approx(1.5**0.5)


def test_queries_grow_by_the_logarithm_of_whole_lengths():
    growth = QueryGrowth(0.5, 10).factor(jnp.array([[0, 9, 10, 35]]))
    expected = [1, 1, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(4)]
    np.testing.assert_allclose(growth.ravel(), expected, rtol=1e-6)


def test_original_length_defaults_to_the_context_length():
    rope = {"rope_type": "yarn", "factor": 2.0}
    assert parse_scaling(rope, "rope", 64) == RopeScaling("yarn", 2.0, 64)
    with pytest.raises(ValueError, match="'yarn' lacks original_max_position_embeddings"):
        parse_scaling(rope, "rope")
