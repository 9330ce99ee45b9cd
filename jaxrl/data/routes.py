"""The experts of tokens in a job of several processes: each keeps those of the rows it sampled."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxrl.parallel import Share, allgather
from jaxrl.parallel.checksums import joined_checksum
from jaxrl.types import Array


@dataclass(frozen=True, eq=False)
class SampledRoutes:
    """Hold the experts of rows; equal to itself alone, and so a constant of pytrees.

    Attributes:
        rows: [n, Lx, k] of the first n tokens of each.
        unknown: [Lx, k] of a token of which nothing is known.
    """

    rows: Sequence[np.ndarray]
    unknown: np.ndarray


@dataclass(frozen=True)
class OwnRoutes:
    """Hold the experts of a batch's rows as far as this process sampled them: `TrainBatch.routes`.

    Its one leaf goes with the rows of the batch, however they are cut, ordered or filled up.

    Attributes:
        number: [B] 1 + the place of each row in `sampled`; 0: another process has it, or there is
            none.
        sampled: what this process knows.
    """

    number: Array
    sampled: SampledRoutes

    def placed(
        self,
        chosen: np.ndarray,
        row: np.ndarray,
        start: np.ndarray,
        tokens: np.ndarray,
        shape: tuple[int, int],
    ) -> Share:
        """Return the share [R, L, Lx, k] of rows of the model.

        Args:
            chosen, row, start: of a `Layout`, [n] each.
            tokens: [n] that each takes up from there.
            shape: R, L.
        """
        unknown = self.sampled.unknown
        array = np.zeros((*shape, *unknown.shape), unknown.dtype)
        places = zip(np.asarray(self.number)[chosen], row, start, tokens, strict=True)
        for number, in_row, first, count in places:
            if number:
                array[in_row, first : first + count] = self._whole(number, count)
        return Share(array)

    def checksum(self, width: int) -> int:
        """Return the CRC-32 that the whole array [B, T, Lx, k] has in one process; a collective.

        Args:
            width: T.
        """
        own = {
            row: zlib.crc32(self._whole(number, width).tobytes())
            for row, number in enumerate(np.asarray(self.number).tolist())
            if number
        }
        whole = {row: crc for part in allgather(own) for row, crc in part.items()}
        return joined_checksum([whole[row] for row in sorted(whole)], width * self._token_bytes)

    @property
    def _token_bytes(self) -> int:
        return self.sampled.unknown.nbytes

    def _whole(self, number: int, width: int) -> np.ndarray:
        """Return the experts of the first `width` tokens of a row, [width, Lx, k]."""
        known, unknown = self.sampled.rows[number - 1][:width], self.sampled.unknown
        rest = np.broadcast_to(unknown, (width - len(known), *unknown.shape))
        return np.concatenate([known, rest])


jax.tree_util.register_dataclass(OwnRoutes, ["number"], ["sampled"])


def own_routes(entries: Sequence[np.ndarray], processes: Sequence[int]) -> OwnRoutes:
    """Return what this process has of the experts of rows.

    Args:
        entries: [n, Lx, k] of each, of one dtype; those of other processes are not looked at.
        processes: which has those of each row.
    """
    own = np.asarray(processes) == jax.process_index()
    number = np.where(own, np.cumsum(own), 0).astype(np.int32)
    rows = [entry for entry, here in zip(entries, own, strict=True) if here]
    like = entries[0]
    unknown = np.full(like.shape[1:], np.iinfo(like.dtype).max, like.dtype)
    return OwnRoutes(number, SampledRoutes(rows, unknown))
