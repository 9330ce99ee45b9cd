"""Undo `jaxrl.tools.report.blob.pack`, as page.js does."""

import base64
import json
import zlib
from typing import Any

import numpy as np

from jaxrl.tools.report.blob import TYPES


def unpack(text: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what `pack` was given."""
    data = zlib.decompress(base64.b64decode(text))
    start = 4 + int.from_bytes(data[:4], "little")
    header, arrays = json.loads(data[4:start]), {}
    for name, (kind, size) in header.pop("arrays").items():
        dtype = np.dtype(TYPES[kind])
        end = start + size * dtype.itemsize
        planes = np.frombuffer(data[start:end], np.uint8).reshape(dtype.itemsize, size)
        arrays[name] = np.ascontiguousarray(planes.T).view(dtype).ravel()
        start = end
    return header, arrays
