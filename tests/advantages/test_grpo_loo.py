"""Leave-one-out advantages over a leave-one-out deviation."""

import jax
import numpy as np
import pytest

from jaxrl.advantages.grpo_loo import grpo_loo

# Group 0, scores 4, 1, 0, 2: the others of 4 are 1, 0, 2: mean 1, std 1: 3
#   of 1: 4, 0, 2: mean 2, std 2: -1/2; of 0: 4, 1, 2: mean 7/3, squares 25/9 + 16/9 + 1/9 = 14/3,
#   over 2: std 1.5275252: -1.5275252; of 2: 4, 1, 0: mean 5/3, squares 49/9 + 4/9 + 25/9 = 26/3,
#   std 2.0816660: (1/3) / 2.0816660 = 0.1601282
# Group 1: 1, 0, 0: the others of 1 do not vary: 1; of 0: 1, 0: mean 1/2, std 0.7071068: -0.7071068
# Group 2: 3, 1: no deviation of one other: 2, -2; group 3: alone: 0; the last row failed
INDEX = np.array([0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 1])
SCORES = np.array([4, 1, 3, 1, 0, 0, 1, 5, 2, 0, 0], np.float32)
HALF = 0.7071068
ADVANTAGES = np.array([3, 1, 2, -0.5, -1.5275252, -HALF, -2, 0, 0.1601282, -HALF, 0])
VALID = np.arange(11) != 10
MASK = np.ones((11, 2), np.float32)
REWARDS = np.stack([0 * SCORES, SCORES], axis=1)
jitted = jax.jit(grpo_loo, static_argnames="grpo_norm_by_std")


@pytest.mark.parametrize("said_by", ["valid_mask", "loss_mask"])
def test_literal_of_unequal_groups(said_by):
    said = {"valid_mask": VALID, "loss_mask": MASK * VALID[:, None]}[said_by]
    advantages, returns = jitted(REWARDS, MASK, INDEX, **{said_by: said})
    np.testing.assert_allclose(advantages, ADVANTAGES[:, None] * MASK, rtol=1e-5)
    np.testing.assert_array_equal(returns, advantages)


def test_equals_the_definition_in_a_loop():
    rng = np.random.default_rng(0)
    index, scores = rng.integers(0, 4, 16), rng.normal(size=16)
    expected = np.zeros(16)
    for i in range(16):
        others = scores[(index == index[i]) & (np.arange(16) != i)]
        if len(others):
            std = others.std(ddof=1) + 1e-6 if len(others) > 1 else 1
            expected[i] = (scores[i] - others.mean()) / std
    with jax.enable_x64(True):
        found, _ = jitted(scores[:, None], np.ones((16, 1)), index)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n", [3, 7, 50, 513])
@pytest.mark.parametrize(("one", "rest"), [(1, 0), (0, 1), (100.1, 5.1), (-1, 1)])
def test_others_that_are_equal_do_not_vary(n, one, rest):
    # in float32 their variance by sums and squares is not 0, and the division explodes
    scores = np.full((n, 1), rest, np.float32)
    scores[0] = one
    advantages, _ = jitted(scores, np.ones((n, 1)), np.zeros(n, int))
    np.testing.assert_allclose(advantages[0], one - rest, rtol=1e-5)


def test_without_the_standard_deviation_it_is_rloo():
    # 4 - 1, 1 - 2, 0 - 7/3, 2 - 5/3
    advantages, _ = jitted(REWARDS, MASK, INDEX, valid_mask=VALID, grpo_norm_by_std=False)
    np.testing.assert_allclose(advantages[[0, 3, 4, 8], 0], [3, -1, -7 / 3, 1 / 3], rtol=1e-6)
