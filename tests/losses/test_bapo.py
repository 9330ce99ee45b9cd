"""Bounds that balance the good tokens of a minibatch with the bad ones."""

import jax
import numpy as np
import pytest

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.bapo import ROW, bapo

ADVANTAGES = np.array([[1, -1]], np.float32)
OLD = np.log(np.array([[0.25, 0.5]], np.float32))


def loss_and_grad(ratios, mask=None, advantages=ADVANTAGES, **hyperparameters):
    def objective(log_probs):
        loss, metrics = bapo(log_probs, OLD, advantages, None, mask, **hyperparameters)
        return loss.sum(), (loss, metrics)

    new = OLD + np.log(np.array([ratios], np.float32))
    grad, (loss, metrics) = jax.grad(objective, has_aux=True)(new)
    return loss, grad, metrics


def test_literal_value_gradient_and_bounds():
    # ratios 2 and 1, old probabilities 1/4 and 1/2; the share of the good token is
    #   high = 1.2:  0.25 * 1.2  = 0.3    of 0.3    + 0.5: 0.375
    #   high = 1.3:  0.25 * 1.3  = 0.325  of 0.325  + 0.5: 0.3939
    #   high = 1.35: 0.25 * 1.35 = 0.3375 of 0.3375 + 0.5: 0.4030 >= 0.4
    loss, grad, metrics = loss_and_grad([2, 1])
    np.testing.assert_allclose(loss, [[-1.35, 1]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[0, 1]], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_ratio"], [[1, 0]])
    np.testing.assert_allclose([metrics["bapo/low"], metrics["bapo/high"]], [0.6, 1.35], rtol=1e-6)


def test_where_the_share_is_out_of_reach_both_bounds_go_to_their_ends():
    # ratios 2 and 0.8: at high = 3 the first is not clipped, at low = 0.9 the second is
    loss, grad, metrics = loss_and_grad([2, 0.8], rho=0.9)
    np.testing.assert_allclose(loss, [[-2, 0.9]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[-2, 0]], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_ratio"], [[0, 1]])
    np.testing.assert_allclose([metrics["bapo/low"], metrics["bapo/high"]], [0.9, 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("mask", "advantages"), [([[1, 0]], ADVANTAGES), (None, np.zeros_like(ADVANTAGES))]
)
def test_nothing_is_widened_where_no_bad_token_counts(mask, advantages):
    mask = mask and np.array(mask, np.float32)
    _, _, metrics = loss_and_grad([2, 1], mask, advantages, rho=0.9)
    np.testing.assert_allclose([metrics["bapo/low"], metrics["bapo/high"]], [0.6, 1.2], rtol=1e-6)


def test_hyperparameters_out_of_range_are_refused():
    kwargs = {"rho": 2.0, "low_min": 0.95, "high_min": 0.5, "low_step": 0.0}
    problems = dict(ROW.check(AlgorithmConfig(policy_loss_kwargs=kwargs)))
    assert problems == {
        "policy_loss_kwargs.rho": "must be in [0, 1], e.g. 0.4",
        "policy_loss_kwargs.low_min": "must be between 0 and low_max=0.9, and that at most 1",
        "policy_loss_kwargs.high_min": "must be between 1 and high_max=3",
        "policy_loss_kwargs.low_step": "must be > 0, e.g. 0.05",
    }
