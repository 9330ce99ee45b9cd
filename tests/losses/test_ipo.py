"""A trust region on probabilities, whatever the sign of the advantage."""

import jax
import numpy as np
import pytest

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.ipo import ROW, ipo

# p - q: 0, 1/4, 1/16; u: 1, 2, 2
NEW = np.log(np.array([[0.5, 0.5, 0.125]], np.float32))
ROLLOUT = np.log(np.array([[0.5, 0.25, 0.0625]], np.float32))
ADVANTAGES = np.array([[1, 1, -1]], np.float32)


def loss_and_grad(**hyperparameters):
    def objective(log_probs):
        loss, metrics = ipo(log_probs, None, ADVANTAGES, None, None, ROLLOUT, **hyperparameters)
        return loss.sum(), (loss, metrics["clip_ratio"])

    grad, (loss, dropped) = jax.grad(objective, has_aux=True)(NEW)
    return loss, dropped, grad


def test_literal_value_gradient_and_dropped_tokens():
    # L = -u A + 0.001 (log u)^2, gradient -u A + 0.002 log u; log 2 = 0.6931472, squared 0.4804530
    #   u = 1, A =  1: -1, gradient -1
    #   u = 2, A =  1: 1/4 > 0.1, only the penalty: 0.0004804530, gradient 0.0013862944
    #   u = 2, A = -1: 2 + 0.0004804530, gradient 2 + 0.0013862944
    loss, dropped, grad = loss_and_grad()
    np.testing.assert_allclose(loss, [[-1, 0.0004804530, 2.0004804530]], rtol=1e-5)
    np.testing.assert_allclose(grad, [[-1, 0.0013862944, 2.0013862944]], rtol=1e-5)
    np.testing.assert_array_equal(dropped, [[0, 1, 0]])


def test_the_hyperparameters_are_threshold_and_penalty():
    _, dropped, grad = loss_and_grad(threshold=0.3, kl_tau=0.0)
    np.testing.assert_allclose(grad, [[-1, -2, 2]], rtol=1e-6)
    assert not dropped.any()
    kwargs = {"threshold": -0.1, "kl_tau": -1.0}
    problems = dict(ROW.check(AlgorithmConfig(policy_loss_kwargs=kwargs)))
    assert list(problems) == ["policy_loss_kwargs.threshold", "policy_loss_kwargs.kl_tau"]


def test_the_rollout_policy_is_needed():
    with pytest.raises(ValueError, match="'ipo' needs rollout_log_probs, got None"):
        ipo(NEW, NEW, ADVANTAGES, None)
