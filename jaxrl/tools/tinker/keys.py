"""Whose key a request carries."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxrl.rollout.server.auth import is_loopback
from jaxrl.rollout.server.errors import ApiError

HEADER = "X-API-Key"  # the SDK's; its keys begin with "tml-"


def read_keys(path: str | None, host: str) -> list[str]:
    """Return the keys of a file, one in a line; none where any key is let in, on loopback.

    Raises:
        ValueError: there is no file, and the server is to be reached from elsewhere; or it is
            empty, or holds what the SDK does not take for a key.
        OSError: the file cannot be read.
    """
    if path is None:
        if is_loopback(host):
            return []
        raise ValueError(
            f"generator.inference_engine.http_endpoint_host={host!r} can be reached from other "
            "machines: write a key for each user into a file, and name it as tinker.keys_file; or "
            "use 127.0.0.1"
        )
    keys = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ValueError(f"tinker.keys_file={path!r} holds no key; write one in each line")
    for number, key in enumerate(keys, start=1):
        if not key.startswith("tml-") or len(key) < 20:
            raise ValueError(
                f"tinker.keys_file={path!r}, key {number}: must begin with 'tml-', as the SDK "
                "wants it, and have 20 characters or more, so that nobody guesses it"
            )
    return keys


class Keys:
    """Let requests in, each with its owner.

    Args:
        keys: that are let in; none = any, from programs of this machine.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._known = [key.encode() for key in keys]

    def owner(self, headers: Mapping[str, str], host: str | None) -> str:
        """Return a name for the owner of the key in a request, which does not tell the key.

        Raises:
            ApiError: 401 without a right key, 403 from a web page or from elsewhere.
        """
        sent = headers.get(HEADER, "").strip().encode("utf-8", "surrogateescape")
        if self._known:
            matches = [hmac.compare_digest(sent, key) for key in self._known]
            if not any(matches):
                raise ApiError(401, f"wrong or missing key; send {HEADER}: tml-...")
        elif not sent:
            raise ApiError(401, f"send {HEADER}: any key; it is whose the models are")
        elif "Origin" in headers or host is None or not is_loopback(host):
            raise ApiError(403, "without tinker.keys_file only programs of this machine may ask")
        return hashlib.sha256(sent).hexdigest()[:32]
