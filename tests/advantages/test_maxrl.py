"""Advantages relative to the success rate."""

import numpy as np

from jaxrl.advantages.maxrl import maxrl

# Group 0: scores 1, 0, 0, 0: mean 1/4: 0.75 / 0.25 = 3 and -0.25 / 0.25 = -1; group 1: 1, 1: 0;
# group 2: 0, 0: 0 / 1e-6 = 0; group 3, alone: its score
INDEX = np.array([0, 1, 0, 0, 0, 1, 2, 2, 3])
SCORES = np.array([1, 1, 0, 0, 0, 1, 0, 0, 0.5], np.float32)
ADVANTAGES = np.array([3, 0, -1, -1, -1, 0, 0, 0, 0.5])
REWARDS = np.stack([0 * SCORES, SCORES, 0 * SCORES], axis=1)
MASK = np.tile(np.array([[1, 1, 0]], np.float32), (9, 1))


def test_literal_of_interleaved_groups():
    advantages, returns = maxrl(REWARDS, MASK, INDEX)
    np.testing.assert_allclose(advantages, ADVANTAGES[:, None] * MASK, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(returns, advantages)


def test_epsilon_is_added_to_the_mean():
    # 0.75 / (0.25 + 0.5) = 1
    advantages, _ = maxrl(REWARDS, MASK, INDEX, epsilon=0.5)
    np.testing.assert_allclose(advantages[0, 0], 1.0, rtol=1e-6)
