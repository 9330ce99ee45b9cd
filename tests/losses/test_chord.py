"""Two means: the clipped surrogate of samples, the weighed likelihood of demonstrations."""

import jax
import numpy as np
import pytest

from jaxrl.array_ops import masked_sum
from jaxrl.config import AlgorithmConfig
from jaxrl.losses.chord import chord
from jaxrl.losses.regular import regular

CONFIG = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.2)
NEW = np.log(np.array([[0.5, 0.1, 0.9], [0.6, 0.3, 0.9], [0.2, 0.2, 0.4]], np.float32))
OLD = np.log(np.array([[0.5, 0.5, 0.9], [0.4, 0.3, 0.9], [0.2, 0.2, 0.2]], np.float32))
MASK = np.array([[1, 1, 0], [1, 1, 0], [1, 1, 1]], np.float32)
ADVANTAGES = np.array([[7, 7, 7], [1, 1, 1], [-1, -1, -1]], np.float32)
GIVEN = np.array([True, False, False])


def mean_of(log_probs, **settings):
    """The loss of a minibatch as loss_reduction "token_mean" makes it."""
    loss, _ = chord(log_probs, OLD, ADVANTAGES, CONFIG, MASK, demonstrated=GIVEN, **settings)
    return masked_sum(loss, MASK) / MASK.sum()


def test_literal_value_and_gradient():
    # given: phi = 0.25 and 0.09, -log p = 0.6931472 and 2.3025851: their mean is
    # (0.1732868 + 0.2072327) / 2 = 0.1902597. Sampled: ratios 1.5 -> 1.2, 1; 1, 1, 2 with A = -1,
    # which PPO leaves: (-1.2 - 1 + 1 + 1 + 2) / 5 = 0.36
    value, slope = jax.value_and_grad(mean_of)(NEW, mu=0.4)
    assert value == pytest.approx(0.4 * 0.1902597 + 0.6 * 0.36, rel=1e-5)
    # by log p: -phi of 2 tokens times 0.4; of 5 sampled ones times 0.6: -r A, 0 where clipped
    expected = [[-0.4 * 0.25 / 2, -0.4 * 0.09 / 2, 0], [0, -0.12, 0], [0.12, 0.12, 0.24]]
    np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-8)


def test_without_weights_a_demonstration_is_learnt_as_in_sft():
    # mean of -log p alone: (0.6931472 + 2.3025851) / 2
    assert mean_of(NEW, mu=1.0, weigh_uncertain=False) == pytest.approx(1.4978662, rel=1e-6)


@pytest.mark.parametrize("given", [None, np.zeros(3, bool)])
def test_without_demonstrations_it_is_the_clipped_surrogate(given):
    expected, _ = regular(NEW, OLD, ADVANTAGES, CONFIG, MASK)
    found, _ = chord(NEW, OLD, ADVANTAGES, CONFIG, MASK, demonstrated=given, mu=0.4)
    np.testing.assert_allclose(found, 0.6 * np.asarray(expected), rtol=1e-6)
