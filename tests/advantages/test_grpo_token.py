"""Group-relative advantages per token."""

import jax
import numpy as np
import pytest

from jaxrl.advantages.grpo import grpo
from jaxrl.advantages.grpo_token import grpo_token as eager

grpo_token = jax.jit(eager, static_argnames=("grpo_norm_by_std", "gamma"))

# One group of two, prompt of one token. Rewards per token and their sums to the end:
#   sample 0: 1, 0, 2 -> 3, 2, 2        sample 1: 0, 1 -> 1, 1, and 0 after its end
# Means 2, 1.5, 1; differences to them +-1, +-0.5, +-1; std with n - 1 = sqrt(2) * difference, so
# every advantage is +-1 / sqrt(2).
INDEX = np.array([0, 0], np.int32)
MASK = np.array([[0, 1, 1, 1], [0, 1, 1, 0]], np.float32)
REWARDS = np.array([[0, 1, 0, 2], [0, 0, 1, 0]], np.float32)


def test_literal():
    advantages, returns = grpo_token(REWARDS, MASK, INDEX)
    half = 1 / np.sqrt(2)
    expected = [[0, half, half, half], [0, -half, -half, 0]]
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)
    np.testing.assert_array_equal(returns, [[0, 3, 2, 2], [0, 1, 1, 0]])


def test_literal_without_std():
    advantages, _ = grpo_token(REWARDS, MASK, INDEX, grpo_norm_by_std=False)
    np.testing.assert_array_equal(advantages, [[0, 1, 0.5, 1], [0, -1, -0.5, 0]])


def test_literal_discount():
    # gamma 0.5: 1 + 0.5 * (0 + 0.5 * 2) = 1.5, 0 + 0.5 * 2 = 1, 2; and 0 + 0.5 * 1 = 0.5, 1
    _, returns = grpo_token(REWARDS, MASK, INDEX, gamma=0.5)
    np.testing.assert_array_equal(returns, [[0, 1.5, 1, 2], [0, 0.5, 1, 0]])
    _, returns = grpo_token(REWARDS, MASK, INDEX, gamma=0.0)
    np.testing.assert_array_equal(returns, REWARDS)


def test_what_earlier_tokens_earned_plays_no_part():
    other = REWARDS + np.array([[0, 5, 0, 0], [0, -3, 0, 0]], np.float32)
    kept = grpo_token(other, MASK, INDEX)[0][:, 2:]
    np.testing.assert_array_equal(kept, grpo_token(REWARDS, MASK, INDEX)[0][:, 2:])


def test_one_reward_at_the_end_gives_grpo():
    rng = np.random.default_rng(0)
    mask = np.ones((8, 5), np.float32)
    rewards = np.zeros((8, 5), np.float32)
    rewards[:, -1] = rng.normal(size=8)
    index = np.array([0, 0, 0, 1, 1, 1, 2, 3], np.int32)
    np.testing.assert_allclose(
        grpo_token(rewards, mask, index)[0],
        jax.jit(grpo)(rewards, mask, index)[0],
        rtol=1e-5,
        atol=1e-6,
    )


def test_shapes_that_differ_are_refused():
    with pytest.raises(AssertionError, match="shape"):
        grpo_token(REWARDS, MASK[:, :1], INDEX)
