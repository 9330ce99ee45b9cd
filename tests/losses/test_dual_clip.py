"""PPO with a second clip for negative advantages."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.array_ops import masked_sum
from jaxrl.losses.dual_clip import dual_clip
from jaxrl.losses.regular import regular

CONFIG = SimpleNamespace(eps_clip_low=0.2, eps_clip_high=0.28, clip_ratio_c=3.0)


def log_probs_of(ratio, old=0.125):
    """New and old log-probs [1, T] with the given ratios."""
    ratio = np.array([ratio], np.float32)
    return np.log(ratio * old), np.full_like(ratio, np.log(old))


def loss_and_grad(log_probs, old, advantages, weights, config=CONFIG):
    """Loss [B, T], and the gradient of sum(loss * weights)."""

    def objective(log_probs):
        loss, metrics = dual_clip(log_probs, old, advantages, config)
        return masked_sum(loss, weights), (loss, metrics["clip_ratio"])

    grad, (loss, clipped) = jax.grad(objective, has_aux=True)(log_probs)
    return loss, clipped, grad


def test_literal_value_gradient_and_clip_ratio():
    # bounds 0.8 and 1.28, c = 3; where A < 0 the loss is min(L, -3 A)
    #   r = 4.0, A = -1: L = -min(-4, -1.28)   = 4.0, min(4.0, 3) = 3, gradient 0
    #   r = 2.0, A = -1: L = -min(-2, -1.28)   = 2.0, below 3,         gradient -r A = 2
    #   r = 0.5, A = -2: L = -min(-1, -1.6)    = 1.6, gradient 0, first clip
    #   r = 4.0, A =  1: L = -min(4, 1.28)     = -1.28, gradient 0, first clip; no second for A > 0
    #   r = 4.0, A =  0: L = 0, gradient 0
    new, old = log_probs_of([4.0, 2.0, 0.5, 4.0, 4.0])
    advantages = np.array([[-1, -1, -2, 1, 0]], np.float32)
    loss, clipped, grad = loss_and_grad(new, old, advantages, np.ones_like(new))
    np.testing.assert_allclose(loss, [[3, 2, 1.6, -1.28, 0]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[0, 2, 0, 0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(clipped, [[0, 0, 1, 1, 0]])


def test_equals_regular_for_a_bound_out_of_reach():
    rng = np.random.default_rng(0)
    log_probs, old, advantages = rng.normal(-1, 1, (3, 4, 6)).astype(np.float32)
    far = SimpleNamespace(eps_clip_low=0.2, eps_clip_high=0.28, clip_ratio_c=1e6)
    np.testing.assert_array_equal(
        dual_clip(log_probs, old, advantages, far)[0],
        regular(log_probs, old, advantages, CONFIG)[0],
    )


def test_on_policy_gradient_is_minus_advantage_times_weight():
    rng = np.random.default_rng(0)
    log_probs, advantages = rng.normal(-2, 1, (2, 3, 5)).astype(np.float32)
    weights = rng.uniform(0, 1, (3, 5)).astype(np.float32)
    loss, _, grad = loss_and_grad(log_probs, log_probs, advantages, weights)
    np.testing.assert_array_equal(loss, -advantages)
    np.testing.assert_allclose(grad, -advantages * weights, rtol=1e-6)


def test_what_is_masked_reaches_neither_value_nor_gradient():
    # r = 4, A = -1: 3 by the second clip; r = 2: 2; together 5
    new, old = log_probs_of([4.0, 1.0, 1.0, 2.0])
    old[0, 1:3] = [np.nan, -np.inf]
    weights = np.array([[1, 0, 0, 1]], np.float32)
    loss, _, grad = loss_and_grad(new, old, -np.ones_like(new), weights)
    np.testing.assert_allclose(masked_sum(loss, weights), 5.0, rtol=1e-6)
    np.testing.assert_allclose(grad, [[0, 0, 0, 2.0]], rtol=1e-6)


def test_bfloat16_log_probs_give_a_float32_ratio():
    # A = -1, r = exp(0.5) = 1.6487213 in float32; bfloat16 would round it to 1.6484375
    log_probs, old = jnp.full((1, 1), -1.0, "bfloat16"), jnp.full((1, 1), -1.5, "bfloat16")
    loss, _ = dual_clip(log_probs, old, -jnp.ones((1, 1), "bfloat16"), CONFIG)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, [[1.6487213]], rtol=1e-6)


def test_jit_equals_eager():
    rng = np.random.default_rng(1)
    log_probs, old, advantages = rng.normal(-1, 1, (3, 4, 6)).astype(np.float32)
    inputs = (log_probs, old, advantages, np.ones_like(old))
    for eager, jitted in zip(loss_and_grad(*inputs), jax.jit(loss_and_grad)(*inputs), strict=True):
        np.testing.assert_allclose(jitted, eager, rtol=1e-6)
