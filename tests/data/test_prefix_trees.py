"""Trajectories that begin alike as rows of trees: literals, and what every cut keeps."""

import dataclasses

import numpy as np
import pytest

from jaxrl.data.microbatches import (
    Microbatching,
    avoided_tokens,
    computed_tokens,
    microbatches,
    plan_batch,
)
from jaxrl.data.packing import empty_batch
from jaxrl.data.prefix_trees import (
    SHARING,
    UNSHARED,
    Sharing,
    alike,
    fill_rows,
    shared_prefixes,
)

LINES = [[5, 6, 8], [5, 6, 7, 2, 3], [9, 4], [5, 6, 7, 1]]


def batch_of(lines, wanted=None, width=8):
    """The mask of each is `wanted`, or its last token."""
    tokens, mask = np.zeros((len(lines), width), np.int32), np.zeros((len(lines), width))
    for row, line in enumerate(lines):
        tokens[row, : len(line)] = line
        mask[row, len(line) - 1] = 1
        if wanted:
            mask[row] = 0
            mask[row, wanted[row]] = 1
    lengths = np.array([len(line) for line in lines], np.int32)
    return empty_batch(len(lines), width, 0).replace(
        tokens=tokens, lengths=lengths, loss_mask=mask.astype(np.float32)
    )


def rows_of(batch, **settings):
    given = {"rows": 4, "total": 4, "sharing": SHARING["on"]} | settings
    return list(microbatches(batch.row_ids, batch, Microbatching(**given)))


def test_a_literal_tree():
    """The example of `prefix_trees.py`, and a tree of one trajectory behind it."""
    ((chosen, rows, row_ids),) = rows_of(batch_of(LINES))
    # of 14 tokens three are shared with the first and two with the second: 9. A microbatch has
    # 4 x 8 tokens; of its quarters, 8, 16, 24, 32, 16 is the first that holds them.
    assert chosen.tolist() == row_ids.tolist() == [3, 1, 0, 2]
    assert rows.tokens.tolist() == [[5, 6, 7, 1, 2, 3, 8, 9, 4, *[0] * 7]]
    assert rows.ends.tolist() == [[7, 7, 6, 4, 6, 6, 7, 9, 9, *range(10, 17)]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 3, 4, 2, 0, 1, *[0] * 7]]
    assert rows.parents.tolist() == [[0, 0, 1, 2, 2, 4, 1, 0, 7, *[0] * 7]]
    assert rows.segment_ids.tolist() == [[1] * 9 + [0] * 7]
    assert np.flatnonzero(rows.wanted).tolist() == [3, 5, 6, 8]
    source = [row[:n].tolist() for row, n in zip(rows.source, (4, 5, 3, 2), strict=True)]
    assert source == [[0, 1, 2, 3], [0, 1, 2, 4, 5], [0, 1, 6], [7, 8]]
    assert rows.asked.sum(axis=1).tolist() == [1, 1, 1, 1]


def test_a_token_is_wanted_where_one_of_its_trajectories_wants_it():
    """A shared token that only the second is trained on."""
    ((_, rows, _),) = rows_of(batch_of(LINES, wanted=[[2], [1, 4], [0], [3]]))
    # in the tree's order; nothing comes before a first token
    assert [np.flatnonzero(row).tolist() for row in rows.asked] == [[3], [1, 4], [2], []]
    assert np.flatnonzero(rows.wanted).tolist() == [1, 3, 5, 6]


def test_trajectories_are_sorted_by_their_tokens_and_labels():
    tokens = np.array([[5, 8, 0], [5, 6, 7], [5, 6, 9], [5, 6, 7]])
    lengths = np.array([2, 3, 3, 3])
    order, shared = shared_prefixes(tokens, lengths)
    assert (order.tolist(), shared.tolist()) == ([1, 3, 2, 0], [0, 3, 2, 1])
    labels = np.zeros((4, 3, 2), np.uint8)
    labels[1, 1] = 1  # of another kind from its second token on
    assert alike(shared, order, [labels]).tolist() == [0, 1, 2, 1]


def test_labels_of_several_kinds_share_what_all_of_them_do():
    shared, order = np.array([0, 3, 3]), np.array([0, 1, 2])
    first, second = np.zeros((3, 3, 2), np.uint8), np.zeros((3, 3), np.float32)
    first[0, 0] = 1  # its first token is of another kind: nothing is left to ask the second
    second[2, 2] = 0.5
    for labels in ([first, second], [second, first]):
        assert alike(shared, order, labels).tolist() == [0, 0, 2]
    assert alike(shared, order, [np.zeros((3, 3, 0)), second]).tolist() == [0, 3, 2]


def test_rows_are_filled_in_order():
    lengths, shared = np.array([5, 5, 5, 6, 2]), np.array([0, 4, 3, 0, 1])
    # 5 + 1 + 2 = 8; 6 + 1 = 7
    assert fill_rows(lengths, shared, rows=2, length=8, most=9) == [0, 3, 5]
    assert fill_rows(lengths, shared, rows=2, length=7, most=9) == [0, 2, 3]  # 5 + 6 is too many
    assert fill_rows(lengths, shared, rows=3, length=99, most=2) == [0, 2, 4, 5]


def test_it_is_folded_where_that_saves_enough():
    batch = batch_of(LINES)
    for sharing, saves in ((None, False), (SHARING["on"], True), (Sharing(0.3), True)):
        layouts = plan_batch(batch, Microbatching(4, 4, sharing=sharing))
        assert (computed_tokens(layouts), avoided_tokens(layouts)) == (
            (16, 5) if saves else (32, 0)
        )
    # 5 of 14 tokens are shared, 0.357; the longest has 5
    for sharing in (Sharing(0.36), Sharing(0.0, shortest=6), SHARING["auto"]):
        assert plan_batch(batch, Microbatching(4, 4, sharing=sharing))[0].shared is None


@pytest.mark.parametrize("seed", range(20))
def test_every_trajectory_is_once_in_a_microbatch_and_sees_what_it_had_seen(seed):
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(16):
        earlier = lines[rng.integers(len(lines))] if lines and rng.random() < 0.7 else []
        line = [*earlier[: rng.integers(len(earlier) + 1)], *rng.integers(1, 4, rng.integers(1, 5))]
        lines.append([int(x) for x in line[:12]])
    batch = batch_of(lines, width=12)
    groups = int(rng.choice([1, 2, 4]))
    settings = Microbatching(
        int(rng.choice([4, 8])), 16, groups, packed=bool(rng.integers(2)), sharing=SHARING["on"]
    )
    allowed = {(groups, n) for width in (8, 12) for n in settings.tree_lengths(width)}
    seen, computed = [], 0
    for chosen, rows, _ in microbatches(batch.row_ids, batch, settings):
        seen += chosen.tolist()
        if rows.ends is None:
            continue
        assert rows.tokens.shape in allowed
        computed += rows.tokens.size
        flat = rows.tokens.reshape(-1)
        length = rows.tokens.shape[1]
        for number, source in zip(chosen, rows.source, strict=False):
            line = lines[number]
            path = source[: len(line)]
            assert flat[path].tolist() == line
            row, place = path[-1] // length, path[-1] % length
            visible = np.flatnonzero((np.arange(length) <= place) & (place < rows.ends[row]))
            assert (row * length + visible).tolist() == path.tolist()
    assert sorted(seen) == list(range(16))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_compiled_beforehand_is_all_that_trees_can_be(seed):
    """Random forests, in every way of cutting: their shapes are among those of rows of zeros."""
    rng = np.random.default_rng(seed)
    groups, packed = int(rng.choice([1, 2, 4])), bool(rng.integers(2))
    cut = Microbatching(
        rows=groups * int(rng.integers(1, 6)),
        total=64,
        groups=groups,
        packed=packed,
        packed_length=int(rng.choice([16, 96, 256])) if packed and rng.integers(2) else None,
        widths=((16,) if packed else (8, 16)) if rng.integers(2) else (),
        sharing=SHARING["on"],
    )
    compiled = set()
    for width in (8, 12, 16):
        blank = dataclasses.replace(cut, sharing=UNSHARED)
        for size in blank.batch_sizes(blank.width(width)):
            rows = empty_batch(size, 16, blank.width(width))
            compiled |= {(x.shape, x.size) for x in plan_batch(rows, blank)}
    for _ in range(5):
        lines = []
        for _ in range(int(rng.integers(2, 65))):
            earlier = lines[rng.integers(len(lines))] if lines and rng.random() < 0.6 else []
            line = [*earlier[: rng.integers(len(earlier) + 1)], *rng.integers(1, 9, 7).tolist()]
            lines.append(line[:16])
        layouts = plan_batch(batch_of(lines, width=16), cut)
        assert {(x.shape, x.size) for x in layouts if x.shared is not None} <= compiled


def test_rows_of_zeros_have_every_shape():
    settings = Microbatching(8, 32, groups=2, sharing=UNSHARED)
    # 4 rows of 12 for each group: 12, 24, 36 and 48 tokens
    shapes = settings.tree_lengths(12)
    assert shapes == [12, 24, 36, 48]
    for size, length in zip(settings.batch_sizes(12), shapes, strict=True):
        (layout,) = plan_batch(empty_batch(size, 12), settings)
        assert layout.shape == (2, length)
        assert avoided_tokens([layout]) == 0
