"""Loss on the tokens of highest entropy alone."""

import jax
import numpy as np
import pytest

from jaxrl.array_ops import masked_sum
from jaxrl.losses.top_entropy import top_entropy_mask

ENTROPY = np.array([[0.1, 2.0, 1.0, np.nan], [3.0, 0.2, 1.0, 9.0]], np.float32)
MASK = np.array([[1, 1, 1, 0], [1, 1, 1, 0]], np.float32)


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        (0.1, [[0, 0, 0], [1, 0, 0]]),  # floor(0.6) = 0: one at least, 3.0
        (0.4, [[0, 1, 0], [1, 0, 0]]),  # floor(2.4) = 2: 3.0 and 2.0
        (0.5, [[0, 1, 1], [1, 0, 0]]),  # 3: of the two 1.0 the first
        (1.0, [[1, 1, 1], [1, 1, 1]]),
    ],
)
def test_the_highest_are_kept(share, kept):
    np.testing.assert_array_equal(top_entropy_mask(ENTROPY, MASK, share)[:, :3], kept)
    assert not np.asarray(top_entropy_mask(ENTROPY, MASK, share))[:, 3].any()


def test_order_and_padding_change_nothing():
    padded = np.full((2, 6), 7.0, np.float32), np.zeros((2, 6), np.float32)
    padded[0][:, :4], padded[1][:, :4] = ENTROPY[::-1], MASK[::-1]
    mask = top_entropy_mask(*padded, 0.5, np.array([1, 0]))
    np.testing.assert_array_equal(mask[::-1, :4], top_entropy_mask(ENTROPY, MASK, 0.5))


def test_no_gradient_passes():
    slope = jax.grad(lambda x: masked_sum(top_entropy_mask(x, MASK, 0.5), MASK))(ENTROPY)
    np.testing.assert_array_equal(slope, 0)
