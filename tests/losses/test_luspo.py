"""GSPO's loss times the length of the sequence."""

from types import SimpleNamespace

import jax
import numpy as np

from jaxrl.array_ops import masked_sum
from jaxrl.losses.luspo import luspo
from jaxrl.losses.reduction import reduction_weights

CONFIG = SimpleNamespace(eps_clip_low=0.2, eps_clip_high=0.25)
# Ratios of the sequences, the geometric means under the mask: 1, 2, 1/2, 2.
RATIOS = np.array([[2, 0.5, 7], [4, 1, 2], [0.5, 9, 9], [2, 2, 1 / 7]], np.float32)
MASK = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]], np.float32)
ADVANTAGES = np.repeat(np.array([[3], [1], [-1], [-1]], np.float32), 3, axis=1)
OLD = np.full_like(RATIOS, np.log(0.125))
NEW = OLD + np.log(RATIOS)


def test_literal_value_gradient_and_clip_ratio():
    # bounds 0.8 and 1.25; L = -min(s A, clip(s) A) |y|
    #   s = 1,   A =  3, 2 tokens: -3 * 2    = -6,    gradient -6
    #   s = 2,   A =  1, 3 tokens: -1.25 * 3 = -3.75, gradient  0, clipped
    #   s = 1/2, A = -1, 1 token:  0.8 * 1   =  0.8,  gradient  0, clipped
    #   s = 2,   A = -1, 2 tokens: 2 * 2     =  4,    gradient  4
    def objective(log_probs):
        loss, metrics = luspo(log_probs, OLD, ADVANTAGES, CONFIG, MASK)
        return masked_sum(loss, MASK), (loss, metrics["clip_ratio"])

    grad, (loss, clipped) = jax.grad(objective, has_aux=True)(NEW)
    expected = np.array([[-6], [-3.75], [0.8], [4]]) * MASK
    np.testing.assert_allclose(loss * MASK, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, np.array([[-6], [0], [0], [4]]) * MASK, rtol=1e-6)
    np.testing.assert_array_equal(clipped * MASK, np.array([[0], [1], [1], [0]]) * MASK)


def test_tokens_of_long_and_short_sequences_have_one_weight():
    # on policy the gradient of every token is -A / B
    weights = reduction_weights(MASK, "sequence_mean")

    def objective(log_probs):
        return masked_sum(luspo(log_probs, OLD, ADVANTAGES, CONFIG, MASK)[0], weights)

    np.testing.assert_allclose(jax.grad(objective)(OLD), -ADVANTAGES * MASK / 4, rtol=1e-6)


def test_without_a_mask_all_tokens_count():
    # s = (2 * 1/2 * 7)^(1/3) = 1.9129312, bounded by 1.25; A = 3: -1.25 * 3 * 3 tokens
    loss, _ = luspo(NEW, OLD, ADVANTAGES, CONFIG)
    np.testing.assert_allclose(loss[0], [-11.25] * 3, rtol=1e-6)
