"""The data of a call in tiles: rows of one shape, which one adapter computes together.

A call is cut by itself, whatever else the server does: so its numbers do not depend on that.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import struct

from jaxrl.data.microbatches import best_fit_decreasing
from jaxrl.data.packing import buckets_between, length_bucket
from jaxrl.tools.tinker.losses import INPUTS, LOSSES, SETTINGS
from jaxrl.types import Array

NAMES = tuple(LOSSES)
SHORTEST = 64  # tokens of a row of a tile; less is padding


class Datum(NamedTuple):
    """Hold one sequence of a call.

    Attributes:
        tokens: [T] what the model reads.
        targets: [T] the token whose log-prob each place has, or [T, K] several.
        inputs: [T] each, of the loss, by the API's names; weights [T, K] of several targets.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]


class Tile(struct.PyTreeNode):
    """Hold R rows of L tokens of one call; several data in a row, one behind the other.

    The last place of a row has no target. Stacked tiles [N, ...] are what a program computes.
    """

    tokens: Array  # [R, L]
    positions: Array  # [R, L] from 0 in every datum
    segment_ids: Array  # [R, L] from 1; 0 is padding
    targets: Array  # [R, L]
    inputs: Mapping[str, Array]  # [R, L] each, by `INPUTS`
    settings: Mapping[str, Array]  # [] each, by `SETTINGS`
    loss: Array  # [] place in `LOSSES`
    slot: Array  # [] of the adapter
    ids: Array | None = None  # [R, L, K] targets, where places have several; -1 = none
    id_weights: Array | None = None  # [R, L, K]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (R, L), or (R, L, K): tiles of one shape are computed together."""
        return self.tokens.shape if self.ids is None else self.ids.shape


class Place(NamedTuple):
    """Say where the numbers of a datum stand."""

    tile: int
    row: int
    start: int
    length: int


def row_lengths(longest: int) -> list[int]:
    """Return the lengths that rows may have: there is a program for each.

    Args:
        longest: tokens of a datum.
    """
    return buckets_between(SHORTEST, longest + 1)


def cut(
    data: Sequence[Datum],
    loss: str,
    settings: Mapping[str, float],
    *,
    slot: int,
    rows: int,
    full: int,
) -> tuple[list[Tile], list[Place]]:
    """Return the tiles of a call, and where each of its data is.

    Rows are as long as the longest datum needs, or, where all data together fill that, `full`.

    Args:
        rows: R, of a tile.
        full: tokens of a row with which products are at their fastest.
    """
    lengths = np.array([len(datum.tokens) for datum in data])
    longest = int(lengths.max()) + 1
    filled = min(full, -(-int(lengths.sum()) // rows) + 1)
    width = length_bucket(max(longest, filled, SHORTEST))
    packed = best_fit_decreasing(lengths, width - 1)
    several = max(datum.targets.shape[1] if datum.targets.ndim > 1 else 0 for datum in data)
    several = 1 << (several - 1).bit_length() if several else 0  # few shapes, to compile
    tiles, places = [], [Place(0, 0, 0, 0)] * len(data)
    for first in range(0, len(packed), rows):
        tile = _empty(rows, width, loss, settings, slot, several)
        for row, members in enumerate(packed[first : first + rows]):
            start = 0
            for segment, number in enumerate(members, start=1):
                places[number] = Place(len(tiles), row, start, int(lengths[number]))
                _write(tile, row, start, segment, data[number])
                start += int(lengths[number])
        tiles.append(tile)
    return tiles, places


def _empty(
    rows: int, width: int, loss: str, settings: Mapping[str, float], slot: int, several: int
) -> Tile:
    shape = rows, width
    return Tile(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        targets=np.zeros(shape, np.int32),
        inputs={name: np.zeros(shape, np.float32) for name in INPUTS},
        settings={name: np.float32(x) for name, x in (SETTINGS | dict(settings)).items()},
        loss=np.int32(NAMES.index(loss)),
        slot=np.int32(slot),
        ids=np.full((*shape, several), -1, np.int32) if several else None,
        id_weights=np.zeros((*shape, several), np.float32) if several else None,
    )


def _write(tile: Tile, row: int, start: int, segment: int, datum: Datum) -> None:
    where: Any = row, slice(start, start + len(datum.tokens))
    tile.tokens[where] = datum.tokens
    if tile.ids is None:
        tile.targets[where] = datum.targets
    else:
        ids = datum.targets.reshape(len(datum.tokens), -1)
        weights = datum.inputs["weights"].reshape(ids.shape)
        tile.targets[where] = ids[:, 0]
        tile.ids[row, where[1], : ids.shape[1]] = ids
        assert tile.id_weights is not None
        tile.id_weights[row, where[1], : ids.shape[1]] = weights
    tile.positions[where] = np.arange(len(datum.tokens))
    tile.segment_ids[where] = segment
    for name, values in datum.inputs.items() if tile.ids is None else ():
        tile.inputs[name][where] = values


def read(places: Sequence[Place], found: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the numbers of each datum [T], from those of tiles [R, L]; or [T, K], [R, L, K]."""
    return [found[p.tile][p.row, p.start : p.start + p.length] for p in places]
