"""Advantages relative to the success rate."""

import jax
import numpy as np

from jaxrl.advantages.maxrl import maxrl as eager

maxrl = jax.jit(eager, static_argnames="epsilon")

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


def test_a_mean_that_is_not_positive_gives_zero():
    # 1, -1, 1, -1: mean 0, the division would give +-1e6; 1, -1, -1, -1: mean -1/2, it would give
    # -3, 1, 1, 1, the right answer the only one made less likely; 0.1, 0.2, -0.3: in float32 the
    # sum is not 0; 2, 0, -1: mean 1/3, deviations 5/3, -1/3, -4/3, over 1/3: 5, -1, -4
    scores = np.array([1, -1, 1, -1, 1, -1, -1, -1, 0.1, 0.2, -0.3, 2, 0, -1], np.float32)
    index = np.repeat([0, 1, 2, 3], [4, 4, 3, 3])
    advantages, _ = maxrl(scores[:, None], np.ones((14, 1), np.float32), index)
    np.testing.assert_array_equal(advantages[:11], np.zeros((11, 1)))
    np.testing.assert_allclose(advantages[11:, 0], [5, -1, -4], rtol=1e-4)


def test_a_group_of_one_keeps_its_score_whatever_its_sign():
    advantages, _ = maxrl(np.array([[-2.0]], np.float32), np.ones((1, 1)), np.array([0]))
    np.testing.assert_array_equal(advantages, [[-2.0]])
