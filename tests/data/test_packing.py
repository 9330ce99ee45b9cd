"""Trajectories -> TrainBatch."""

import numpy as np
import pytest

from jaxrl.data.packing import (
    collate,
    empty_batch,
    group_numbers,
    length_bucket,
    minibatches,
    round_up,
    row_slices,
)


@pytest.mark.parametrize(
    ("length", "bucket"),
    [
        (1, 8),
        (8, 8),
        (9, 12),
        (13, 16),
        (17, 24),
        (24, 24),
        (25, 32),
        (33, 48),
        (49, 64),
        (65, 96),
        (97, 128),
    ],
)
def test_length_bucket_literals(length, bucket):
    assert length_bucket(length) == bucket


def test_at_most_a_third_of_a_row_is_padding():
    # the worst are 33 -> 48 = 31.25 % and 2^n + 1 -> 1.5 * 2^n, below a third
    for length in range(8, 2000):
        assert length <= length_bucket(length) < 1.5 * length


@pytest.mark.parametrize(
    ("n", "multiple", "expected"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16)]
)
def test_round_up(n, multiple, expected):
    assert round_up(n, multiple) == expected


def columns(**changes):
    """The example of TrainBatch, prompt "42>" answered "24<eos>", and a shorter second row."""
    return {
        "prompt_token_ids": [[4, 2, 13], [7]],
        "response_ids": [[2, 4, 40], [9, 40]],
        "rewards": [[1 / 3, 1 / 3, 1 / 3], [0.0, -1.0]],
        "loss_masks": [[1, 1, 1], [0, 1]],
        "stop_reasons": ["stop", "stop"],
        "rollout_logprobs": [[-0.1, -0.2, -0.3], [0.0, -0.5]],
        "policy_versions": [3, 4],
        "rollout_metrics": {},
        **changes,
    }


def test_rollouts_without_log_probs():
    batch = collate(columns(rollout_logprobs=None), index=[0, 5])
    assert batch.rollout_log_probs is None
    assert minibatches(batch.replace(index=np.array([0, 1])), 1)[0].rollout_log_probs is None


def test_versions_go_with_their_rows_and_may_be_unknown():
    versions = {"token_versions": [[3, 3, 4], [-1, 4]], "context_versions": [[3, 3, 3], [-1, 4]]}
    batch = collate(columns(**versions), index=[0, 1])
    second, first = minibatches(batch, 1, np.array([1, 0]))
    np.testing.assert_array_equal(second.token_versions[0, :4], [-1, -1, 4, -1])
    np.testing.assert_array_equal(first.token_versions[0, :6], [-1, -1, -1, 3, 3, 4])
    np.testing.assert_array_equal(first.context_versions[0, :6], [-1, -1, -1, 3, 3, 3])
    empty, unknown = empty_batch(2, 8), collate(columns(), index=[0, 1])
    for name in versions:
        assert (getattr(empty, name) == -1).all()
        assert getattr(empty, name).dtype == getattr(batch, name).dtype == np.int32
        assert getattr(unknown, name) is None


def padded(*rows):
    """Rows to the bucket of 8."""
    return [[*row, *[0] * (8 - len(row))] for row in rows]


def test_collate_literal():
    batch = collate(columns(token_versions=[[3, 3, 4], [-1, 4]]), index=[0, 5])
    third = np.float32(1 / 3)
    expected = {
        "tokens": padded([4, 2, 13, 2, 4, 40], [7, 9, 40]),
        "lengths": [6, 3],
        "response_mask": padded([0, 0, 0, 1, 1, 1], [0, 1, 1]),
        "loss_mask": padded([0, 0, 0, 1, 1, 1], [0, 0, 1]),
        "rewards": padded([0, 0, 0, third, third, third], [0, 0, -1]),
        "rollout_log_probs": np.float32(padded([0, 0, 0, -0.1, -0.2, -0.3], [0, 0, -0.5])),
        "index": [0, 5],
        "policy_versions": [3, 4],
        "token_versions": [[-1, -1, -1, 3, 3, 4, -1, -1], [-1, -1, 4, -1, -1, -1, -1, -1]],
    }
    integers = {"tokens", "lengths", "index", "policy_versions", "token_versions"}
    for name, value in expected.items():
        np.testing.assert_array_equal(getattr(batch, name), value, err_msg=name)
        assert getattr(batch, name).dtype == (np.int32 if name in integers else np.float32), name
    assert batch.old_log_probs is batch.ref_log_probs is batch.advantages is None


def test_rewards_by_name_are_in_alphabetical_order():
    # columns "calm", "form", "right"; 0 where a row has none of the name
    terms = [{"right": 3.0, "calm": -5.0}, {"form": 0.5}]
    batch = collate(columns(reward_terms=terms), index=[0, 5])
    np.testing.assert_array_equal(batch.reward_terms, [[-5, 0, 3], [0, 0.5, 0]])


def test_the_longest_row_decides_the_width():
    batch = collate(columns(prompt_token_ids=[[4] * 14, [7]]), index=[0, 1])
    assert batch.tokens.shape == (2, 24)  # 14 + 3 = 17 tokens


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("rewards", [[1 / 3, 1 / 3, 1 / 3], [1.0]]),
        ("rewards", [[1 / 3, 1 / 3, 1 / 3], 1.0]),
        ("loss_masks", [[1, 1, 1], [1, 1, 1]]),
        ("rollout_logprobs", [[-0.1, -0.2, -0.3], []]),
        ("token_versions", [[3, 3, 3], [3]]),
    ],
)
def test_a_list_of_the_wrong_length_is_named_by_column_and_row(column, values):
    message = rf"{column}\[1\] must have one entry for each of the 2 response tokens"
    with pytest.raises(ValueError, match=message):
        collate(columns(**{column: values}), index=[0, 1])


def test_row_slices_are_consecutive_and_the_last_is_filled_with_zeros():
    tree = {"a": np.arange(1, 6), "b": np.ones((5, 2), np.float32)}
    slices = list(row_slices(tree, 2))
    assert [s["a"].tolist() for s in slices] == [[1, 2], [3, 4], [5, 0]]
    assert slices[2]["b"].tolist() == [[1, 1], [0, 0]]
    assert isinstance(slices[2]["a"], np.ndarray)  # stays on the host


def test_row_slices_that_divide_add_nothing():
    assert [s.tolist() for s in row_slices(np.arange(4), 2)] == [[0, 1], [2, 3]]
    assert [s.tolist() for s in row_slices(np.arange(2), 4)] == [[0, 1, 0, 0]]


def test_groups_may_come_in_any_order_and_their_rows_stay_together():
    assert group_numbers(np.array([0, 0, 1, 2, 2])).tolist() == [0, 0, 1, 2, 2]
    assert group_numbers(np.array([7, 7, 3, 5, 5])).tolist() == [0, 0, 1, 2, 2]
    with pytest.raises(ValueError, match=r"rows of prompt group 3 are not neighbours in batch.ind"):
        group_numbers(np.array([3, 5, 3]))


def test_minibatches_of_groups_in_another_order_lose_no_row_and_double_none():
    batch = empty_batch(6, 8).replace(index=np.array([2, 2, 0, 0, 1, 1], np.int32))
    first, second = minibatches(batch, 2)
    assert (first.row_ids.tolist(), second.row_ids.tolist()) == ([0, 1, 2, 3], [4, 5])
    assert (first.index.tolist(), second.index.tolist()) == ([0, 0, 1, 1], [0, 0])
    first, second = minibatches(batch, 2, np.array([2, 0, 1]))  # the third that comes is the first
    assert (first.row_ids.tolist(), second.row_ids.tolist()) == ([4, 5, 0, 1], [2, 3])
