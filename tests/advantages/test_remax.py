"""Advantages relative to the greedy answer."""

import jax
import numpy as np

from jaxrl.advantages.remax import remax
from jaxrl.rollout.generator import with_greedy_rewards

MASK = np.array([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]], np.float32)
REWARDS = np.array([[0, 0.5, 0, 1], [0, 0, 0, 0], [0, 0, 2, 0]], np.float32)


def test_literal():
    """Scores 1.5, 0, 2; the greedy answers of their prompts earned 1, 1 and 2.5."""
    greedy = np.array([1, 1, 2.5], np.float32)
    given = {"index": np.array([0, 0, 1]), "greedy_rewards": greedy}
    advantages, returns = jax.jit(remax)(REWARDS, MASK, **given)
    np.testing.assert_allclose(advantages, np.array([[0.5], [-1], [-0.5]]) * MASK)
    np.testing.assert_array_equal(returns, advantages)


def rollouts(rewards, last=None, ended=None):
    reasons = ended or ["stop"] * len(rewards)
    output = {"response_ids": [[1]] * len(rewards), "rewards": rewards, "stop_reasons": reasons}
    return output if last is None else output | {"is_last_step": last}


def test_a_greedy_answer_whose_environment_failed_is_no_baseline():
    """That is the mean of the prompt's samples: (1 + 3) / 2."""
    greedy = rollouts([[0.0], [0.5]], ended=["env_error", "stop"])
    found = with_greedy_rewards(rollouts([1.0, 3.0, 4.0, 6.0]), greedy, samples=2)
    assert found["greedy_rewards"] == [2.0, 2.0, 0.5, 0.5]


def test_each_sample_gets_what_the_greedy_answer_to_its_prompt_earned():
    """Two prompts of two samples; rows are turns, of which greedy answers and samples have some."""
    greedy = rollouts([[0.0, 0.5], 1.0, [2.0]], last=[False, True, True])  # 0.5 + 1 and 2
    samples = rollouts([0.0] * 6, last=[True, False, False, True, True, True])
    found = with_greedy_rewards(samples, greedy, samples=2)
    assert found["greedy_rewards"] == [1.5, 1.5, 1.5, 1.5, 2.0, 2.0]
    assert found["rewards"] == samples["rewards"]
