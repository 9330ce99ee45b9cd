"""The plain importance-weighted policy gradient."""

import jax
import numpy as np

from jaxrl.array_ops import masked_mean, masked_sum
from jaxrl.losses.importance_sampling import importance_sampling
from jaxrl.losses.reduction import reduction_weights

# ratios 2, 1/2, exp(3) = 20.0855369 (nothing is clamped); A = 1, -1, 1
NEW = np.array([[np.log(2), np.log(0.5), 3.0]], np.float32) - 4
OLD = np.full_like(NEW, -4.0)
ADVANTAGES = np.array([[1, -1, 1]], np.float32)


def test_literal_value_gradient_and_metric():
    def objective(log_probs):
        loss, metrics = importance_sampling(log_probs, OLD, ADVANTAGES)
        return loss.sum(), (loss, metrics["importance_ratio"])

    grad, (loss, ratio) = jax.grad(objective, has_aux=True)(NEW)
    np.testing.assert_allclose(loss, [[-2, 0.5, -20.0855369]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[-2, 0.5, -20.0855369]], rtol=1e-6)
    np.testing.assert_allclose(ratio, [[2, 0.5, 20.0855369]], rtol=1e-6)


def test_the_metric_of_an_empty_mask_is_zero():
    _, metrics = importance_sampling(NEW, OLD, ADVANTAGES, loss_mask=np.zeros_like(NEW))
    assert masked_mean(metrics["importance_ratio"], np.zeros_like(NEW)) == 0


def test_it_is_reduced_like_every_loss():
    # (-2 + 0.5) / 2 over the first two tokens
    mask = np.array([[1, 1, 0]], np.float32)
    loss, _ = importance_sampling(NEW, OLD, ADVANTAGES, loss_mask=mask)
    weights = reduction_weights(mask, "token_mean")
    np.testing.assert_allclose(masked_sum(loss, weights), -0.75, rtol=1e-6)
