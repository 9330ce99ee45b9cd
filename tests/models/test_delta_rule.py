"""The gated delta rule: chunks against single steps, segments, and the inverse within a chunk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import delta_rule
from jaxrl.models.delta_rule import convolve, inverse_of_unit_lower, step

chunked = jax.jit(delta_rule.chunked, static_argnames="chunk")
KEYS, VALUES, WIDTH, VALUE_WIDTH = 2, 4, 8, 6


def draw(tokens, rows=2, seed=0):
    """q, k, v, log_decay, strength of rows; heads forget nothing, some, or nearly all."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    q, k = (normal((rows, tokens, KEYS, WIDTH)) for _ in "qk")
    q, k = (np.float32(x / np.linalg.norm(x, axis=-1, keepdims=True)) for x in (q, k))
    v = np.float32(normal((rows, tokens, VALUES, VALUE_WIDTH)))
    rate = rng.choice([0.01, 1.0, 20.0], (1, 1, VALUES))
    log_decay = np.float32(-rate * rng.exponential(1, (rows, tokens, VALUES)))
    return q, k, v, log_decay, np.float32(rng.random((rows, tokens, VALUES)))


@jax.jit
def step_by_step(given, ids):
    """The rule as its definition has it, token by token; states begin anew with segments."""
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))

    def one(state, of):
        (*token, begins) = of
        out, state = step(*token, jnp.where(begins[:, None, None, None], 0, state))
        return state, out

    state = jnp.zeros((len(ids), VALUES, WIDTH, VALUE_WIDTH))
    by_token = [jnp.swapaxes(x, 0, 1) for x in (*given, begins)]
    state, out = jax.lax.scan(one, state, by_token)
    return jnp.swapaxes(out, 0, 1), state


def test_a_step_by_hand():
    """d = e = 1: S = 0.5 * 4 = 2; d = 0.25 (3 - 2 * 1) = 0.25; S = 2.25; o = 2 * 2.25 = 4.5."""
    q, k, v = (jnp.full((1, 1, 1), x) for x in (2.0, 1.0, 3.0))
    out, state = step(q, k, v, jnp.log(jnp.full((1, 1), 0.5)), jnp.full((1, 1), 0.25), 4 * k[None])
    assert (float(out[0, 0, 0]), float(state[0, 0, 0, 0])) == (4.5, 2.25)


@pytest.mark.parametrize("tokens, chunk", [(1, 64), (50, 16), (70, 64)])
def test_chunks_are_steps(tokens, chunk):
    given = draw(tokens)
    ids = np.ones((2, tokens), int)
    ids[0, tokens // 3 :] = 2
    ids[0, tokens // 2 :] = 3
    out, state = chunked(*given, ids, chunk=chunk)
    expected = step_by_step(given, ids)
    np.testing.assert_allclose(out, expected[0], atol=2e-6)
    np.testing.assert_allclose(state, expected[1], atol=2e-6)


def test_a_row_goes_on_from_the_state_of_its_beginning():
    given, ids = draw(40), np.ones((2, 40), int)
    out, state = chunked(*given, ids, chunk=16)
    first, between = chunked(*(x[:, :23] for x in given), ids[:, :23], chunk=16)
    rest, end = chunked(*(x[:, 23:] for x in given), ids[:, 23:], between, chunk=16)
    np.testing.assert_allclose(jnp.concatenate([first, rest], axis=1), out, atol=2e-6)
    np.testing.assert_allclose(end, state, atol=2e-6)


def test_tokens_of_no_strength_and_no_decay_leave_the_state_as_it_is():
    *qkv, log_decay, strength = draw(20)
    real = (np.arange(20) < 11)[None, :, None]
    state = chunked(*qkv, log_decay * real, strength * real, np.ones((2, 20), int))[1]
    short = chunked(*(x[:, :11] for x in (*qkv, log_decay, strength)), np.ones((2, 11), int))[1]
    np.testing.assert_allclose(state, short, atol=1e-6)


def test_gradients_of_chunks_are_those_of_steps_and_stay_within_segments():
    given, ids = draw(30), np.ones((2, 30), int)
    ids[:, 13:] = 2
    weights = np.random.default_rng(1).standard_normal((2, 30, VALUES, VALUE_WIDTH))

    @jax.jit
    def gradients(given, weights):
        def by_chunks(given):
            return jnp.sum(chunked(*given, ids, chunk=8)[0] * weights)

        def by_steps(given):
            return jnp.sum(step_by_step(given, ids)[0] * weights)

        return jax.grad(by_chunks)(given), jax.grad(by_steps)(given)

    for one, other in zip(*gradients(given, weights), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    # what is behind a border has no gradient from before it, nor the other way round
    first = (np.arange(30) < 13)[None, :, None, None]
    apart, _ = gradients(given, weights * first)
    assert all(not np.any(np.asarray(x)[:, 13:]) for x in apart)
    assert all(np.any(np.asarray(x)[:, :13]) for x in apart)


def test_decays_of_nearly_nothing_overflow_nowhere():
    """A quotient of products of decays would be 0 / 0 after exp(-40 * 40)."""
    *qkv, log_decay, strength = draw(64)
    given = *qkv, np.full_like(log_decay, -40.0), strength
    ids = np.ones((2, 64), int)

    def total(given):
        out = chunked(*given, ids)[0]
        return jnp.sum(out), out

    gradients, out = jax.jit(jax.grad(total, has_aux=True))(given)
    assert all(np.isfinite(x).all() for x in (out, *gradients))
    alone = strength[..., None] * given[2]  # of each token alone: (q k) b v
    overlap = np.repeat(np.sum(given[0] * given[1], -1), VALUES // KEYS, axis=2)[..., None]
    np.testing.assert_allclose(out, overlap * alone, atol=1e-6)


@pytest.mark.parametrize("size", [1, 5, 64])
def test_the_inverse_of_a_unit_triangle_and_its_gradient(size):
    rng = np.random.default_rng(0)
    below = np.tril(rng.uniform(-1, 1, (3, size, size)), -1).astype(np.float32)
    whole = np.eye(size) + below.astype(np.float64)
    exact = np.linalg.inv(whole)
    g = rng.standard_normal((3, size, size))

    @jax.jit
    def both(below):
        inverse, pull = jax.vjp(inverse_of_unit_lower, below)
        return inverse, pull(jnp.asarray(g, jnp.float32))[0]

    inverse, found = both(below)
    np.testing.assert_allclose(inverse, exact, rtol=1e-4, atol=1e-4 * abs(exact).max())
    wanted = np.tril(-np.swapaxes(exact, -1, -2) @ g @ np.swapaxes(exact, -1, -2), -1)
    np.testing.assert_allclose(found, wanted, atol=1e-4 * max(abs(wanted).max(), 1))


def test_a_triangle_of_equal_keys_is_inverted_exactly():
    """I + lower ones has the inverse I - first lower diagonal; powers of it would overflow."""
    found = jax.jit(inverse_of_unit_lower)(np.tril(np.ones((64, 64), np.float32), -1))
    np.testing.assert_array_equal(found, np.eye(64) - np.eye(64, k=-1))


def test_a_convolution_by_hand_and_within_segments():
    """W = 3, kernel (1, 10, 100): 100 x_t + 10 x_{t-1} + x_{t-2}, of one segment."""
    x = jnp.asarray([[1.0, 2, 3, 4, 5]])[..., None]
    kernel = jnp.asarray([[1.0, 10, 100]])
    assert convolve(x, kernel)[0, :, 0].tolist() == [100, 210, 321, 432, 543]
    ids = jnp.asarray([[1, 1, 2, 2, 2]])
    assert convolve(x, kernel, ids)[0, :, 0].tolist() == [100, 210, 300, 430, 543]
    before = jnp.asarray([[8.0, 9]])[..., None]
    assert convolve(x, kernel, before=before)[0, :, 0].tolist() == [198, 219, 321, 432, 543]
