"""Trajectories that begin alike -> rows in which what they share stands once: prefix trees.

The trajectories of a row, in the order of their tokens, are a forest. It is laid out depth first: a
trajectory shares the first tokens of the one before it, and its others follow. So a token is seen
by those that stand behind it and before the end of its subtree, and its position is its depth.

    trajectories   5 6 7 1   5 6 7 2 3   5 6 8

    token      5   6   7   1   2   3   8
    entry      0   1   2   3   4   5   6      its place in the row
    end        7   7   6   4   6   6   7      the place behind its subtree
    position   0   1   2   3   3   4   2
    parent     -   0   1   2   2   4   1      place of the token before it

Query q sees key k where entry_k <= entry_q < end_k. What the model finds of a token is read by
every trajectory that has it, so the backward pass adds up what they ask of it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.types import Array, ModelRows


class Sharing(NamedTuple):
    """Say when trajectories share what they begin with.

    Attributes:
        least: more than this share of the trajectories' tokens must be saved.
        shortest: tokens of a batch's longest trajectory from which on it is tried: attention goes
            by blocks of so many, in which short trees would mostly meet strangers.
    """

    least: float
    shortest: int = 0


SHARING = {"auto": Sharing(0.2, 128), "on": Sharing(0.0)}
UNSHARED = Sharing(-np.inf)  # rows of trees in which nothing is shared: to compile for them


def shared_prefixes(tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return trajectories in the order of their tokens, and how many each shares with the last.

    Example: tokens [[5, 8, 0], [5, 6, 7], [5, 6, 9]], lengths [2, 3, 3] give the order [1, 2, 0]
    and [0, 2, 1].

    Args:
        tokens: [B, T]; lengths: [B].

    Returns:
        order [B], shared [B].
    """
    marks = tokens.astype(">i4")  # whose bytes are in the order of numbers
    keys = [row[:n].tobytes() for row, n in zip(marks, lengths, strict=True)]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
    one, other = order[1:], order[:-1]
    same = tokens[one] == tokens[other]
    same &= np.arange(tokens.shape[1]) < np.minimum(lengths[one], lengths[other])[:, None]
    shared = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    return order, np.concatenate([[0], shared])


def alike(shared: np.ndarray, order: np.ndarray, labels: Sequence[np.ndarray]) -> np.ndarray:
    """Return how many of the shared tokens [B] have the same labels, from the first on.

    Args:
        labels: [B, T, ...] each, of a token.
    """
    found = shared.copy()
    for place in np.flatnonzero(shared):
        one, other = order[place], order[place - 1]
        for x in labels:
            n = found[place]
            same = (x[one, :n] == x[other, :n]).reshape(n, x[0, 0].size).all(axis=1)
            found[place] = n if same.all() else int(np.argmin(same))
    return found


def fill_rows(
    lengths: np.ndarray, shared: np.ndarray, rows: int, length: int, most: int
) -> list[int]:
    """Return where rows begin that hold trajectories in their order, and where the last one ends.

    Args:
        lengths, shared: [n] of the trajectories; the first of a row shares nothing.
        rows: at most; length: tokens of a row; most: trajectories of a row.
    """
    own = np.cumsum(lengths - shared)
    cuts = [0]
    while len(cuts) <= rows and cuts[-1] < len(lengths):
        first = cuts[-1]
        room = length - lengths[first] + own[first]
        cuts.append(min(int(np.searchsorted(own, room, side="right")), first + most))
    return cuts


def tree_rows(
    tokens: Array,
    lengths: Array,
    mask: Array,
    chosen_row: np.ndarray,
    start: np.ndarray,
    shared: np.ndarray,
    shape: tuple[int, int],
    beside: Mapping[str, Array | None],
) -> ModelRows:
    """Make rows of the model that hold prefix trees.

    Args:
        tokens, mask: [B, T]; lengths: [B], 0 for those behind the n that stand in rows.
        chosen_row: [n] row of each; start: [n] place there of the first token that is its own.
        shared: [n] tokens that it has from the trajectory before it.
        shape: R, L.
        beside: further fields of the rows by name, [B, T, ...] each, see `beside_tokens`.
    """
    (count, length), n = shape, len(chosen_row)
    column = np.arange(tokens.shape[1], dtype=np.int32)
    real = column < lengths[:, None]
    source = count * length + np.arange(tokens.size, dtype=np.int32).reshape(tokens.shape)
    ends = np.tile(np.arange(1, length + 1, dtype=np.int32), count)
    for i in range(n):
        first = 0 if i == 0 or chosen_row[i] != chosen_row[i - 1] else int(shared[i])
        source[i, :first] = source[i - 1, :first]
        begin = chosen_row[i] * length + start[i]
        source[i, first : lengths[i]] = begin + np.arange(lengths[i] - first)
        # so far all its tokens end with it; those that a later one shares end with that
        ends[source[i, : lengths[i]]] = start[i] + lengths[i] - first
    asked = (mask != 0) & (column > 0) & real

    def place(x: Array) -> np.ndarray:
        more = x.shape[2:]
        rows = np.zeros((count * length, *more), x.dtype)
        rows[source[real]] = np.broadcast_to(x, real.shape + more)[real]
        return rows.reshape(count, length, *more)

    wanted = np.zeros(count * length, bool)
    wanted[source[asked]] = True
    before = np.pad(source[:, :-1], ((0, 0), (1, 0))) % length
    return ModelRows(
        tokens=place(tokens),
        positions=place(column),
        segment_ids=place(np.ones_like(tokens, np.int32)),
        targets=place(tokens),
        wanted=wanted.reshape(shape),
        source=source,
        ends=ends.reshape(shape),
        parents=place(np.where(column > 0, before, 0)),
        asked=asked,
        **{name: None if x is None else place(x) for name, x in beside.items()},
    )
