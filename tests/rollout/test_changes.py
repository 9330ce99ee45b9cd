"""What changed in an array, as places and values."""

import ml_dtypes
import numpy as np
import pytest

from jaxrl.rollout.weights.changes import Changes, changed, changes


def test_places_and_values_by_hand():
    before = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    after = np.array([[1.0, 2.5], [3.0, -4.0]], np.float32)
    made = changes(before, after)
    assert made.places.tolist() == [1, 3] and made.values.tolist() == [2.5, -4.0]
    assert made.nbytes == 2 * 4 + 2 * 4
    np.testing.assert_array_equal(changed(before, made), after)
    assert before[0, 1] == 2.0  # what was there stays


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_bit_comes(dtype):
    """-0 is not 0, and NaN is a number like others."""
    before = np.array([0.0, np.nan, 1.0, np.inf, 0.0], dtype)
    after = np.array([-0.0, np.nan, np.nan, np.inf, 1.0], dtype)
    made = changes(before, after)
    assert made.places.tolist() == [0, 2, 4]
    found = changed(before, made)
    assert found.tobytes() == after.tobytes() and found.dtype == dtype


def test_a_part_of_an_array_may_be_the_one_before():
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    box = whole[1:3, 2:5]
    after = box + np.array([0, 1, 0], np.float32)
    made = changes(box, after)
    assert made.places.tolist() == [1, 4]
    np.testing.assert_array_equal(changed(box, made), after)


def test_a_place_that_is_not_there_is_named():
    made = Changes(np.array([4], np.uint32), np.array([1.0], np.float32))
    with pytest.raises(ValueError, match="place 4 of a piece of 4 elements"):
        changed(np.zeros((2, 2), np.float32), made)
