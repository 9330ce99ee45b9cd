"""A smooth weight of each sequence's ratio."""

import jax
import numpy as np

from jaxrl.array_ops import masked_sum
from jaxrl.config import AlgorithmConfig
from jaxrl.losses.vespo import ROW, vespo

# Two tokens count: their ratios multiply to W = 2, 1/2 and 1.
RATIOS = np.array([[4, 0.5, 7], [0.25, 2, 1 / 7], [1, 1, 3]], np.float32)
MASK = np.array([[1, 1, 0]] * 3, np.float32)
ADVANTAGES = np.repeat(np.array([[1], [-1], [2]], np.float32), 3, axis=1)
NEW = np.full_like(RATIOS, np.log(0.125))
OLD = NEW - np.log(RATIOS)


def loss_and_grad(new=NEW, old=OLD, **hyperparameters):
    def objective(log_probs):
        loss, metrics = vespo(log_probs, old, ADVANTAGES, None, MASK, **hyperparameters)
        return masked_sum(loss, MASK), (loss, metrics["vespo/phi_mean"])

    grad, (loss, phi) = jax.grad(objective, has_aux=True)(new)
    return loss, phi, grad


def test_literal_value_and_gradient():
    # phi = W^k exp(lambda (1 - W)), k = 2, lambda = 3 where A >= 0, else 3 and 2
    #   W = 2:   4 exp(-3) = 0.1991483;  W = 1/2, A < 0: exp(1) / 8 = 0.3397852;  W = 1: 1
    # L = -phi A log p, log p = -2.0794415, gradient -phi A
    loss, phi, grad = loss_and_grad()
    np.testing.assert_allclose(phi[:, 0], [0.1991483, 0.3397852, 1], rtol=1e-5)
    expected = np.array([[0.4141172], [-0.7065635], [4.1588831]]) * MASK
    np.testing.assert_allclose(loss * MASK, expected, rtol=1e-5)
    expected = np.array([[-0.1991483], [0.3397852], [-2]]) * MASK
    np.testing.assert_allclose(grad, expected, rtol=1e-5)


def test_the_hyperparameters_are_those_of_the_sign():
    # positive rows: W = 2: 2^1 exp(-1) = 0.7357589; the negative: (1/2)^2 exp(1/2 * 4) = 1.8472640
    _, phi, _ = loss_and_grad(k_pos=1.0, lambda_pos=1.0, k_neg=2.0, lambda_neg=4.0)
    np.testing.assert_allclose(phi[:, 0], [0.7357589, 1.8472640, 1], rtol=1e-5)


def test_far_sequences_have_no_weight_and_no_nan():
    for far in (-500.0, 500.0):
        loss, phi, grad = loss_and_grad(old=NEW - np.float32(far))
        assert np.isfinite(loss).all()
        assert np.isfinite(grad).all()
        assert phi.max() < 1e-10


def test_hyperparameters_out_of_range_are_refused():
    kwargs = {"k_pos": -1.0, "k_neg": 0.0, "lambda_pos": 0.0, "lambda_neg": 2.0}
    problems = dict(ROW.check(AlgorithmConfig(policy_loss_kwargs=kwargs)))
    assert problems == {
        "policy_loss_kwargs.k_pos": "must be 0 or more, e.g. 2.0",
        "policy_loss_kwargs.lambda_pos": "must be > 0, e.g. 3.0",
    }
