"""Group-relative advantages, scaled by what groups without a difference lose."""

import jax
import numpy as np
import pytest

from jaxrl.advantages.gpg import gpg as eager

gpg = jax.jit(eager)

# Group 0: 1, 0, 0: mean 1/3; group 1: 1, 1: no difference; group 2: 0.5, 0, 1: mean 1/2, and one
# that failed; group 3: alone: no difference. B = 9, of which 1, 1 and the one alone are M = 3:
#   9/6 (2/3, -1/3, -1/3) = 1, -1/2, -1/2; 9/6 (0, -1/2, 1/2) = 0, -3/4, 3/4
INDEX = np.array([0, 1, 0, 2, 0, 1, 2, 2, 3, 2])
SCORES = np.array([1, 1, 0, 0.5, 0, 1, 0, 1, 7, 0], np.float32)
ADVANTAGES = np.array([1, 0, -0.5, 0, -0.5, 0, -0.75, 0.75, 0, 0])
VALID = np.arange(10) != 9
MASK = np.ones((10, 2), np.float32)
REWARDS = np.stack([0 * SCORES, SCORES], axis=1)


@pytest.mark.parametrize("said_by", ["valid_mask", "loss_mask"])
def test_literal_of_unequal_groups(said_by):
    said = {"valid_mask": VALID, "loss_mask": MASK * VALID[:, None]}[said_by]
    advantages, returns = gpg(REWARDS, MASK, INDEX, **{said_by: said})
    np.testing.assert_allclose(advantages, ADVANTAGES[:, None] * MASK, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(returns, advantages)


def test_the_mean_over_the_batch_is_that_over_what_differs():
    """Dropping the groups without a difference, and alpha with them, changes no mean of A g."""
    rng = np.random.default_rng(0)
    index, gradients = np.repeat([0, 1, 2], 4), rng.normal(size=12)
    scores = rng.normal(size=12)
    scores[4:8] = 1
    left = index != 1
    with jax.enable_x64(True):
        every = np.asarray(gpg(scores[:, None], np.ones((12, 1)), index)[0])[:, 0]
        some = np.asarray(gpg(scores[left, None], np.ones((8, 1)), index[left])[0])[:, 0]
    assert (every * gradients).mean() == pytest.approx((some * gradients[left]).mean(), rel=1e-12)
