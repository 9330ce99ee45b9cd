"""The plain policy gradient."""

import jax
import numpy as np

from jaxrl.losses.gpg import gpg


def test_literal_value_and_gradient():
    # L = -A log p: 0.6931472 and 2 * -2.0794415; gradient -A
    log_probs = np.log(np.array([[0.5, 0.125]], np.float32))
    advantages = np.array([[1, -2]], np.float32)
    loss, metrics = gpg(log_probs, None, advantages, None)
    np.testing.assert_allclose(loss, [[0.6931472, -4.1588831]], rtol=1e-6)
    assert metrics["clip_ratio"] == 0
    grad = jax.grad(lambda x: gpg(x, None, advantages, None)[0].sum())(log_probs)
    np.testing.assert_array_equal(grad, -advantages)
