"""Group-relative advantages over the deviation of the batch."""

import jax
import numpy as np
import pytest

from jaxrl.advantages.grpo_batch_std import grpo_batch_std as eager

grpo_batch_std = jax.jit(eager, static_argnames="epsilon")

# Groups 1, 1; 0, 0; 1, 0; and one alone, 0. Of the batch 3 of 7 are 1: mean 3/7, squares
#   3 * 16/49 + 4 * 9/49 = 12/7, over 6: 2/7, std 0.5345225. Only the third group has a difference:
#   +-(1/2) / 0.5345225 = +-0.9354143. The last row, 9, failed.
INDEX = np.array([0, 1, 2, 0, 1, 2, 3, 2])
SCORES = np.array([1, 0, 1, 1, 0, 0, 0, 9], np.float32)
ADVANTAGES = np.array([0, 0, 0.9354143, 0, 0, -0.9354143, 0, 0])
VALID = np.arange(8) != 7
MASK = np.ones((8, 2), np.float32)
REWARDS = np.stack([0 * SCORES, SCORES], axis=1)


@pytest.mark.parametrize("said_by", ["valid_mask", "loss_mask"])
def test_literal_of_unequal_groups(said_by):
    said = {"valid_mask": VALID, "loss_mask": MASK * VALID[:, None]}[said_by]
    advantages, returns = grpo_batch_std(REWARDS, MASK, INDEX, **{said_by: said})
    np.testing.assert_allclose(advantages, ADVANTAGES[:, None] * MASK, rtol=1e-5)
    np.testing.assert_array_equal(returns, advantages)
    assert not np.asarray(advantages)[ADVANTAGES == 0].any()


def test_equals_the_definition_in_numpy():
    rng = np.random.default_rng(0)
    index, scores = rng.integers(0, 4, 16), rng.normal(size=16)
    means = np.array([scores[index == group].mean() for group in index])
    expected = (scores - means) / (scores.std(ddof=1) + 1e-4)
    with jax.enable_x64(True):
        found, _ = grpo_batch_std(scores[:, None], np.ones((16, 1)), index, epsilon=1e-4)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-12, atol=1e-14)
