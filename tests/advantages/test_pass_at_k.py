"""Advantages of samples in sets of k."""

from functools import partial
from itertools import combinations

import jax
import numpy as np
import pytest

from jaxrl.advantages.pass_at_k import pass_at_k as eager

pass_at_k = jax.jit(eager, static_argnames=("k", "threshold"))

# Sets of 2. Group 0: 1, 0, 0, 0, so 3 of 4 are wrong: F = C(3, 2) / C(4, 2) = 3/6, root 1/2;
#   right: (1/2) / (1/2) = 1; wrong: F- = C(2, 1) / C(3, 1) = 2/3, (1/2 - 2/3) / (1/2) = -1/3
# Group 1: 1, 1, 0: one wrong fills no set of 2: 0; group 2: 0, 0, 0: all wrong: 0
# Group 3: 1, 0: one set alone: 0; group 4: alone: 0
# Group 5: 1, 1, 0, 0, 0, and one whose environment failed: 3 of 5 are wrong:
#   F = 3/10, root sqrt(21) / 10 = 0.4582576; right: 0.3 / 0.4582576 = 0.6546537
#   wrong: F- = 2/4, (0.3 - 0.5) / 0.4582576 = -0.4364358
INDEX = np.array([0, 5, 1, 0, 5, 0, 1, 5, 0, 2, 2, 2, 3, 3, 4, 5, 1, 5, 5])
SCORES = np.array([1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0], np.float32)
VALID = np.arange(19) != 18
RIGHT, WRONG = 0.6546537, -0.4364358
ADVANTAGES = [1, RIGHT, 0, -1 / 3, WRONG, -1 / 3, 0, RIGHT, -1 / 3, *[0] * 6, WRONG, 0, WRONG, 0]
REWARDS = np.stack([0 * SCORES, SCORES, 0 * SCORES], axis=1)
MASK = np.tile(np.array([[1, 1, 0]], np.float32), (19, 1))


@pytest.mark.parametrize("said_by", ["valid_mask", "loss_mask"])
def test_literal_of_unequal_groups(said_by):
    said = {"valid_mask": VALID, "loss_mask": MASK * VALID[:, None]}[said_by]
    estimator = partial(pass_at_k, k=2)
    advantages, returns = estimator(REWARDS, MASK, INDEX, **{said_by: said})
    expected = np.array(ADVANTAGES)[:, None] * MASK
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(returns, advantages)
    assert not np.asarray(advantages)[expected == 0].any()


def by_all_sets(right, k):
    """The definition: each set's advantage is relative to all sets, a sample has its sets' mean."""
    sets = list(combinations(range(len(right)), k))
    earned = np.array([max(right[i] for i in one) for one in sets], float)
    if not earned.size or earned.std() == 0:
        return np.zeros(len(right))
    of_set = (earned - earned.mean()) / earned.std()
    return [of_set[[i in one for one in sets]].mean() for i in range(len(right))]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7, 8, 9])
def test_equals_all_sets(k):
    with jax.enable_x64(True):
        for right in range(9):
            scores = np.array([1.0] * right + [0.0] * (8 - right))
            found, _ = pass_at_k(scores[:, None], np.ones((8, 1)), np.zeros(8, int), k=k)
            np.testing.assert_allclose(found[:, 0], by_all_sets(scores, k), rtol=1e-12, atol=1e-14)


def test_the_threshold_says_what_is_right():
    # sets of 1 of 0.9, 0.4, 0.4, 0.4: F = 3/4, root sqrt(3) / 4: sqrt(3) and (3/4 - 1) = -1/sqrt(3)
    scores = np.array([[0.9], [0.4], [0.4], [0.4]], np.float32)
    advantages, _ = pass_at_k(scores, np.ones((4, 1)), np.zeros(4, int), k=1, threshold=0.5)
    np.testing.assert_allclose(advantages[:, 0], np.sqrt([3, *[1 / 3] * 3]) * [1, -1, -1, -1], 1e-6)
    assert not np.asarray(pass_at_k(scores, np.ones((4, 1)), np.zeros(4, int), k=1)[0]).any()


def test_a_set_has_a_sample():
    with pytest.raises(ValueError, match="'pass_at_k' needs k >= 1, got 0"):
        pass_at_k(REWARDS, MASK, INDEX, k=0)
