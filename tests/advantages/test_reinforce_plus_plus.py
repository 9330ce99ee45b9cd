"""Discounted returns, normalised over the batch."""

import numpy as np

from jaxrl.advantages.reinforce_plus_plus import reinforce_plus_plus

REWARDS = np.array([[1, 0, 2], [0, 4, 9]], np.float32)
MASK = np.array([[1, 1, 1], [1, 1, 0]], np.float32)
INDEX = np.array([0, 0])


def test_literal_returns_and_advantages():
    # gamma 1/2: R = 1 + (0 + 2 / 2) / 2 = 1.5, 1, 2; 0 + 4 / 2 = 2, 4; the masked 9 is no reward
    # mean 10.5 / 5 = 2.1, deviations -0.6, -1.1, -0.1, -0.1, 1.9; squares 0.36 + 1.21 + 0.01
    #   + 0.01 + 3.61 = 5.2, variance 5.2 / 4 = 1.3, std 1.1401754
    #   advantages -0.5262348, -0.9647638, -0.0877058; -0.0877058, 1.6664102
    advantages, returns = reinforce_plus_plus(REWARDS, MASK, INDEX, gamma=0.5)
    np.testing.assert_allclose(returns, [[1.5, 1, 2], [2, 4, 0]], rtol=1e-6)
    expected = [[-0.5262348, -0.9647638, -0.0877058], [-0.0877058, 1.6664102, 0]]
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)


def test_observation_tokens_are_passed_over():
    # the token after the observation is one step away: R = 1 + 2 / 2 = 2; the 4 that is earned on
    # the observation counts for the token before: 1 + 4 + 2 / 2 = 6
    loss_mask = np.array([[1, 0, 1]], np.float32)
    for earned, expected in ((0, 2), (4, 6)):
        rewards = np.array([[1, earned, 2]], np.float32)
        _, returns = reinforce_plus_plus(
            rewards, np.ones((1, 3)), INDEX[:1], gamma=0.5, loss_mask=loss_mask
        )
        np.testing.assert_allclose(returns, [[expected, 0, 2]], rtol=1e-6)


def test_fewer_than_two_tokens_have_advantage_zero():
    advantages, _ = reinforce_plus_plus(REWARDS, np.zeros_like(MASK), INDEX)
    np.testing.assert_array_equal(advantages, np.zeros_like(MASK))


def test_rows_of_failed_environments_have_no_part():
    # returns 1 and 3 on two sampled tokens: mean 2, variance ((-1)^2 + 1^2) / 1 = 2: -+1 / sqrt(2)
    rewards = np.array([[1.0], [3.0], [0.0]], np.float32)
    loss_mask = np.array([[1.0], [1.0], [0.0]], np.float32)
    advantages, _ = reinforce_plus_plus(rewards, np.ones((3, 1)), np.arange(3), loss_mask=loss_mask)
    np.testing.assert_allclose(advantages[:, 0], [-0.7071068, 0.7071068, 0], rtol=1e-6)
