"""Right samples a little, wrong ones in full."""

import jax
import numpy as np

from jaxrl.advantages.w_reinforce import w_reinforce

# right 0.1, wrong -1, whatever the others of the prompt are; the last row's environment failed
INDEX = np.array([0, 1, 0, 1, 1, 2, 0])
REWARDS = np.array([[0, 1], [0, 1], [0, 0], [0, 1], [2, -1], [1, -1], [0, 0]], np.float32)
MASK = np.array([[1, 1], [1, 0], [1, 1], [1, 1], [1, 1], [1, 1], [1, 1]], np.float32)
VALID = np.arange(7) != 6


def test_literal():
    advantages, returns = jax.jit(w_reinforce)(REWARDS, MASK, INDEX, valid_mask=VALID)
    expected = np.array([0.1, 0.1, -1, 0.1, 0.1, -1, 0])[:, None] * MASK
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    np.testing.assert_array_equal(returns, advantages)


def test_weight_and_threshold():
    # scores 1, 1, 0, 1, 1, 0, 0 are all wrong, or all right
    masks = {"loss_mask": MASK * VALID[:, None]}
    advantages, _ = w_reinforce(REWARDS, MASK, INDEX, threshold=1.0, **masks)
    np.testing.assert_array_equal(advantages, -masks["loss_mask"])
    advantages, _ = w_reinforce(REWARDS, MASK, INDEX, threshold=-0.5, positive_weight=0, **masks)
    np.testing.assert_array_equal(advantages, np.zeros_like(MASK))
