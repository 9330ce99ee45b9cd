"""Trajectories in the rows of the model: literal plans, and what must hold for any lengths."""

import dataclasses

import numpy as np
import pytest

from jaxrl.config.microbatching import few_widths
from jaxrl.data.microbatches import (
    MAX_PER_ROW,
    Microbatching,
    balance,
    best_fit_decreasing,
    computed_tokens,
    microbatches,
    plan,
)
from jaxrl.data.packing import empty_batch, length_bucket


def test_each_trajectory_goes_where_it_leaves_the_least_space():
    # by length: 9 (1), 6 (3), 5 (0), 4 (2), 2 (4). 9 and 6 open rows with 3 and 6 of 12 tokens
    # free; 5 fits only beside 6 and leaves 1; 4 opens a row with 8 free; 2 fits 3 best and leaves 1
    assert best_fit_decreasing(np.array([5, 9, 4, 6, 2]), 12) == [[1, 4], [3, 0], [2]]


def test_equal_lengths_keep_their_order_and_fill_rows_exactly():
    assert best_fit_decreasing(np.full(5, 4), 8) == [[0, 1], [2, 3], [4]]  # 4 + 4 = 8


def test_a_row_holds_at_most_sixteen_trajectories():
    assert [len(row) for row in best_fit_decreasing(np.ones(40, int), 64)] == [16, 16, 8]


def test_the_costliest_row_goes_to_the_cheapest_group_that_is_not_full():
    # 9 to group 0, 7 to 1, 5 to 1 (7 < 9) which then is full at 12, 1 to 0: 10 and 12
    assert balance([1, 9, 5, 7], groups=2) == [1, 0, 3, 2]


PACKED = Microbatching(rows=4, total=8, groups=2, packed=True)


def test_a_literal_plan():
    # in rows of 12: [11], [8, 4], [6, 5], costs 121, 64 + 16 = 80, 36 + 25 = 61. Four rows are
    # full, three need four; 121 to group 0; 80, 61 to group 1 (0, 80 < 121); the empty one to 0
    (layout,) = plan(np.array([4, 6, 11, 5, 8]), PACKED)
    assert layout.chosen.tolist() == [2, 4, 0, 1, 3]
    assert layout.row.tolist() == [0, 2, 2, 3, 3]
    assert layout.start.tolist() == [0, 0, 8, 0, 6]
    assert layout.shape == (4, 12)
    assert layout.size == (8, 12)  # min(16 x 4, 8) trajectories
    assert computed_tokens(plan(np.array([4, 6, 11, 5, 8]), PACKED)) == 4 * 12


@pytest.mark.parametrize(
    ("settings", "width", "counts"),
    [
        (PACKED, 12, [2, 4]),  # 1, 2, 3, 4 to even numbers
        (Microbatching(rows=8, total=64, packed=True), 12, [2, 4, 6, 8]),
        (Microbatching(rows=8, total=64), 12, [8]),
        (Microbatching(rows=8, total=6, groups=2), 12, [6]),  # no batch has more
        # 100 tokens: 8 rows of 12, 6 of 16, 4 of 24, whatever `rows`
        (Microbatching(rows=1, total=64, max_tokens=100), 12, [8]),
        (Microbatching(rows=1, total=64, max_tokens=100, groups=4), 16, [4]),
        (Microbatching(rows=1, total=64, max_tokens=100, groups=2, packed=True), 24, [2, 4]),
        # two trajectories of 16 in each row of 40: 10 need no more than 5 rows; quarters 2, 3, 4, 5
        (Microbatching(rows=8, total=10, packed=True, packed_length=40), 16, [2, 3, 4, 5]),
    ],
)
def test_row_counts(settings, width, counts):
    assert settings.row_counts(width) == counts


def test_padded_microbatches_within_a_budget_have_more_rows_where_they_are_shorter():
    settings = Microbatching(rows=1, total=16, groups=2, max_tokens=64)
    lengths = np.array([5, 24, 3, 13, 6, 17, 8, 2, 7, 4, 6])
    # 64 // 24 = 2 rows of 24; 64 // 16 = 4 of 16, the longest 13; 64 // 8 = 8 of 8
    shapes = [layout.shape for layout in plan(lengths, settings)]
    assert shapes == [(2, 24), (4, 16), (8, 8)]
    assert [len(layout.chosen) for layout in plan(lengths, settings)] == [2, 4, 5]


def a_batch(lengths, width=16):
    """Tokens 100 b + t + 1, all but the first two of a row sampled."""
    batch = empty_batch(len(lengths), width, 0)
    real = np.arange(width) < np.array(lengths)[:, None]
    tokens = np.where(real, 100 * np.arange(len(lengths))[:, None] + np.arange(width) + 1, 0)
    mask = (real & (np.arange(width) > 1)).astype(np.float32)
    return batch.replace(tokens=tokens, lengths=np.array(lengths, np.int32), loss_mask=mask)


def test_literal_rows():
    # [7, 0] and [3, 2] in two rows of 8: 49 > 9 + 4; the trajectory of no tokens stands nowhere
    batch, settings = a_batch([3, 7, 2, 0]), Microbatching(2, total=4, packed=True)
    ((chosen, rows, part),) = microbatches(batch.row_ids, batch, settings)
    assert chosen.tolist() == part.tolist() == [1, 3, 0, 2]
    assert rows.tokens.tolist() == [
        [101, 102, 103, 104, 105, 106, 107, 0],
        [1, 2, 3, 201, 202, 0, 0, 0],
    ]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0], [0, 1, 2, 0, 1, 0, 0, 0]]
    assert rows.segment_ids.tolist() == [[1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 2, 2, 0, 0, 0]]
    assert rows.wanted.astype(int).tolist() == [
        [0, 1, 1, 1, 1, 1, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0],
    ]
    assert rows.targets[0].tolist() == [102, 103, 104, 105, 106, 107, 0, 0]
    # 8 tokens of each of 4 trajectories; numbers from 2 x 8 for those that stand nowhere
    assert rows.source.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 23],
        [24, 25, 26, 27, 28, 29, 30, 31],
        [8, 9, 10, 35, 36, 37, 38, 39],
        [11, 12, 42, 43, 44, 45, 46, 47],
    ]


def random_case(seed):
    rng = np.random.default_rng(seed)
    groups, count = int(rng.choice([1, 2, 4])), int(rng.integers(1, 70))
    lengths = np.minimum(1 + rng.exponential(20, count).astype(int), 64)
    length = [None, 64, 100, 300][seed % 4]
    budget = [None, 4 * 300 * groups][seed // 4 % 2]
    total = -(-count // groups) * groups
    return lengths, Microbatching(
        int(rng.integers(1, 6)) * groups, total, groups, budget, seed % 3 > 0, length
    )


def assert_rows_spell_the_batch(batch, chosen, rows, n):
    """Reading the rows at `source` gives back every token, once, and its place."""
    source = rows.source[:n]
    here = source < rows.tokens.size
    assert here.sum() == batch.lengths[chosen].sum() == (rows.segment_ids > 0).sum()
    assert len(np.unique(rows.source)) == rows.source.size
    width = source.shape[1]
    for flat, expected in (
        (rows.tokens, batch.tokens[chosen, :width]),
        (rows.positions, np.broadcast_to(np.arange(width), source.shape)),
    ):
        np.testing.assert_array_equal(flat.reshape(-1)[source[here]], expected[here])
    row, segment = source // rows.tokens.shape[1], rows.segment_ids.reshape(-1)
    for b in range(n):  # in one row, one segment, its tokens one behind the other
        at = source[b][here[b]]
        assert len(set(row[b][here[b]])) <= 1
        assert len(set(segment[at])) <= 1
        assert (np.diff(at) == 1).all()


@pytest.mark.parametrize("seed", range(24))
def test_any_lengths(seed):
    lengths, settings = random_case(seed)
    batch = a_batch(lengths, width=length_bucket(int(lengths.max())))
    seen, shapes, computed = [], set(), 0
    for chosen, rows, part in microbatches(batch, batch, settings):
        seen += chosen.tolist()
        count, length = rows.tokens.shape
        shapes.add((count, length, *part.tokens.shape))
        computed += count * length
        assert count % settings.groups == 0
        assert len(part.tokens) % settings.groups == 0
        assert settings.max_tokens is None or count * length <= settings.max_tokens
        if settings.packed:
            assert_rows_spell_the_batch(batch, chosen, rows, len(chosen))
            assert len(part.tokens) == min(MAX_PER_ROW * count, settings.total)
        assert not part.lengths[len(chosen) :].any()
    assert sorted(seen) == list(range(len(lengths)))  # every trajectory once
    assert computed == computed_tokens(plan(lengths, settings))
    if settings.packed:
        assert len(shapes) <= 2  # full ones, and one of the three quarters
        assert len({shape[1] for shape in shapes}) == len({shape[3] for shape in shapes}) == 1


def test_the_sizes_that_warm_up_runs_make_every_shape():
    for seed in range(24):
        lengths, settings = random_case(seed)
        width = settings.width(int(lengths.max()))
        made = [
            plan(np.full(size, width), settings)[0].shape for size in settings.batch_sizes(width)
        ]
        length = settings.length(width) if settings.packed else width
        assert made == [(count, length) for count in settings.row_counts(width)]


@pytest.mark.parametrize("seed", range(24))
def test_few_shapes_for_any_lengths(seed):
    lengths, settings = random_case(seed)
    settings = dataclasses.replace(settings, widths=few_widths(64, settings.packed))
    width = settings.batch_width(int(lengths.max()))
    batch, seen, shapes = a_batch(lengths, width=width), [], []
    for chosen, rows, part in microbatches(batch, batch, settings):
        seen += chosen.tolist()
        shapes.append((*rows.tokens.shape, *part.tokens.shape))
    assert sorted(seen) == list(range(len(lengths)))  # every trajectory once
    made = [plan(np.full(n, width), settings)[0].shape for n in settings.batch_sizes(width)]
    if not settings.packed:
        assert {length for _, length, _, _ in shapes} <= {8, 16, 32, 64}
        assert made[-1][1] == width
        return
    assert {shape[3] for shape in shapes} == {width}  # 64, whatever the batch
    assert {shape[:2] for shape in shapes} <= set(made)
    assert len(made) <= 2
    # what is padding is less than a quarter of a full microbatch
    rows = len(best_fit_decreasing(lengths, settings.length(width)))
    assert sum(shape[0] for shape in shapes) - rows < settings.row_counts(width)[0]
    single = settings.is_single(np.full(settings.total, width))
    assert not single or len(plan(lengths, settings)) == 1


def test_a_literal_plan_of_few_shapes():
    # 7 rows, of which 4 are a full microbatch; 3 are as many quarters as they need, one row each
    settings = Microbatching(rows=4, total=16, packed=True, widths=(16,))
    assert settings.row_counts(16) == [1, 4]
    shapes = [layout.shape for layout in plan(np.array([9] * 6 + [16]), settings)]
    assert shapes == [(4, 16), (1, 16), (1, 16), (1, 16)]
    # on two groups of devices a quarter is two rows: three or four rows are a full one at once
    settings = dataclasses.replace(settings, groups=2)
    assert settings.row_counts(16) == [2, 4]
    shapes = [layout.shape for layout in plan(np.array([9] * 7), settings)]
    assert shapes == [(4, 16), (4, 16)]
    # padded, a row has at most twice the tokens that it needs, or an eighth of the longest
    assert few_widths(3000, packed=False) == (384, 768, 1536, 3072)
    assert few_widths(3000, packed=True) == (3072,)


def test_groups_cost_the_same_and_few_tokens_are_padding():
    # 256 exponential lengths, mean 0.4 of 1024: the distribution of benchmarks/train_step.py
    quantiles = -np.log(1 - (np.arange(256) + 0.5) / 256)
    lengths = np.minimum(1 + (0.45 * 1024 * quantiles).astype(int), 1024)
    settings = Microbatching(rows=32, total=256, groups=8, packed=True)
    layouts = plan(lengths, settings)
    worst = []
    for layout in layouts:
        group = layout.row // (layout.shape[0] // 8)
        cost = np.bincount(group, lengths[layout.chosen] ** 2.0, minlength=8)
        worst.append(cost.max() / cost.mean())
    assert max(worst[:-1]) < 1.05  # the last has empty rows
    assert lengths.sum() / computed_tokens(plan(lengths, settings)) > 0.95


@pytest.mark.parametrize(
    ("settings", "lengths", "message"),
    [
        (
            {"packed": True, "packed_length": 20},
            [21],
            "a trajectory of 21 tokens does not fit in packed_length=20; raise "
            "trainer.packed_length, or leave it None",
        ),
        (
            {"max_tokens": 47, "groups": 2},
            [17],
            "max_tokens_per_microbatch=47 is less than one row of 24 tokens for each of 2 devices; "
            "set it to 48 or more",
        ),
        ({}, [4] * 5, "5 trajectories; the shapes are for 4"),
    ],
)
def test_what_does_not_fit_is_an_error(settings, lengths, message):
    with pytest.raises(ValueError, match=message):
        plan(np.array(lengths), Microbatching(**{"rows": 4, "total": 4, **settings}))


def test_a_trajectory_as_long_as_the_row_fills_it():
    (layout,) = plan(np.array([3, 20]), Microbatching(4, 4, packed=True, packed_length=20))
    assert layout.chosen.tolist() == [1, 0]
    assert layout.row.tolist() == [0, 1]
    assert layout.size == (4, 20)  # two of four rows: a quarter of 16 x 2, and there are four
