"""Normalisation of a batch's advantages."""

import numpy as np

from jaxrl.advantages.normalize import normalize_advantages


def test_padding_has_no_part_in_the_mean():
    # 1, 2, 6 under the mask: mean 3, variance (4 + 1 + 9) / 3 = 14 / 3, std 2.1602469:
    # -0.9258201, -0.4629100, 1.3887301
    advantages = np.array([[1, 2, 9], [6, np.nan, 9]], np.float32)
    mask = np.array([[1, 1, 0], [1, 0, 0]], np.float32)
    expected = [[-0.9258201, -0.4629100, 0], [1.3887301, 0, 0]]
    np.testing.assert_allclose(normalize_advantages(advantages, mask), expected, rtol=1e-5)


def test_equal_advantages_and_no_advantages_become_zero():
    for mask in (np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)):
        found = normalize_advantages(np.full((2, 2), 3.0, np.float32), mask)
        np.testing.assert_array_equal(found, np.zeros((2, 2)))
