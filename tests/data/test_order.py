"""The order of the data: literal batches, proportions, sources that are used up, any position."""

from collections import Counter

import numpy as np
import pytest

from jaxrl.config import TrainConfig, validate
from jaxrl.data.order import DataOrder, data_order, proportional_counts
from jaxrl.types import Prompt


def batches(order, *positions):
    return [order.batch(k).tolist() for k in positions]


def test_an_epoch_is_a_permutation_fixed_by_seed_and_epoch():
    order = DataOrder((10,), (5,), seed=1)
    # numpy's PCG64 seeded with (1, 0); the literal guards resumed runs against a silent change.
    assert batches(order, 0, 1) == [[8, 4, 7, 0, 1], [2, 5, 9, 6, 3]]
    assert batches(order, 2, 3) != batches(order, 0, 1)
    assert batches(order, 0) != batches(DataOrder((10,), (5,), seed=2), 0)


def test_batches_cover_an_epoch_once_and_drop_the_rest():
    # 7 rows in batches of 3: two batches per epoch, one row left out.
    order = DataOrder((7,), (3,), seed=5)
    assert order.batches_per_epoch == 2
    first, second = (
        np.random.default_rng((5, epoch)).permutation(7).tolist() for epoch in range(2)
    )
    assert batches(order, *range(4)) == [first[:3], first[3:6], second[:3], second[3:6]]


def test_without_shuffling_rows_keep_their_order_every_epoch():
    order = data_order([0, 0, 1, 1, 1], 2, seed=3, shuffle=False)
    assert batches(order, 0, 1, 2) == [[0, 1], [2, 3], [0, 1]]
    mixed = data_order([0, 0, 1, 1, 1], 2, seed=3, weights=[1, 1], shuffle=False)
    assert batches(mixed, 0, 1, 2, 3) == [[0, 2], [1, 3], [0, 4], [1, 2]]


def test_every_batch_has_the_proportions_of_the_weights():
    order = data_order([0] * 9 + [1] * 100 + [2] * 2, 8, seed=0, weights=[2, 5, 1])
    assert order == DataOrder((9, 100, 2), (2, 5, 1), seed=0)
    for rows in batches(order, *range(60)):
        of = Counter("first" if row < 9 else "second" if row < 109 else "third" for row in rows)
        assert of == {"first": 2, "second": 5, "third": 1} and len(set(rows)) == 8


def test_a_source_that_is_used_up_begins_anew_while_others_go_on():
    order = data_order([0, 0, 0, 0, 0, 1, 1], 3, seed=7, weights=[2, 1])  # 5 rows by 2; 2 by 1
    found = batches(order, *range(6))
    first = [sorted(row for row in rows if row < 5) for rows in found]
    second = [next(row for row in rows if row >= 5) for rows in found]
    passes = [{*first[k], *first[k + 1]} for k in (0, 2, 4)]  # one row of five is left out of each
    assert all(len(rows) == 4 for rows in passes)
    assert [sorted(second[k : k + 2]) for k in (0, 2, 4)] == [[5, 6]] * 3
    assert order.metrics(6) == {
        "trainer/epochs_of_source_0": 6 * 2 / 5,
        "trainer/epochs_of_source_1": 6 * 1 / 2,
    }
    assert DataOrder((7,), (3,), seed=7).metrics(6) == {}
    assert order.batches_per_epoch == 2  # 7 rows by 3


def test_position_alone_finds_a_batch_and_a_batch_is_mixed():
    order = data_order([0] * 40 + [1] * 60, 10, seed=11, weights=[0.5, 0.5])
    again = data_order([0] * 40 + [1] * 60, 10, seed=11, weights=[3.0, 3.0])
    walked = batches(order, *range(1002))
    assert batches(again, 1001, 17) == [walked[1001], walked[17]]
    sides = [[row < 40 for row in rows] for rows in walked[:20]]
    assert len({tuple(side) for side in sides}) > 10  # not one source after the other


@pytest.mark.parametrize(
    ("weights", "total", "expected"),
    [
        ([1, 1, 2], 5, [1, 1, 3]),  # 1.25 1.25 2.5
        ([0.7, 0.3], 4, [3, 1]),  # 2.8 1.2
        ([0.1, 0.1, 0.1], 3, [1, 1, 1]),
        ([1, 1], 3, [2, 1]),  # equal remainders: the first
        ([99, 1], 10, [10, 0]),
    ],
)
def test_proportional_counts(weights, total, expected):
    assert proportional_counts(weights, total) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 8}, r"takes 8 rows of the data, which has 7; trainer.train_batch_size=8"),
        ({"batch_size": 0}, r"takes 0 rows of the data"),
        ({"weights": [99, 1]}, r"train_data_weights=\[99, 1\]: source 1 .* comes to no row of a b"),
        ({"weights": [1, 3]}, r"takes 3 rows of source 1 of data.train_data, which has 2"),
        ({"weights": [1, 1, 2]}, r"takes 2 rows of source 2 of data.train_data, which has 0"),
    ],
)
def test_batches_that_cannot_be_filled(given, message):
    with pytest.raises(ValueError, match=message):
        data_order([0] * 5 + [1] * 2, **{"batch_size": 4, "seed": 0, **given})


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([0, 1, 0, 1], r"row 2 is of source 0 and follows one of source 1"),  # sizes would be 2, 2
        ([0, 0, 1, 2], r"data.train_data_weights=\[1, 1\]: row 3 is of source 2"),
    ],
)
def test_rows_that_are_not_in_the_order_of_the_sources_have_no_weights(sources, message):
    assert data_order(sources, 2, seed=0) == DataOrder((4,), (2,), seed=0)
    with pytest.raises(ValueError, match=message):
        data_order(sources, 2, seed=0, weights=[1, 1])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], r"data.train_data_weights=\[1.0\]: give one for each of the 2 sources"),
        ([1.0, 0.0], r"data.train_data_weights=0.0: must be a number above 0"),
        ([1.0, float("inf")], r"data.train_data_weights=inf: must be a number above 0"),
    ],
)
def test_weights_are_checked_before_the_run(weights, message):
    config = TrainConfig()
    config.data.train_data = ["a.parquet", "b.parquet"]
    config.data.train_data_weights = weights
    with pytest.raises(ValueError, match=message):
        validate(config)


def test_a_uid_names_its_source():
    uids = ("2:17", "mine", "", "17", "a:17", ":17")
    assert [Prompt(uid, [], (), "").source for uid in uids] == [2, 0, 0, 0, 0, 0]
