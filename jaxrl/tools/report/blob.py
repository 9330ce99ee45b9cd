"""Pack arrays with a header as compressed text, which `unpack` of page.js undoes.

zlib over: the length of the header (4 bytes, little endian), the header as JSON, the arrays one
after the other. Of numbers of several bytes all first bytes come first, then all second ones:
exponents and high bytes are then runs, which halves log-probs and token ids.
"""

import base64
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

TYPES = {"u1": np.uint8, "u2": np.uint16, "u4": np.uint32, "f2": np.float16, "f4": np.float32}
_LEVEL = 6


def pack(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """Pack a header, JSON without NaN, and arrays of the `TYPES` as base64."""
    kinds = {np.dtype(kind): name for name, kind in TYPES.items()}
    about = {name: [kinds[array.dtype], array.size] for name, array in arrays.items()}
    text = json.dumps({**header, "arrays": about}, allow_nan=False, separators=(",", ":")).encode()
    parts = [len(text).to_bytes(4, "little"), text, *map(_by_plane, arrays.values())]
    return base64.b64encode(zlib.compress(b"".join(parts), _LEVEL)).decode()


def _by_plane(array: np.ndarray) -> bytes:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return little.view(np.uint8).reshape(array.size, array.itemsize).T.tobytes()


def finite(value: float) -> float | None:
    """Return a number fit for JSON, which has no NaN: None where it is not finite."""
    return value if math.isfinite(value) else None


def inert_json(value: Any) -> str:
    """Return JSON without characters that mean something to HTML, of ASCII alone."""
    text = json.dumps(value, separators=(",", ":"), default=str, allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text
