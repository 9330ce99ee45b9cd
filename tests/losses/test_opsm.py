"""No loss on bad rows that the policy has moved away from."""

import jax
import numpy as np

from jaxrl.array_ops import masked_sum
from jaxrl.losses.opsm import off_policy_sequence_mask

# drift, the mean of log pi_rollout - log pi_theta: (1 + 0.5) / 2 = 0.75; (1 - 0.5) / 2 = 0.25; 0.75
ROLLOUT = np.full((3, 3), -1, np.float32)
NEW = np.array([[-2, -1.5, np.nan], [-2, -0.5, -9], [-2, -1.5, -9]], np.float32)
MASK = np.array([[1, 1, 0]] * 3, np.float32)
ADVANTAGES = np.array([[-1, -1, np.nan], [-1, -1, 0], [1, 1, 0]], np.float32)


def test_bad_rows_beyond_delta_are_dropped_and_good_ones_never():
    mask, metrics = off_policy_sequence_mask(NEW, ROLLOUT, ADVANTAGES, MASK, 0.5)
    np.testing.assert_array_equal(np.asarray(mask)[:, :2], [[0, 0], [1, 1], [1, 1]])
    np.testing.assert_array_equal(np.asarray(metrics["opsm_dropped"])[0, :2], [1, 1])
    mask, _ = off_policy_sequence_mask(NEW, ROLLOUT, ADVANTAGES, MASK, 0.2)
    np.testing.assert_array_equal(np.asarray(mask)[:, :2], [[0, 0], [0, 0], [1, 1]])
    # at delta itself the row stays
    mask, _ = off_policy_sequence_mask(NEW, ROLLOUT, ADVANTAGES, MASK, 0.75)
    np.testing.assert_array_equal(np.asarray(mask)[:, :2], np.ones((3, 2)))


def test_no_gradient_passes():
    def total(x):
        return masked_sum(off_policy_sequence_mask(x, ROLLOUT, ADVANTAGES, MASK, 0.5)[0], MASK)

    np.testing.assert_array_equal(jax.grad(total)(NEW), 0)
