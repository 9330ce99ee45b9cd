"""Read weights in MXFP4, as gpt-oss publishes its experts.

Numbers of 4 bits, 32 neighbours with one power of two: OCP Microscaling Formats (MX) 1.0,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
"""

from typing import Any

import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
# Of 4 bits: sign, two of exponent, one of mantissa (E2M1).
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([VALUES, -VALUES])
BIAS = 127  # of the exponent that is a scale


class Mxfp4Slice:
    """Stand for a tensor [E, in, out] that lies as blocks and scales; a safetensors slice of it.

    Args:
        blocks: [E, out, in / 32, 16] bytes, the lower four bits of each before the upper.
        scales: [E, out, in / 32] bytes, exponents plus 127.
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        self.blocks, self.scales = blocks, scales

    def get_shape(self) -> list[int]:
        """Return the shape of the numbers."""
        experts, rows, groups, size = self.blocks.get_shape()
        return [experts, groups * size * 2, rows]

    def get_dtype(self) -> str:
        """Return a dtype that holds the numbers exactly."""
        return "BF16"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return numbers [E, in, out] in float32."""
        experts, inputs, rows = index
        every = slice(None)
        found = dequantise(
            self.blocks[experts, rows, every, every], self.scales[experts, rows, every]
        )
        return found.swapaxes(1, 2)[:, inputs]


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the float32 numbers [..., 2 n groups] of blocks [..., groups, n] and scales."""
    pairs = np.stack([blocks & 15, blocks >> 4], axis=-1)
    numbers = VALUES[pairs].reshape(*blocks.shape[:-1], -1)
    scaled = np.ldexp(numbers, scales[..., None].astype(np.int32) - BIAS)
    return scaled.reshape(*blocks.shape[:-2], -1)


def with_mxfp4(slices: dict[str, Any]) -> dict[str, Any]:
    """Return the slices of a checkpoint with the numbers in the place of blocks and scales."""
    names = [name.removesuffix(BLOCKS) for name in slices if name.endswith(BLOCKS)]
    packed = {name: (name + BLOCKS, name + SCALES) for name in names if name + SCALES in slices}
    left = slices.keys() - {part for pair in packed.values() for part in pair}
    found = {name: Mxfp4Slice(*(slices[part] for part in pair)) for name, pair in packed.items()}
    return {name: slices[name] for name in slices if name in left} | found
