"""Which rows to learn from."""

import numpy as np
import pytest

from jaxrl.data.selection import (
    filter_rows,
    replace_rows,
    soft_overlong_punishment,
    zero_variance_groups,
)

GROUPS = ["a", "b", "a", "b", "c"]


def test_prompts_whose_samples_all_earned_the_same():
    # a: 1, 1; b: 0, 1; c has one sample: kept
    same = zero_variance_groups([1, 0, 1, 1, 5], GROUPS)
    assert same.tolist() == [True, False, True, False, False]


def test_rewards_per_token_are_summed():
    # a: 0 + 1 and 1 + 0 are equal; b: 1 and 0.5 + 1 are not
    rewards = [[0, 1], [1], [1, 0], [0.5, 1], [0]]
    assert zero_variance_groups(rewards, GROUPS).tolist() == [True, False, True, False, False]
    padded = np.array([[0, 1], [1, 0], [1, 0], [0.5, 1], [0, 0]])
    assert zero_variance_groups(padded, GROUPS).tolist() == [True, False, True, False, False]


def test_masked_rows_are_no_evidence():
    # without row 2 a has one row; without row 3 of three, b = 0, 0 is the same
    assert not zero_variance_groups([1, 1], ["a", "a"], [[1], [0]]).any()
    assert zero_variance_groups([0, 0, 1], ["b"] * 3, [[1], [0, 1], [0]]).all()
    assert not zero_variance_groups([1, 1], ["a", "a"], [[0], [0]]).any()


def test_the_tolerance_is_inclusive():
    assert zero_variance_groups([0.25, 0.5], ["a", "a"], tol=0.25).all()
    assert not zero_variance_groups([0.25, 0.5], ["a", "a"], tol=0.2).any()
    third = [0.1] * 3  # numpy's standard deviation of these is 1.4e-17, not 0
    assert zero_variance_groups(third, ["a"] * 3, tol=0.0).all()


def test_filter_takes_the_first_prompts_that_differ():
    same = zero_variance_groups([0, 0, 1, 1, 5], GROUPS)
    assert filter_rows(same, GROUPS, 3).tolist() == [0, 1, 2, 3, 4]
    assert filter_rows(same, GROUPS, 1).tolist() == [0, 2]
    same = zero_variance_groups([1, 0, 1, 1, 5], GROUPS)
    assert filter_rows(same, GROUPS, 1).tolist() == [1, 3]
    assert filter_rows(same, GROUPS, 0).tolist() == []


def test_replace_gives_stand_ins_and_fresh_groups():
    # only prompt 1 (rows 2, 3) differs: it stands in for 0 and 2, as three groups
    index = [0, 0, 1, 1, 2, 2]
    same = zero_variance_groups([1, 1, 0, 1, 0, 0], index)
    rows, groups = replace_rows(same, index, 1 / 3, np.random.default_rng(0))
    assert rows.tolist() == [2, 3, 2, 3, 2, 3]
    assert groups.tolist() == [0, 0, 1, 1, 2, 2]


def test_replace_needs_enough_prompts_that_differ():
    index = [0, 0, 1, 1, 2, 2]
    same = zero_variance_groups([1, 1, 0, 1, 0, 0], index)
    assert replace_rows(same, index, 0.34, np.random.default_rng(0)) is None
    assert replace_rows(np.ones(6, bool), index, 0.0, np.random.default_rng(0)) is None


def test_replace_draws_by_the_generator_alone():
    index = np.repeat(np.arange(8), 2)
    same = np.repeat([True, False], 8)
    one, other = (
        replace_rows(same, index, 0.3, np.random.default_rng(seed))[0].tolist() for seed in (3, 3)
    )
    assert one == other
    assert set(one[:8]) <= set(range(8, 16)) and one[8:] == list(range(8, 16))


def test_literal_soft_overlong_punishment():
    # limit 100, buffer 20, factor 0.5: nothing up to 80, 0.5 * 10 / 20 at 90, all from 100 on
    found = soft_overlong_punishment([1, 80, 81, 90, 100, 130], 100, 20, 0.5)
    np.testing.assert_allclose(found, [0, 0, 0.025, 0.25, 0.5, 0.5])


@pytest.mark.parametrize("length", [0, 101])
def test_the_buffer_lies_within_the_limit(length):
    with pytest.raises(ValueError, match=rf"overlong_buffer.len={length} must be in \(0, max_gen"):
        soft_overlong_punishment([1], 100, length, 1.0)
