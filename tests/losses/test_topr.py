"""REINFORCE, tapered where the advantage is negative."""

import jax
import numpy as np
import pytest

from jaxrl.array_ops import masked_sum
from jaxrl.losses.topr import topr

# Two tokens count: their ratios multiply to W = 2, 1/2, 2.
RATIOS = np.array([[4, 0.5, 7], [0.25, 2, 1 / 7], [1, 2, 3]], np.float32)
MASK = np.array([[1, 1, 0]] * 3, np.float32)
ADVANTAGES = np.repeat(np.array([[1], [-1], [-1]], np.float32), 3, axis=1)
NEW = np.full_like(RATIOS, np.log(0.125))
ROLLOUT = NEW - np.log(RATIOS)


def test_literal_value_gradient_and_clip_ratio():
    # alpha = 1 where A > 0; min(1/2, 1) = 1/2; min(2, 1) = 1
    # L = -alpha A log p, log p = -2.0794415, gradient -alpha A
    def objective(log_probs):
        loss, metrics = topr(log_probs, None, ADVANTAGES, None, MASK, ROLLOUT)
        return masked_sum(loss, MASK), (loss, metrics)

    grad, (loss, metrics) = jax.grad(objective, has_aux=True)(NEW)
    expected = np.array([[2.0794415], [-1.0397208], [-2.0794415]]) * MASK
    np.testing.assert_allclose(loss * MASK, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, np.array([[-1], [0.5], [1]]) * MASK, rtol=1e-6)
    np.testing.assert_allclose(metrics["topr/alpha_mean"][:, 0], [1, 0.5, 1], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_ratio"][:, 0], [0, 0, 1])


def test_a_sequence_that_the_policy_has_left_is_let_go():
    loss, _ = topr(NEW, None, ADVANTAGES, None, MASK, NEW + np.float32(400))
    np.testing.assert_array_equal(loss[1:, :2], np.zeros((2, 2)))


def test_the_rollout_policy_is_needed():
    with pytest.raises(ValueError, match="'topr' needs rollout_log_probs, got None"):
        topr(NEW, NEW, ADVANTAGES, None)
