"""Arrays of a golden case in one shape, and how close two numbers have to be.

What has a mask is padded to `SHAPE`: padding must change nothing, and what takes long is compiling
operations for ever new shapes.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.golden import Case


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Relative, and absolute as a share of `scale`, the largest number involved."""

    relative: float
    absolute: float
    scale: float = 1.0

    def scaled(self, array: Any) -> "Tolerance":
        finite = np.abs(np.asarray(array, float))
        largest = np.max(finite, initial=1.0, where=np.isfinite(finite))
        return dataclasses.replace(self, scale=max(self.scale, float(largest)))


BITS = {32: Tolerance(1e-4, 1e-6), 64: Tolerance(1e-9, 1e-14)}
FLOAT32_MEAN = Tolerance(1e-4, 1e-6)  # a mean of bool.float() is float32 in the 64-bit numbers too
EXACT = Tolerance(0.0, 0.0)
Outputs = dict[str, tuple[Any, Any, Tolerance]]
SHAPE = (12, 33)


def namespace(value: Any, default: Any = None) -> Any:
    """JSON objects as objects with attributes, with those of the default that are missing."""
    if not isinstance(value, dict):
        return value
    missing = vars(default) if default is not None else {}
    given = {k: namespace(v, missing.get(k)) for k, v in value.items()}
    return SimpleNamespace(**{**missing, **given})


def floats(case: Case, bits: int) -> SimpleNamespace:
    """The case's inputs.

    Floating ones with the given bits, padded to `SHAPE` if there is a mask.
    """
    fits = {"loss_mask", "response_mask"} & set(case.i)
    kinds = {k: f"float{bits}" if v.dtype.kind == "f" else v.dtype for k, v in case.i.items()}
    arrays = {k: v.astype(kinds[k]) for k, v in case.i.items()}
    return SimpleNamespace(**{k: jnp.asarray(pad(v) if fits else v) for k, v in arrays.items()})


def pad(array: np.ndarray) -> np.ndarray:
    """[B, T] -> `SHAPE` if it fits, with zeros."""
    if array.ndim != 2 or any(n > most for n, most in zip(array.shape, SHAPE, strict=True)):
        return array
    return np.pad(array, [(0, most - n) for n, most in zip(array.shape, SHAPE, strict=True)])


def unpadded(ours: Any, like: np.ndarray) -> np.ndarray:
    """Ours in SkyRL's shape; padding, unless it is 0, is left for the comparison to find."""
    ours = np.asarray(ours)
    if ours.ndim != 2 or ours.shape != SHAPE:
        return ours
    rows, columns = like.shape
    rest = np.concatenate([ours[rows:].ravel(), ours[:, columns:].ravel()])
    return ours if np.any(rest != 0) else ours[:rows, :columns]


def within(
    case: Case, bits: int, ours: dict[str, Any], tolerance: Tolerance | None = None
) -> Outputs:
    """Each of our outputs beside SkyRL's of the same name, as far as the case has it."""
    expected = {k: case.o[f"{k}{bits}"] for k in ours if f"{k}{bits}" in case.o}
    return {
        k: (unpadded(ours[k], v), v, tolerance or BITS[bits].scaled(v)) for k, v in expected.items()
    }


def metrics_within(case: Case, bits: int, ours: dict[str, Any], tolerance: Tolerance) -> Outputs:
    """Each of SkyRL's metrics beside ours; one that we lack is not a number."""
    found = {}
    for key, value in case.o.items():
        prefix, _, name = key.partition(":")
        if prefix == f"metric{bits}":
            mine = ours.get(name.replace("|", "/"), "missing")
            found[f"metric:{name.replace('|', '/')}"] = (mine, value, tolerance.scaled(value))
    return found
