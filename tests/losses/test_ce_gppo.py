"""Clipped tokens keep a bounded gradient."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.ce_gppo import ROW, ce_gppo

CONFIG = SimpleNamespace(eps_clip_low=0.2, eps_clip_high=0.25)
RATIOS = np.array([[4, 1, 0.5, 0.5, 4]], np.float32)
ADVANTAGES = np.array([[1, -1, -2, 1, -1]], np.float32)
OLD = np.full_like(RATIOS, np.log(0.125))
NEW = OLD + np.log(RATIOS)


def loss_and_grad(**hyperparameters):
    def objective(log_probs):
        loss, metrics = ce_gppo(log_probs, OLD, ADVANTAGES, CONFIG, **hyperparameters)
        return loss.sum(), (loss, metrics["clip_ratio"])

    grad, (loss, clipped) = jax.grad(objective, has_aux=True)(NEW)
    return loss, clipped, grad


def test_literal_value_gradient_and_clip_ratio():
    # bounds 0.8 and 1.25, beta 0.75 and 1; L = -w A, gradient the same
    #   r = 4,   A =  1: above, w = 1 * 1.25:    -1.25
    #   r = 1,   A = -1: w = 1:                   1
    #   r = 0.5, A = -2: below, w = 0.75 * 0.8:   1.2
    #   r = 0.5, A =  1: PPO does not clip:      -0.5
    #   r = 4,   A = -1: nor here, and no second clip: 4
    loss, clipped, grad = loss_and_grad()
    np.testing.assert_allclose(loss, [[-1.25, 1, 1.2, -0.5, 4]], rtol=1e-6)
    np.testing.assert_allclose(grad, loss, rtol=1e-6)
    np.testing.assert_array_equal(clipped, [[1, 0, 1, 0, 0]])


def test_without_the_two_coefficients_the_gradient_is_ppos():
    _, _, grad = loss_and_grad(beta_1=0.0, beta_2=0.0)
    np.testing.assert_allclose(grad, [[0, 1, 0, -0.5, 4]], rtol=1e-6)


@pytest.mark.parametrize("name", ["beta_1", "beta_2"])
def test_negative_coefficients_are_refused(name):
    ((field, fix),) = ROW.check(AlgorithmConfig(policy_loss_kwargs={name: -1.0}))
    assert (field, fix) == (f"policy_loss_kwargs.{name}", "must be 0 or more, e.g. 0.75 and 1.0")
