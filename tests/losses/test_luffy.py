"""Demonstrations by their shaped probability, samples by the clipped surrogate."""

import jax
import numpy as np
import pytest

from jaxrl.array_ops import masked_sum
from jaxrl.config import AlgorithmConfig
from jaxrl.losses.luffy import luffy
from jaxrl.losses.regular import regular

CONFIG = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.2)
NEW = np.log(np.array([[0.5, 0.1, 0.9], [0.6, 0.3, 0.9]], np.float32))
OLD = np.log(np.array([[0.5, 0.5, 0.9], [0.4, 0.3, 0.9]], np.float32))
MASK = np.array([[1, 1, 0], [1, 1, 0]], np.float32)
ADVANTAGES = np.array([[2, 2, 2], [1, 1, 1]], np.float32)
GIVEN = np.array([True, False])


def test_literal_value_gradient_and_clip_ratio():
    # the first row is given: -A p / (p + 0.1) = -2 * 0.5 / 0.6, -2 * 0.1 / 0.2; its old
    # log-probs say nothing. Slope by log p: -A p 0.1 / (p + 0.1)^2 = -2 * 0.05 / 0.36,
    # -2 * 0.01 / 0.04. The second is sampled: ratio 1.5 is clipped to 1.2, ratio 1
    def objective(log_probs):
        loss, metrics = luffy(log_probs, OLD, ADVANTAGES, CONFIG, MASK, demonstrated=GIVEN)
        return masked_sum(loss, MASK), (loss, metrics)

    slope, (loss, metrics) = jax.grad(objective, has_aux=True)(NEW)
    expected = [[-5 / 3, -1, 0], [-1.2, -1, 0]]
    np.testing.assert_allclose(loss * MASK, expected, rtol=1e-6)
    np.testing.assert_allclose(slope, [[-0.1 / 0.36, -0.5, 0], [0, -1, 0]], rtol=1e-5)
    np.testing.assert_array_equal(metrics["clip_ratio"] * MASK, [[0, 0, 0], [1, 0, 0]])


def test_a_demonstration_is_never_clipped():
    # ratio 0.6 / 0.4 = 1.5 in both rows, above 1.2
    new, old = NEW[[1, 1]], OLD[[1, 1]]
    _, metrics = luffy(new, old, ADVANTAGES, CONFIG, MASK, demonstrated=GIVEN)
    np.testing.assert_array_equal(metrics["clip_ratio"] * MASK, [[0, 0, 0], [1, 0, 0]])


def test_the_slope_is_highest_where_the_probability_is_gamma():
    log_probs = np.log(np.linspace(0.01, 0.99, 99, dtype=np.float32))[None]
    ones, given = np.ones_like(log_probs), np.array([True])

    def total(log_probs):
        return luffy(log_probs, log_probs, ones, CONFIG, demonstrated=given, gamma=0.3)[0].sum()

    steepest = np.argmin(jax.grad(total)(log_probs))
    assert np.exp(log_probs[0, steepest]) == pytest.approx(0.3, abs=1e-6)


@pytest.mark.parametrize("given", [None, np.zeros(2, bool)])
def test_without_demonstrations_it_is_the_clipped_surrogate(given):
    expected = regular(NEW, OLD, ADVANTAGES, CONFIG, MASK)
    found = luffy(NEW, OLD, ADVANTAGES, CONFIG, MASK, demonstrated=given)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
