"""A smooth gate in place of the clip."""

from types import SimpleNamespace

import jax
import numpy as np

from jaxrl.array_ops import masked_sum
from jaxrl.losses.sapo import sapo

CONFIG = SimpleNamespace(sapo=SimpleNamespace(tau_pos=1.0, tau_neg=2.0))


def log_probs_of(ratio, old=0.125):
    """New and old log-probs [1, T] with the given ratios."""
    ratio = np.array([ratio], np.float32)
    return np.log(ratio * old), np.full_like(ratio, np.log(old))


def test_literal_value_and_gradient():
    # s = sigmoid(tau (r - 1)); L = -(4 / tau) s A; dL/dlogp = -4 s (1 - s) r A
    #   r = 2, A =  1, tau 1: s = sigmoid(1)  = 0.7310586: L = -2.9242343,
    #                         gradient -4 * 0.7310586 * 0.2689414 * 2 = -1.5728955
    #   r = 2, A = -1, tau 2: s = sigmoid(2)  = 0.8807971: L = 2 s = 1.7615942,
    #                         gradient  4 * 0.8807971 * 0.1192029 * 2 = 0.8399487
    #   r = 1, A = -3, tau 2: s = 1/2: L = 2 * 0.5 * 3 = 3, gradient 4 * 0.25 * 3 = 3 = -A
    #   r = 1, A =  0: 0, 0
    new, old = log_probs_of([2.0, 2.0, 1.0, 1.0])
    advantages = np.array([[1, -1, -3, 0]], np.float32)

    def objective(log_probs):
        loss, metrics = sapo(log_probs, old, advantages, CONFIG)
        return loss.sum(), (loss, metrics)

    grad, (loss, metrics) = jax.grad(objective, has_aux=True)(new)
    np.testing.assert_allclose(loss, [[-2.9242343, 1.7615942, 3, 0]], rtol=1e-5)
    np.testing.assert_allclose(grad, [[-1.5728955, 0.8399487, 3, 0]], rtol=1e-5)
    assert metrics["clip_ratio"] == 0


def test_the_log_ratio_is_clamped_at_20_where_the_gradient_passes():
    # at 20 and -20 the clamp passes the gradient, past them it does not; there sigmoid is 1 or
    # sigmoid(-1): L = -4 A and -4 * 0.2689414 A = -1.0757657 A
    new = np.array([[20.0, -20.0, 21.0, -21.0]], np.float32)
    loss, _ = sapo(new, np.zeros_like(new), np.ones_like(new), CONFIG)
    np.testing.assert_allclose(loss, [[-4, -1.0757657, -4, -1.0757657]], rtol=1e-6)
    grad = jax.grad(
        lambda x: masked_sum(sapo(x, np.zeros_like(new), np.ones_like(new), CONFIG)[0], None)
    )(new)
    # -4 s (1 - s) r with s (1 - s) = 0.1966119 and r = exp(-20) = 2.0611536e-9
    np.testing.assert_allclose(grad, [[0, -1.6209833e-9, 0, 0]], rtol=1e-4, atol=1e-15)
