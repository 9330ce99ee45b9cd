"""What changed in weights from one version to the next: most bfloat16 weights have not.

An update of learning rate 1e-6 moves a weight by less than half the distance to its next bfloat16
value, but for few. So of a piece its changed elements are sent, each as place and value, where that
is less than the piece. What is put together is the whole piece again, and is compared with the
checksum of the whole: a change of other weights than the receiver has does not go unnoticed.
"""

from typing import NamedTuple

import numpy as np

PLACE = np.uint32  # a piece has fewer elements


class Changes(NamedTuple):
    """Hold the elements of a piece that are others than before.

    Attributes:
        places: [n] uint32, ascending, in the flat piece.
        values: [n] of the piece's dtype.
    """

    places: np.ndarray
    values: np.ndarray

    @property
    def nbytes(self) -> int:
        """Return the bytes that are sent."""
        return self.places.nbytes + self.values.nbytes


def changes(before: np.ndarray, after: np.ndarray) -> Changes:
    """Return what makes one piece of another, of its shape and dtype, bit for bit."""
    old, new = (_bits(x) for x in (before, after))
    places = np.flatnonzero(old != new)
    return Changes(places.astype(PLACE), after.reshape(-1)[places])


def changed(before: np.ndarray, made: Changes) -> np.ndarray:
    """Return a piece with its changes.

    Raises:
        ValueError: a place is outside of the piece.
    """
    if made.places.size and int(made.places.max()) >= before.size:
        raise ValueError(f"place {int(made.places.max())} of a piece of {before.size} elements")
    after = np.array(before).reshape(-1)
    after[made.places] = made.values
    return after.reshape(before.shape)


def _bits(x: np.ndarray) -> np.ndarray:
    """Return the bits of numbers: NaN is as it was, and -0 is not 0."""
    return np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}")
