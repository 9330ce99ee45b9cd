"""Negative log-likelihood."""

import jax
import numpy as np

from jaxrl.array_ops import masked_sum
from jaxrl.losses.cross_entropy import cross_entropy


def test_literal_value_and_gradient():
    # -log(1/2) = 0.6931472, -log(1/8) = 2.0794415; weights 1/2 and 1/4; gradient = -weights
    # 0.6931472 / 2 + 2.0794415 / 4 = 0.8664340
    log_probs = np.log(np.array([[0.5, 0.125]], np.float32))
    weights = np.array([[0.5, 0.25]], np.float32)
    value, grad = jax.value_and_grad(lambda x: masked_sum(cross_entropy(x)[0], weights))(log_probs)
    np.testing.assert_allclose(cross_entropy(log_probs)[0], [[0.6931472, 2.0794415]], rtol=1e-6)
    np.testing.assert_allclose(value, 0.8664340, rtol=1e-6)
    np.testing.assert_array_equal(grad, [[-0.5, -0.25]])


def test_nothing_but_log_probs_matters():
    log_probs = np.array([[-1.0, -2.0]], np.float32)
    poison = np.full_like(log_probs, np.nan)
    loss, metrics = cross_entropy(log_probs, poison, poison, None, poison, poison)
    np.testing.assert_array_equal(loss, [[1.0, 2.0]])
    assert set(metrics) == {"clip_ratio"} and metrics["clip_ratio"] == 0


def test_what_is_masked_reaches_neither_value_nor_gradient():
    log_probs = np.array([[-1.0, np.nan, -np.inf, -2.0]], np.float32)
    weights = np.array([[0.5, 0, 0, 0.5]], np.float32)
    # (1 + 2) / 2
    value, grad = jax.value_and_grad(lambda x: masked_sum(cross_entropy(x)[0], weights))(log_probs)
    np.testing.assert_array_equal(value, 1.5)
    np.testing.assert_array_equal(grad, [[-0.5, 0, 0, -0.5]])


def test_jit_equals_eager():
    log_probs = np.random.default_rng(0).normal(-1, 1, (3, 4)).astype(np.float32)
    np.testing.assert_array_equal(
        jax.jit(lambda x: cross_entropy(x)[0])(log_probs), cross_entropy(log_probs)[0]
    )
