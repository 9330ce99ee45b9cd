"""PPO's clipped surrogate."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.array_ops import masked_sum
from jaxrl.losses.regular import regular

CONFIG = SimpleNamespace(eps_clip_low=0.2, eps_clip_high=0.28)


def log_probs_of(ratio, old=0.125):
    """New and old log-probs [1, T] with the given ratios."""
    ratio = np.array([ratio], np.float32)
    return np.log(ratio * old), np.full_like(ratio, np.log(old))


def loss_and_grad(log_probs, old, advantages, weights, config=CONFIG):
    """Loss [B, T], and the gradient of sum(loss * weights)."""

    def objective(log_probs):
        loss, metrics = regular(log_probs, old, advantages, config)
        return masked_sum(loss, weights), (loss, metrics["clip_ratio"])

    grad, (loss, clipped) = jax.grad(objective, has_aux=True)(log_probs)
    return loss, clipped, grad


def test_literal_value_gradient_and_clip_ratio():
    # bounds 0.8 and 1.28; L = -min(r A, clip(r) A); dL/dlogp = -r A where unclipped, else 0
    #   r = 1.00, A =  2: -min( 2.00,  2.00) = -2.00, gradient -2.00
    #   r = 1.25, A =  1: -min( 1.25,  1.25) = -1.25, gradient -1.25  (clipped at 1.2 if symmetric)
    #   r = 1.50, A =  1: -min( 1.50,  1.28) = -1.28, gradient  0, clipped
    #   r = 1.50, A = -1: -min(-1.50, -1.28) =  1.50, gradient  1.50
    #   r = 0.50, A =  1: -min( 0.50,  0.80) = -0.50, gradient -0.50
    #   r = 0.50, A = -1: -min(-0.50, -0.80) =  0.80, gradient  0, clipped
    new, old = log_probs_of([1.0, 1.25, 1.5, 1.5, 0.5, 0.5])
    advantages = np.array([[2, 1, 1, -1, 1, -1]], np.float32)
    loss, clipped, grad = loss_and_grad(new, old, advantages, np.ones_like(new))
    np.testing.assert_allclose(loss, [[-2.0, -1.25, -1.28, 1.5, -0.5, 0.8]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[-2.0, -1.25, 0, 1.5, -0.5, 0]], rtol=1e-6)
    np.testing.assert_array_equal(clipped, [[0, 0, 1, 0, 0, 1]])


def test_the_bounds_are_separate():
    # A = 1 feels the upper bound only, 1 + 0.5; A = -1 the lower only, 1 - 0.1
    new, old = log_probs_of([2.0, 0.5])
    config = SimpleNamespace(eps_clip_low=0.1, eps_clip_high=0.5)
    loss, _, _ = loss_and_grad(new, old, np.array([[1.0, -1.0]]), np.ones_like(new), config)
    np.testing.assert_allclose(loss, [[-1.5, 0.9]], rtol=1e-6)


@pytest.mark.parametrize("eps", [0.2, 0.0])  # 0: the ratio of 1 lies on both bounds
def test_on_policy_gradient_is_minus_advantage_times_weight(eps):
    rng = np.random.default_rng(0)
    log_probs, advantages = rng.normal(-2, 1, (2, 3, 5)).astype(np.float32)
    weights = rng.uniform(0, 1, (3, 5)).astype(np.float32)
    config = SimpleNamespace(eps_clip_low=eps, eps_clip_high=eps)
    loss, clipped, grad = loss_and_grad(log_probs, log_probs, advantages, weights, config)
    np.testing.assert_array_equal(loss, -advantages)
    np.testing.assert_allclose(grad, -advantages * weights, rtol=1e-6)
    assert not clipped.any()


def test_what_is_masked_reaches_neither_value_nor_gradient():
    # r = 2 and 0.5, A = 1: -min(2, 1.28) and -min(0.5, 0.8); the sum is -1.78
    new, old = log_probs_of([2.0, 1.0, 1.0, 0.5])
    old[0, 1:3] = [np.nan, -np.inf]
    weights = np.array([[1, 0, 0, 1]], np.float32)
    loss, _, grad = loss_and_grad(new, old, np.ones_like(new), weights)
    np.testing.assert_allclose(masked_sum(loss, weights), -1.78, rtol=1e-6)
    np.testing.assert_allclose(grad, [[0, 0, 0, -0.5]], rtol=1e-6)


def test_a_huge_log_ratio_stays_finite():
    # log ratios 60 and -60 are taken for 20 and -20, without gradient: exp(20) = 4.8516520e8
    log_probs, old = np.array([[60.0, -60.0]], np.float32), np.zeros((1, 2), np.float32)
    loss, _, grad = loss_and_grad(log_probs, old, np.array([[-1.0, 1.0]]), np.ones((1, 2)))
    np.testing.assert_allclose(loss, [[4.8516520e8, -2.0611537e-9]], rtol=1e-5)
    np.testing.assert_array_equal(grad, [[0, 0]])


def test_bfloat16_log_probs_give_a_float32_ratio():
    # exp(0.5) = 1.6487213 in float32; bfloat16 would round it to 1.6484375
    log_probs, old = jnp.full((1, 1), -1.0, "bfloat16"), jnp.full((1, 1), -1.5, "bfloat16")
    config = SimpleNamespace(eps_clip_low=0.2, eps_clip_high=1.0)
    loss, _ = regular(log_probs, old, jnp.ones((1, 1), "bfloat16"), config)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, [[-1.6487213]], rtol=1e-6)


def test_jit_equals_eager():
    rng = np.random.default_rng(1)
    log_probs, old, advantages = rng.normal(-1, 0.5, (3, 4, 6)).astype(np.float32)
    inputs = (log_probs, old, advantages, np.ones_like(old))
    for eager, jitted in zip(loss_and_grad(*inputs), jax.jit(loss_and_grad)(*inputs), strict=True):
        np.testing.assert_allclose(jitted, eager, rtol=1e-6)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(AssertionError, match="shape"):
        regular(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.zeros((2, 1)), CONFIG)
