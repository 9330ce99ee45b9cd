"""The order of tokens in rows that are spread over devices.

With causal attention a token's work grows with its place. So a row is cut into 2 C pieces, and of C
devices number c has piece c and piece 2 C - 1 - c: all have the same work (Brandon et al., 2023,
https://arxiv.org/abs/2311.09431, and Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2).

Shape legend: R rows, L places.
"""

from typing import Any

import jax
import numpy as np

from jaxrl.types import ModelRows


def row_length(length: int, devices: int) -> int:
    """Return the shortest row of at least `length` places that devices can part among them."""
    pieces = 2 * devices if devices > 1 else 1
    return -(-length // pieces) * pieces


def order_of_places(length: int, devices: int) -> np.ndarray:
    """Return which token of a row stands at each place [L], device after device."""
    pieces = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    return np.stack([pieces[:devices], pieces[devices:][::-1]], axis=1).reshape(-1)


def split_rows(rows: ModelRows, devices: int) -> ModelRows:
    """Return host rows in the order in which devices have them; as they are for one device."""
    if devices == 1:
        return rows
    count, before = rows.tokens.shape
    length = row_length(before, devices)
    order = order_of_places(length, devices)
    place = np.argsort(order).astype(np.int32)  # of each token of a row
    source = rows.source
    if source is None:
        source = np.arange(count * before, dtype=np.int32).reshape(count, before)
    real = source < count * before
    row, column = np.divmod(source, before)
    nowhere = count * length + source - count * before
    moved = np.where(real, row * length + place[np.where(real, column, 0)], nowhere)

    def reorder(x: Any) -> np.ndarray:
        x = np.asarray(x)
        more = ((0, 0), (0, length - before), *((0, 0),) * (x.ndim - 2))
        return np.pad(x, more)[:, order]

    spread = jax.tree.map(reorder, rows.replace(source=None))
    return spread.replace(source=moved.astype(np.int32))
