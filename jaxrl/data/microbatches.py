"""A batch -> microbatches: which trajectories run together, and where in the rows of the model.

Padded, a row holds one trajectory. Packed, it holds several, found by best-fit decreasing; a
trajectory never straddles two rows. All of it is numpy on the host, and the same lengths give the
same microbatches. Shapes are few: a length bucket decides all but the number of packed rows, which
is one of four; where programs take minutes to compile they are fewer still, see `widths`.

Folded, trajectories that begin alike share a row and what they begin with (`prefix_trees.py`). A
microbatch then is one row for each data-parallel group, which may be as long as all rows together
that the group has otherwise: what the model computes is bounded by tokens, not by trajectories.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.data.packing import (
    beside_tokens,
    buckets_between,
    length_bucket,
    one_per_row,
    round_up,
    with_targets,
)
from jaxrl.data.prefix_trees import UNSHARED, Sharing, alike, fill_rows, shared_prefixes, tree_rows
from jaxrl.data.routes import OwnRoutes
from jaxrl.parallel.context import row_length, split_rows
from jaxrl.types import MOST_SEGMENTS, Array, ModelRows, TrainBatch

MAX_PER_ROW = MOST_SEGMENTS  # bounds the rows of the losses' arrays


@dataclass(frozen=True)
class Microbatching:
    """Describe how batches are cut; rows are counted over all devices.

    Example: 8 trajectories of at most 12 tokens on 2 devices, packed into rows of 24 tokens, at
    most 96 tokens at once: 4 rows are full, and a microbatch has 2 or 4.

    Args:
        rows: of a microbatch.
        total: most trajectories of a batch, a multiple of `groups`.
        groups: data-parallel groups of devices; each gets the same number of consecutive rows.
        max_tokens: rows x tokens of a microbatch, in place of `rows`.
        packed: several trajectories in a row.
        packed_length: tokens of a packed row; None = the bucket of the batch's longest trajectory.
        widths: that the losses' arrays can have, ascending, in place of all buckets; packed rows
            then come in two numbers, a quarter of a full microbatch and a full one.
        context: devices over which each row is spread.
        sharing: when trajectories share what they begin with; None = never.
    """

    rows: int
    total: int
    groups: int = 1
    max_tokens: int | None = None
    packed: bool = False
    packed_length: int | None = None
    widths: tuple[int, ...] = ()
    context: int = 1
    sharing: Sharing | None = None

    def width(self, longest: int) -> int:
        """Return T of the losses' arrays: the longest trajectory's bucket, or a packed row."""
        bucket = next((w for w in self.widths if w >= longest), length_bucket(longest))
        return bucket if self.packed_length is None else min(bucket, self.packed_length)

    def batch_width(self, longest: int) -> int:
        """Return the T of a whole batch, before it is cut."""
        return self.width(longest) if self.widths else length_bucket(longest)

    def batch_widths(self, shortest: int, longest: int) -> list[int]:
        """Return the T of batches whose longest rows have `shortest` to `longest` tokens."""
        return sorted({self.batch_width(n) for n in buckets_between(shortest, longest)})

    def length(self, width: int) -> int:
        """Return L of the model's rows."""
        return row_length(self.packed_length or width, self.context)

    def row_counts(self, width: int) -> list[int]:
        """Return the numbers of rows that a microbatch can have, ascending; the last is a full one.

        The quarters of a full one if packed, so that a few trajectories left over cost few rows.
        """
        full = min(self._limit(width), self._most(width))
        quarters = ((1, 4) if self.widths else (1, 2, 3, 4)) if self.packed else (4,)
        return sorted({round_up(-(-full * n // 4), self.groups) for n in quarters})

    def tree_lengths(self, width: int) -> list[int]:
        """Return the tokens that a row of trees can have, ascending: so many times `width`.

        The last is all that a group of devices has in a full microbatch, and no more than all its
        trajectories; the others are eighths of it: where much is shared little is left.
        """
        full = min(self._limit(width), self._most(width)) // self.groups * self.length(width)
        times = min(full // width, self.total // self.groups)
        eighths = (1, 2, 8) if self.widths else (1, 2, 4, 6, 8)
        return sorted({width * -(-times * n // 8) for n in eighths})

    def tree_size(self, length: int, width: int) -> int:
        """Return the most trajectories of a microbatch whose rows of trees have `length` tokens."""
        of_row = max(MAX_PER_ROW * -(-length // self.length(width)), length // width)
        return min(of_row * self.groups, self.total)

    def next_rows(self, left: int, width: int) -> int:
        """Return the rows of the next microbatch, of `left` packed ones that are in none yet.

        Without a program for a half and three quarters these are two and three quarters, so that
        less than one quarter of a microbatch is padding either way.
        """
        counts = self.row_counts(width)
        if self.widths and round_up(left, counts[0]) < counts[-1]:
            return counts[0]
        return next((n for n in counts if n >= left), counts[-1])

    def batch_sizes(self, width: int) -> list[int]:
        """Return how many trajectories of `width` tokens make one microbatch of each shape."""
        if self.sharing is UNSHARED:
            return [n // width * self.groups for n in self.tree_lengths(width)]
        return [min(rows * self._per_row(width), self.total) for rows in self.row_counts(width)]

    def is_single(self, lengths: np.ndarray) -> bool:
        """Return whether a batch of given lengths is surely one microbatch without zero rows."""
        width = self.width(int(lengths.max()))
        fits = self.max_tokens is None and self.rows >= self._most(width)
        fits &= not (self.packed and self.widths) or len(self.row_counts(width)) == 1
        return fits and len(lengths) == self.total

    def _per_row(self, width: int) -> int:
        """Count the trajectories of up to `width` tokens in every row but the last, at least."""
        return min(self.length(width) // width, MAX_PER_ROW) if self.packed else 1

    def _most(self, width: int) -> int:
        """Return the most rows that a batch takes."""
        return round_up(-(-self.total // self._per_row(width)), self.groups)

    def _limit(self, width: int) -> int:
        length = self.length(width)
        if self.max_tokens is None:
            return self.rows
        if self.max_tokens < self.groups * length:
            raise ValueError(
                f"max_tokens_per_microbatch={self.max_tokens} is less than one row of {length} "
                f"tokens for each of {self.groups} devices; set it to {self.groups * length} or "
                "more"
            )
        return self.max_tokens // length // self.groups * self.groups


class Layout(NamedTuple):
    """Describe one microbatch: where its n trajectories stand in the rows of the model.

    Example: trajectories 3 and 5, of 4 and 2 tokens, in the first of two rows of 8: chosen [3, 5],
    row [0, 0], start [0, 4], shape (2, 8).
    """

    chosen: np.ndarray  # [n] number of each trajectory in the batch
    row: np.ndarray  # [n], ascending
    start: np.ndarray  # [n], of trees the first token that is its own
    shape: tuple[int, int]  # R, L
    size: tuple[int, int]  # B, T of the losses' arrays; B >= n
    shared: np.ndarray | None = None  # [n] tokens that it has from the one before it; of trees


def plan(lengths: np.ndarray, settings: Microbatching) -> list[Layout]:
    """Plan the microbatches of trajectories of given lengths [B]; those that need most come first.

    Raises:
        ValueError: a trajectory is longer than a packed row; more trajectories than
            `settings.total`; not one row for each device within `settings.max_tokens`.
    """
    if len(lengths) > settings.total:
        raise ValueError(f"{len(lengths)} trajectories; the shapes are for {settings.total}")
    return (_packed if settings.packed else _padded)(lengths, settings)


def plan_batch(batch: TrainBatch, settings: Microbatching) -> list[Layout]:
    """Plan the microbatches of a batch, folded where that saves enough, see `Sharing`.

    Raises:
        ValueError: see `plan`.
    """
    lengths, sharing = np.asarray(batch.lengths), settings.sharing
    flat = plan(lengths, settings)
    if sharing is None or int(lengths.max()) < sharing.shortest:
        return flat
    if sharing is UNSHARED:
        order = np.arange(len(lengths))
        return _folded(order, lengths, np.zeros_like(order), settings)
    least, tokens = sharing.least * int(lengths.sum()), np.asarray(batch.tokens)
    order, shared = shared_prefixes(tokens, lengths)
    if shared.sum() <= least:  # what lies beside the tokens is larger, and can but part them
        return flat
    labels = [np.asarray(x) for x in beside_tokens(batch).values() if x is not None]
    shared = alike(shared, order, labels)
    trees = _folded(order, lengths[order], shared, settings)
    saves = avoided_tokens(trees) > least and computed_tokens(trees) < computed_tokens(flat)
    return trees if saves else flat


def computed_tokens(layouts: Sequence[Layout]) -> int:
    """Count the tokens that the model runs on, with padding."""
    return sum(math.prod(layout.shape) for layout in layouts)


def avoided_tokens(layouts: Sequence[Layout]) -> int:
    """Count the tokens that a trajectory has from another one, on which the model does not run."""
    return sum(int(layout.shared.sum()) for layout in layouts if layout.shared is not None)


def microbatches(
    tree: Any, batch: TrainBatch, settings: Microbatching
) -> Iterator[tuple[np.ndarray, ModelRows, Any]]:
    """Yield the model's input and the losses' arrays of each microbatch.

    Args:
        tree: host arrays [B, T, ...] and [B], parallel to the batch.
        batch: its tokens, lengths, loss_mask and `beside_tokens` make the rows of the model.

    Yields:
        The numbers [n] of its trajectories in the batch; the rows; `tree` for these trajectories,
        filled with rows of zeros, which have length 0 and weight 0 and add nothing to any sum.
    """
    for layout in plan_batch(batch, settings):
        size, width = layout.size

        def take(x: Array, layout: Layout = layout, size: int = size, width: int = width) -> Any:
            taken = np.asarray(x)[layout.chosen]
            taken = taken[:, :width] if taken.ndim > 1 else taken
            return np.pad(taken, ((0, size - len(taken)), *((0, 0),) * (taken.ndim - 1)))

        tokens, lengths, mask = take(batch.tokens), take(batch.lengths), take(batch.loss_mask)
        beside = beside_tokens(batch)
        own = beside.pop("routes") if isinstance(batch.routes, OwnRoutes) else None
        beside = jax.tree.map(take, beside)
        if layout.shared is not None:
            where = layout.row, layout.start, layout.shared, layout.shape
            rows = tree_rows(tokens, lengths, mask, *where, beside)
        elif settings.packed:
            rows = packed_rows(tokens, lengths, mask, layout, beside)
        else:
            rows = one_per_row(tokens, lengths, mask, beside)
        if own is not None:
            taken, n = rows.tokens.shape, len(layout.chosen)
            ends = lengths[:n] if settings.packed else np.full(n, width)  # as those of an array
            at = layout.chosen, layout.row, layout.start
            rows = rows.replace(routes=own.placed(*at, ends, taken))
        rows = split_rows(rows, settings.context)
        yield layout.chosen, rows, jax.tree.map(take, tree)


def best_fit_decreasing(lengths: np.ndarray, length: int) -> list[list[int]]:
    """Fill rows of at most `length` tokens and 16 trajectories; return the trajectories of each.

    Longest first, each into the row with the least space that holds it: best-fit decreasing,
    Johnson et al. 1974, https://doi.org/10.1137/0203025.
    """
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (tokens free, row), ascending
    for number in np.argsort(-lengths, kind="stable").tolist():
        tokens = int(lengths[number])
        best = bisect_left(space, (tokens, -1))
        free, row = space.pop(best) if best < len(space) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        if len(rows[row]) < MAX_PER_ROW:
            insort(space, (free - tokens, row))
    return rows


def balance(costs: Sequence[float], groups: int) -> list[int]:
    """Return an order of rows in which `groups` runs of equally many rows cost about the same.

    The costliest row first, each to the cheapest group that is not full (Graham 1969, LPT,
    https://doi.org/10.1137/0117039).
    """
    members: list[list[int]] = [[] for _ in range(groups)]
    cost = [0.0] * groups
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        open_groups = (g for g in range(groups) if len(members[g]) < len(costs) // groups)
        cheapest = min(open_groups, key=lambda g: cost[g])
        members[cheapest].append(row)
        cost[cheapest] += costs[row]
    return [row for group in members for row in group]


def _padded(lengths: np.ndarray, settings: Microbatching) -> list[Layout]:
    """Lay out one trajectory per row, longest first; rows are cut to the bucket of the longest."""
    order, layouts = np.argsort(-lengths, kind="stable"), []
    while len(order):
        width = settings.width(int(lengths[order[0]]))
        (rows,) = settings.row_counts(width)
        chosen, order = order[:rows], order[rows:]
        row = np.arange(len(chosen))
        shape = rows, row_length(width, settings.context)
        layouts.append(Layout(chosen, row, 0 * row, shape, (rows, width)))
    return layouts


def _packed(lengths: np.ndarray, settings: Microbatching) -> list[Layout]:
    """Lay out packed rows: those of equal cost run together, so no device waits long for another.

    Microbatches run one after the other: that they cost the same would gain nothing.
    """
    longest = int(lengths.max())
    width = settings.width(longest)
    length = settings.length(width)
    if longest > length:
        raise ValueError(
            f"a trajectory of {longest} tokens does not fit in packed_length={length}; raise "
            "trainer.packed_length, or leave it None"
        )

    def cost(row: list[int]) -> float:
        return float(np.square(lengths[row], dtype=np.float64).sum())

    rows = sorted(best_fit_decreasing(lengths, length), key=cost, reverse=True)
    layouts = []
    while rows:
        count = settings.next_rows(len(rows), width)
        part, rows = rows[:count], rows[count:]
        part += [[]] * (count - len(part))
        order = balance([cost(row) for row in part], settings.groups)
        size = min(MAX_PER_ROW * count, settings.total), width
        layouts.append(_layout([part[i] for i in order], lengths, length, size))
    return layouts


def _layout(
    rows: list[list[int]], lengths: np.ndarray, length: int, size: tuple[int, int]
) -> Layout:
    """Lay out each row's trajectories one behind the other."""
    chosen = np.array([number for row in rows for number in row], np.int64)
    row = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    before = np.cumsum(lengths[chosen]) - lengths[chosen]  # tokens in all rows
    start = before - before[np.searchsorted(row, row)]
    return Layout(chosen, row, start, (len(rows), length), size)


def _folded(
    order: np.ndarray, lengths: np.ndarray, shared: np.ndarray, settings: Microbatching
) -> list[Layout]:
    """Lay out trees, one row for each group, in the shortest rows that hold all that is left.

    Where these are more than twice as long as the next shorter ones, two microbatches of shorter
    rows cost less.

    Args:
        order, lengths, shared: see `shared_prefixes`; the lengths are in that order.
    """
    width, layouts = settings.width(int(lengths.max())), []
    sizes = settings.tree_lengths(width)
    while len(order):
        filled = {
            length: fill_rows(
                lengths,
                shared,
                rows=settings.groups,
                length=length,
                most=settings.tree_size(length, width) // settings.groups,
            )
            for length in sizes
        }
        whole = [x for x in sizes if filled[x][-1] == len(order)]
        length = whole[0] if whole else sizes[-1]
        shorter = [x for x in sizes if x < length]
        compiling = settings.sharing is UNSHARED  # for each length
        if whole and shorter and length > 2 * shorter[-1] and not compiling:
            length = shorter[-1]
        cuts = filled[length]
        n = cuts[-1]
        row = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
        of_row = shared[:n].copy()
        of_row[cuts[:-1]] = 0  # nothing stands before it
        own = np.cumsum(lengths[:n] - of_row) - (lengths[:n] - of_row)
        start = own - own[np.array(cuts)[row]]
        shape = settings.groups, length
        size = settings.tree_size(length, width), width
        layouts.append(Layout(order[:n], row, start, shape, size, of_row))
        order, lengths, shared = order[n:], lengths[n:], shared[n:]
    return layouts


def packed_rows(
    tokens: Array,
    lengths: Array,
    mask: Array,
    layout: Layout,
    beside: Mapping[str, Array | None],
) -> ModelRows:
    """Do what `one_per_row` does, for a layout; lengths are 0 where there is no trajectory."""
    count, length = layout.shape
    column, n = np.arange(tokens.shape[1], dtype=np.int32), len(layout.chosen)
    real = column < lengths[:, None]
    first, segment = np.zeros((2, len(lengths), 1), np.int32)
    first[:n, 0] = layout.row * length + layout.start
    segment[:n, 0] = np.arange(n) - np.searchsorted(layout.row, layout.row) + 1
    nowhere = count * length + np.arange(tokens.size, dtype=np.int32).reshape(tokens.shape)
    source = np.where(real, first + column, nowhere)

    def place(x: Array) -> np.ndarray:
        more = x.shape[2:]
        rows = np.zeros((count * length, *more), x.dtype)
        rows[source[real]] = np.broadcast_to(x, real.shape + more)[real]
        return rows.reshape(count, length, *more)

    return with_targets(
        tokens=place(tokens),
        positions=place(column),
        segment_ids=place(segment),
        wanted=place((mask != 0) & (column > 0)),
        source=source,
        **jax.tree.map(place, beside),
    )
