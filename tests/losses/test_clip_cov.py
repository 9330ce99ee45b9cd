"""No gradient for a few tokens of high covariance."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.losses.clip_cov import clip_cov, draw

# mean log p = -2, mean A = 0: cov = 1, -1, 0, -2, 0; the last token is masked
NEW = np.array([[-1.0, -1.0, -2.0, -4.0, -2.0, 50.0]], np.float32)
ADVANTAGES = np.array([[1, -1, -1, 1, 0, 99]], np.float32)
MASK = np.array([[1, 1, 1, 1, 1, 0]], np.float32)
KEY = jax.random.key(0)


def config(ratio=0.2, low=0.5, high=5.0):
    return SimpleNamespace(
        eps_clip_low=0.2,
        eps_clip_high=0.2,
        clip_cov=SimpleNamespace(clip_ratio=ratio, clip_cov_lb=low, clip_cov_ub=high),
    )


def loss_and_grad(config, old=NEW):
    def objective(log_probs):
        loss, metrics = clip_cov(log_probs, old, ADVANTAGES, config, MASK, key=KEY)
        return (loss * MASK).sum(), (loss * MASK, metrics["clip_ratio"])

    grad, (loss, dropped) = jax.grad(objective, has_aux=True)(NEW)
    return loss, grad, dropped


def test_literal_with_one_candidate():
    # only the first token has 0.5 < cov < 5: it is dropped; elsewhere r = 1: L = -A, gradient -A
    loss, grad, dropped = loss_and_grad(config())
    np.testing.assert_allclose(loss, [[0, 1, 1, -1, 0, 0]], atol=1e-7)
    np.testing.assert_allclose(grad, [[0, 1, 1, -1, 0, 0]], atol=1e-7)
    np.testing.assert_array_equal(dropped, [[1, 0, 0, 0, 0, 0]])


def test_the_bounds_are_open_and_a_clipped_token_is_no_candidate():
    assert not loss_and_grad(config(low=1.0))[2].any()
    assert not loss_and_grad(config(high=1.0))[2].any()
    # r = exp(0.5) = 1.65 > 1.2 with A = 1: PPO's clip takes the first token, nothing is left
    loss, _, dropped = loss_and_grad(config(), old=NEW - 0.5)
    assert not dropped.any()
    np.testing.assert_allclose(loss[0, 0], -1.2, rtol=1e-6)


@pytest.mark.parametrize(("ratio", "count"), [(0.001, 1), (0.4, 2), (0.6, 3), (1.0, 5)])
def test_k_tokens_are_dropped_and_at_least_one(ratio, count):
    # k = max(1, floor(ratio * 5)) of the five candidates
    _, grad, dropped = loss_and_grad(config(ratio, low=-9.0))
    assert dropped.sum() == count
    np.testing.assert_array_equal(np.asarray(grad)[np.asarray(dropped)], 0)


def test_no_candidates_no_drop():
    assert not draw(jnp.zeros((2, 3), bool), jnp.asarray(2.0), KEY).any()


def test_the_draw_depends_on_key_row_id_and_position_alone():
    candidates = jnp.ones((4, 6), bool)
    drawn = np.asarray(draw(candidates, 8.0, KEY))
    padded = np.zeros((6, 9), bool)
    padded[:4, :6] = True
    np.testing.assert_array_equal(np.asarray(draw(padded, 8.0, KEY))[:4, :6], drawn)
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(draw(candidates, 8.0, KEY, jnp.asarray(order)), drawn[order])
    assert (np.asarray(draw(candidates, 8.0, jax.random.key(1))) != drawn).any()


def test_every_candidate_is_drawn_equally_often():
    # 2 of 8, 400 draws: 100 each, standard deviation sqrt(400 * 1/4 * 3/4) = 8.7
    keys = jax.random.split(KEY, 400)
    counts = jax.jit(jax.vmap(lambda key: draw(jnp.ones((2, 4), bool), 2.0, key)))(keys).sum(0)
    assert counts.sum() == 800
    assert np.abs(np.asarray(counts) - 100).max() < 35


def test_it_needs_a_key():
    with pytest.raises(ValueError, match="'clip_cov' draws tokens and needs key, got None"):
        clip_cov(NEW, NEW, ADVANTAGES, config(), MASK)
