"""Arrays as text, and back."""

import base64
import json
import zlib

import numpy as np
import pytest

from jaxrl.tools.report.blob import inert_json, pack
from tests.tools.report.unpack import unpack


def test_what_is_packed_comes_back():
    arrays = {
        "a": np.array([1, 2, 255], np.uint8),
        "b": np.array([], np.uint16),
        "c": np.array([70_000, 3], np.uint32),
        "d": np.array([-0.5, np.nan, np.inf], np.float16),
        "e": np.array([1.5, -np.inf], np.float32),
    }
    header, found = unpack(pack({"uid": "ü</script>"}, arrays))
    assert header == {"uid": "ü</script>"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def test_the_layout_that_the_page_reads():
    """0x0102 and 0x0304, little endian, are the bytes 02 01 04 03; by plane 02 04 01 03."""
    data = zlib.decompress(base64.b64decode(pack({}, {"x": np.array([0x0102, 0x0304], np.uint16)})))
    size = int.from_bytes(data[:4], "little")
    assert json.loads(data[4 : 4 + size]) == {"arrays": {"x": ["u2", 2]}}
    assert data[4 + size :] == b"\x02\x04\x01\x03"


def test_a_header_is_json_without_nan():
    with pytest.raises(ValueError, match="not JSON compliant"):
        pack({"x": float("nan")}, {})


def test_json_that_html_does_not_read():
    text = inert_json({"a": "</script><!-- & \u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!-- & \u2028"}
