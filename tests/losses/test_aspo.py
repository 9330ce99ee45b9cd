"""The importance weight turned around where the advantage is positive."""

from types import SimpleNamespace

import jax
import numpy as np

from jaxrl.losses.aspo import aspo

CONFIG = SimpleNamespace(eps_clip_low=0.2, eps_clip_high=0.25, clip_ratio_c=3.0)
RATIOS = np.array([[0.25, 0.5, 2, 0.5, 4, 1]], np.float32)
ADVANTAGES = np.array([[1, 1, 1, -1, -1, -2]], np.float32)
NEW = np.full_like(RATIOS, np.log(0.125))
OLD = NEW - np.log(RATIOS)


def test_literal_value_gradient_and_clip_ratio():
    # bounds 0.8 and 1.25, c = 3; L = -w A log p, log p = -2.0794415, gradient -w A
    #   r = 1/4, A =  1: w = min(4, 3) = 3;  r = 1/2, A =  1: w = 2;  r = 2, A =  1: clipped
    #   r = 1/2, A = -1: clipped;            r = 4,   A = -1: w = 3;  r = 1, A = -2: w = 1
    def objective(log_probs):
        loss, metrics = aspo(log_probs, OLD, ADVANTAGES, CONFIG)
        return loss.sum(), (loss, metrics["clip_ratio"])

    grad, (loss, clipped) = jax.grad(objective, has_aux=True)(NEW)
    expected = [[6.2383246, 4.1588831, 0, 0, -6.2383246, -4.1588831]]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, [[-3, -2, 0, 0, 3, 2]], rtol=1e-6)
    np.testing.assert_array_equal(clipped, [[0, 0, 1, 1, 0, 0]])


def test_the_gradient_is_that_of_the_papers_ratio():
    # of pi_old pi_theta / sg[pi_theta^2] A, where A > 0 and neither clip acts: r = 1/2, 1, 1.2
    old = NEW[:, :3] - np.log(np.array([[0.5, 1, 1.2]], np.float32))
    advantages = np.array([[1, 2, 3]], np.float32)

    def papers(log_probs):
        fixed = jax.lax.stop_gradient(log_probs)
        return -(np.exp(old) * jax.numpy.exp(log_probs - 2 * fixed) * advantages).sum()

    ours = jax.grad(lambda x: aspo(x, old, advantages, CONFIG)[0].sum())(NEW[:, :3])
    np.testing.assert_allclose(ours, jax.grad(papers)(NEW[:, :3]), rtol=1e-6)
