"""Bounds that depend on the old probability of the token."""

from types import SimpleNamespace

import jax
import numpy as np

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.dcpo import ROW, dcpo

CONFIG = SimpleNamespace(eps_clip_low=0.1875, eps_clip_high=0.75)
OLD = np.log(np.array([[1, 0.25, 0.25, 0.0075, 0.0075, 0.25]], np.float32))
RATIOS = np.array([[0.5, 2, 4, 12, 12, 0.6]], np.float32)
ADVANTAGES = np.array([[-1, 1, 1, 1, -1, -1]], np.float32)
NEW = OLD + np.log(RATIOS)


def test_literal_value_gradient_and_clip_ratio():
    # low = (1 + sqrt(max(1 - 0.75 / q, 0))) / 2, high = min((1 + sqrt(1 + 3 / q)) / 2, 10)
    #   q = 1:      low = (1 + sqrt(0.25)) / 2 = 0.75
    #   q = 0.25:   low = 1/2, high = (1 + sqrt(13)) / 2 = 2.3027756
    #   q = 0.0075: high = (1 + sqrt(401)) / 2 = 10.5, hence 10
    # r = 0.5, A = -1: 0.75, clipped;  r = 2, A = 1: -2;  r = 4, A = 1: -2.3027756, clipped
    # r = 12, A = 1: -10, clipped;  r = 12, A = -1: 10, bounded;  r = 0.6, A = -1: 0.6
    def objective(log_probs):
        loss, metrics = dcpo(log_probs, OLD, ADVANTAGES, CONFIG)
        return loss.sum(), (loss, metrics["clip_ratio"])

    grad, (loss, clipped) = jax.grad(objective, has_aux=True)(NEW)
    np.testing.assert_allclose(loss, [[0.75, -2, -2.3027756, -10, 10, 0.6]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[0, -2, 0, 0, 0, 0.6]], rtol=1e-6)
    np.testing.assert_array_equal(clipped, [[1, 0, 1, 1, 0, 0]])


def test_the_largest_ratio_is_a_hyperparameter():
    loss, _ = dcpo(NEW, OLD, ADVANTAGES, CONFIG, ratio_max=1.5)
    np.testing.assert_allclose(loss, [[0.75, -1.5, -1.5, -1.5, 1.5, 0.6]], rtol=1e-6)
    ((field, fix),) = ROW.check(AlgorithmConfig(policy_loss_kwargs={"ratio_max": 1.0}))
    assert (field, fix) == ("policy_loss_kwargs.ratio_max", "must be > 1, e.g. 10.0")


def test_a_token_that_was_all_but_impossible_gives_no_nan():
    old = np.array([[-500.0]], np.float32)
    loss, _ = dcpo(old, old, np.ones((1, 1), np.float32), CONFIG)
    np.testing.assert_array_equal(loss, [[-1]])
