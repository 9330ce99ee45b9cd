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
        targets: [T] the token whose log-prob each place has.
        inputs: [T] each, of the loss, by the API's names.
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
    tiles, places = [], [Place(0, 0, 0, 0)] * len(data)
    for first in range(0, len(packed), rows):
        tile = _empty(rows, width, loss, settings, slot)
        for row, members in enumerate(packed[first : first + rows]):
            start = 0
            for segment, number in enumerate(members, start=1):
                places[number] = Place(len(tiles), row, start, int(lengths[number]))
                _write(tile, row, start, segment, data[number])
                start += int(lengths[number])
        tiles.append(tile)
    return tiles, places


def _empty(rows: int, width: int, loss: str, settings: Mapping[str, float], slot: int) -> Tile:
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
    )


def _write(tile: Tile, row: int, start: int, segment: int, datum: Datum) -> None:
    where: Any = row, slice(start, start + len(datum.tokens))
    tile.tokens[where], tile.targets[where] = datum.tokens, datum.targets
    tile.positions[where] = np.arange(len(datum.tokens))
    tile.segment_ids[where] = segment
    for name, values in datum.inputs.items():
        tile.inputs[name][where] = values


def read(places: Sequence[Place], found: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the numbers of each datum, from those of tiles [R, L]."""
    return [found[p.tile][p.row, p.start : p.start + p.length] for p in places]
