"""Advantages relative to a mean weighted by length."""

import jax
import numpy as np
import pytest

from jaxrl.advantages.opo import opo as eager

opo = jax.jit(eager)

# Group 0, scores 1, 0, 2 with 1, 3, 2 tokens: baseline (1 * 1 + 3 * 0 + 2 * 2) / 6 = 5/6
# Group 1, scores 1, 0 with 3 and 1 tokens: 3/4; group 2, alone: its score, so 0
# The last row of group 0 failed.
INDEX = np.array([0, 1, 0, 0, 1, 2, 0])
LENGTHS = np.array([1, 3, 3, 2, 1, 2, 3])
SCORES = np.array([1, 1, 0, 2, 0, 5, 0], np.float32)
ADVANTAGES = [1 / 6, 1 / 4, -5 / 6, 7 / 6, -3 / 4, 0, 0]
MASK = (np.arange(3) < LENGTHS[:, None]).astype(np.float32)
REWARDS = np.stack([SCORES, 0 * SCORES, 0 * SCORES], axis=1)
VALID = np.arange(7) != 6


@pytest.mark.parametrize("said_by", ["valid_mask", "loss_mask"])
def test_literal_of_unequal_groups(said_by):
    said = {"valid_mask": VALID, "loss_mask": MASK * VALID[:, None]}[said_by]
    advantages, returns = opo(REWARDS, MASK, INDEX, **{said_by: said})
    expected = np.array(ADVANTAGES)[:, None] * MASK
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    np.testing.assert_array_equal(returns, advantages)


def test_the_baseline_minimises_the_variance():
    """Of gradients whose squared size is the length: sum l (s - b)^2 is least at the baseline."""
    rng = np.random.default_rng(0)
    lengths, scores = rng.integers(1, 9, 6), rng.normal(size=6)
    mask = (np.arange(8) < lengths[:, None]) * 1.0
    with jax.enable_x64(True):
        rewards = np.zeros((6, 8))
        rewards[:, 0] = scores
        advantages = np.asarray(opo(rewards, mask, np.zeros(6, int))[0])[:, 0]
    assert lengths @ advantages == pytest.approx(0, abs=1e-12)  # the slope in b
    np.testing.assert_allclose(np.ptp(scores - advantages), 0, atol=1e-14)  # one b for all


def test_observations_have_no_weight():
    # scores 1 and 0 with 1 and 2 sampled tokens of 3: baseline 1/3; row 2 is masked, but was judged
    loss_mask = np.array([[1, 0, 0], [1, 0, 1], [0, 0, 0]], np.float32)
    rewards = np.array([[1, 0, 0], [0, 0, 0], [9, 0, 0]], np.float32)
    ones = np.ones((3, 3), np.float32)
    advantages, _ = opo(
        rewards, ones, np.zeros(3, int), loss_mask=loss_mask, valid_mask=np.ones(3, bool)
    )
    expected = np.array([[2 / 3], [-1 / 3], [0]]) * ones
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
