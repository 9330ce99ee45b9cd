"""GRPO without the division by the standard deviation."""

import jax
import numpy as np

from jaxrl.advantages.dr_grpo import dr_grpo
from jaxrl.config import AlgorithmConfig
from jaxrl.registry import bind_estimator

REWARDS = np.array([[0, 1], [0, 3], [0, 2], [0, 0]], np.float32)
MASK = np.ones((4, 2), np.float32)
INDEX = np.array([0, 1, 0, 1])


def test_literal():
    # group 0: 1, 2, mean 1.5; group 1: 3, 0, mean 1.5
    advantages, returns = dr_grpo(REWARDS, MASK, INDEX)
    expected = np.array([[-0.5], [1.5], [0.5], [-1.5]]) * MASK
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    np.testing.assert_array_equal(returns, advantages)


def test_the_config_cannot_turn_the_division_on():
    algorithm = AlgorithmConfig(advantage_estimator="dr_grpo", grpo_norm_by_std=True)
    arguments = {"token_level_rewards": REWARDS, "response_mask": MASK, "index": INDEX}
    _, advantages, _ = jax.jit(bind_estimator(algorithm))(**arguments)
    np.testing.assert_allclose(advantages[:, 0], [-0.5, 1.5, 0.5, -1.5], rtol=1e-6)
