"""A KL penalty for the tokens of highest covariance."""

from types import SimpleNamespace

import jax
import numpy as np

from jaxrl.losses.kl_cov import kl_cov

# mean log p = -2, mean A = 0: cov = 1 * 1, -1 * 1, -1 * 0, 1 * -2, 0 * 0
#   -> 1, -1, 0, -2, 0; the last token is masked and would be the highest by far
NEW = np.array([[-1.0, -1.0, -2.0, -4.0, -2.0, 50.0]], np.float32)
ADVANTAGES = np.array([[1, -1, -1, 1, 0, 99]], np.float32)
MASK = np.array([[1, 1, 1, 1, 1, 0]], np.float32)
OLD = NEW - np.array([[0.5, 0.5, 0.0, 0.0, -0.5, 0.0]], np.float32)


def config(fraction, coefficient=2.0):
    return SimpleNamespace(kl_cov=SimpleNamespace(kl_cov_frac=fraction, ppo_kl_coef=coefficient))


def loss_and_grad(fraction, row_ids=None):
    def objective(log_probs):
        loss, _ = kl_cov(log_probs, OLD, ADVANTAGES, config(fraction), MASK, row_ids=row_ids)
        return (loss * MASK).sum(), loss * MASK

    grad, loss = jax.grad(objective, has_aux=True)(NEW)
    return loss, grad


def test_literal_value_and_gradient():
    # k = max(1, floor(0.2 * 5)) = 1: the first token. r = exp(0.5) = 1.6487213
    #   token 0: L = -1.6487213 + 2 * 0.5 = -0.6487213, gradient -1.6487213 + 2 = 0.3512787
    #   token 1: L =  1.6487213; token 2: 1; token 3: -1; token 4: A = 0
    loss, grad = loss_and_grad(0.2)
    np.testing.assert_allclose(loss, [[-0.6487213, 1.6487213, 1, -1, 0, 0]], rtol=1e-5)
    np.testing.assert_allclose(grad, [[0.3512787, 1.6487213, 1, -1, 0, 0]], rtol=1e-5)


def test_equal_covariances_are_ranked_by_position():
    # k = 2: tokens 2 and 4 have cov 0, the earlier one wins; its |log r| = 0 has gradient 0
    loss, grad = loss_and_grad(0.4)
    np.testing.assert_allclose(loss[0, 2:5], [1, -1, 0], rtol=1e-6)
    np.testing.assert_allclose(grad[0, 2:5], [1, -1, 0], rtol=1e-6)
    # k = 3: token 4 with log r = -0.5: 2 * 0.5 = 1, gradient -2
    loss, grad = loss_and_grad(0.6)
    np.testing.assert_allclose(loss[0, 4], 1.0, rtol=1e-6)
    np.testing.assert_allclose(grad[0, 4], -2.0, rtol=1e-6)


def test_at_least_one_token_is_penalized():
    np.testing.assert_allclose(loss_and_grad(0.001)[0], loss_and_grad(0.2)[0])


def test_ties_do_not_depend_on_the_order_of_rows():
    # every covariance is 0: the penalty falls on row id 0, wherever it stands
    new, old = np.zeros((2, 1), np.float32), np.ones((2, 1), np.float32)
    for ids, expected in (([0, 1], [[2], [0]]), ([1, 0], [[0], [2]])):
        loss, _ = kl_cov(new, old, new, config(0.5), np.ones_like(new), row_ids=np.array(ids))
        np.testing.assert_allclose(loss, expected)
