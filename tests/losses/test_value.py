"""The critic's loss."""

import jax
import numpy as np

from jaxrl.losses.value import value_loss

OLD = np.zeros((1, 5), np.float32)
VALUES = np.array([[0.1, 0.5, 0.5, -0.5, 0.25]], np.float32)
RETURNS = np.array([[1.0, 1.0, 0.0, 1.0, 1.0]], np.float32)


def loss_and_grad(value_clip):
    def objective(values):
        loss, metrics = value_loss(values, OLD, RETURNS, value_clip)
        return loss.sum(), (loss, metrics["clipfrac"])

    grad, (loss, clipped) = jax.grad(objective, has_aux=True)(VALUES)
    return loss, grad, clipped


def test_literal_value_gradient_and_clipfrac():
    # c = V limited to [-0.25, 0.25]; half of the larger square
    #   V =  0.1,  R = 1: inside: 0.9^2 / 2 = 0.405, gradient -0.9
    #   V =  0.5,  R = 1: c = 0.25: 0.75^2 / 2 = 0.28125 over 0.5^2 / 2, gradient 0, clipped
    #   V =  0.5,  R = 0: c = 0.25: 0.0625 / 2 under 0.25 / 2 = 0.125, gradient 0.5
    #   V = -0.5,  R = 1: c = -0.25: 1.5625 / 2 under 2.25 / 2 = 1.125, gradient -1.5
    #   V =  0.25, R = 1: at the bound: 0.28125, the gradient passes: -0.75
    loss, grad, clipped = loss_and_grad(0.25)
    np.testing.assert_allclose(loss, [[0.405, 0.28125, 0.125, 1.125, 0.28125]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[-0.9, 0, 0.5, -1.5, -0.75]], rtol=1e-6)
    np.testing.assert_array_equal(clipped, [[0, 1, 0, 0, 0]])


def test_without_a_clip():
    # (V - R)^2 / 2
    loss, grad, clipped = loss_and_grad(None)
    np.testing.assert_allclose(loss, [[0.405, 0.125, 0.125, 1.125, 0.28125]], rtol=1e-6)
    np.testing.assert_allclose(grad, VALUES - RETURNS, rtol=1e-6)
    assert not clipped.any()


def test_rounding_is_no_clipping():
    rng = np.random.default_rng(0)
    old, values = rng.uniform(-0.1, 0.1, (2, 4, 64)).astype(np.float32)
    assert (old + (values - old) != values).any()
    _, metrics = value_loss(values, old, np.zeros_like(old), 0.2)
    assert not metrics["clipfrac"].any()


def test_what_is_masked_reaches_neither_value_nor_gradient():
    mask = np.array([[1, 0, 1, 1, 1]], np.float32)
    returns = RETURNS.copy()
    returns[0, 1] = np.nan
    grad = jax.grad(lambda v: value_loss(v, OLD, returns, 0.25, mask)[0].sum())(VALUES)
    np.testing.assert_allclose(grad, [[-0.9, 0, 0.5, -1.5, -0.75]], rtol=1e-6)
