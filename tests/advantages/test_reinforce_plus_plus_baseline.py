"""Group-relative advantages, normalised over the batch."""

import jax
import numpy as np
import pytest

from jaxrl.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline

# Group 0: 1, 0, 0 with 2, 1, 1 tokens: d = 2/3, -1/3, -1/3; group 1: 3, 1 with 1, 2: d = 1, -1;
# group 2: alone, 1 token: d = 0; the last row, of group 1, failed
# d of the 8 tokens: 2/3, 2/3, -1/3, -1/3, 1, -1, -1, 0: sum -1/3, mean -1/24
#   squares 4/9 + 4/9 + 1/9 + 1/9 + 3 = 37/9, less 8 / 24^2 = 1/72: 295/72, over 7: 0.5853175,
#   std 0.7650604: A = (d + 1/24) / 0.7650604
INDEX = np.array([0, 1, 0, 0, 1, 2, 1])
SCORES = np.array([1, 3, 0, 0, 1, 5, 0], np.float32)
LENGTHS = np.array([2, 1, 1, 1, 2, 1, 2])
ADVANTAGES = [0.9258528, 1.3615484, -0.3812335, -0.3812335, -1.2526244, 0.0544620, 0]
VALID = np.arange(7) != 6
MASK = (np.arange(2) < LENGTHS[:, None]).astype(np.float32)
REWARDS = np.stack([SCORES, 0 * SCORES], axis=1)


@pytest.mark.parametrize("said_by", ["valid_mask", "loss_mask"])
def test_literal_of_unequal_groups(said_by):
    said = {"valid_mask": VALID, "loss_mask": MASK * VALID[:, None]}[said_by]
    advantages, returns = jax.jit(reinforce_plus_plus_baseline)(
        REWARDS, MASK, INDEX, **{said_by: said}
    )
    np.testing.assert_allclose(advantages, np.array(ADVANTAGES)[:, None] * MASK, rtol=1e-5)
    np.testing.assert_array_equal(returns, advantages)


def test_observations_are_no_tokens():
    # two samples of one token each: d = 1/2, -1/2: mean 0, variance (1/4 + 1/4) / 1, std 0.7071068
    rewards = np.array([[1, 0, 0], [0, 0, 0]], np.float32)
    loss_mask = np.array([[1, 0, 0], [0, 0, 1]], np.float32)
    advantages, _ = reinforce_plus_plus_baseline(
        rewards, np.ones((2, 3)), np.zeros(2, int), loss_mask=loss_mask
    )
    np.testing.assert_allclose(advantages, [[0.7071068, 0, 0], [0, 0, -0.7071068]], rtol=1e-5)


def test_equals_the_definition_in_numpy():
    rng = np.random.default_rng(0)
    index, scores, lengths = rng.integers(0, 4, 16), rng.normal(size=16), rng.integers(1, 5, 16)
    differences = scores - [scores[index == group].mean() for group in index]
    tokens = np.repeat(differences, lengths)
    expected = (differences - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    with jax.enable_x64(True):
        rewards = np.zeros((16, 4))
        rewards[:, 0] = scores
        mask = (np.arange(4) < lengths[:, None]) * 1.0
        found, _ = reinforce_plus_plus_baseline(rewards, mask, index)
    np.testing.assert_allclose(found, expected[:, None] * mask, rtol=1e-10, atol=1e-12)
