"""Who may use the server."""

import hmac
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from jaxrl.config import ServeConfig
from jaxrl.rollout.server.errors import ApiError


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(serve: ServeConfig, host: str) -> str | None:
    """Return the token of `serve.token_file` or of the environment.

    None: there is none, on loopback.

    Raises:
        ValueError: none, and the server is to be reached from elsewhere.
        OSError: the file cannot be read.
    """
    if serve.token_file is not None:
        token = Path(serve.token_file).read_text(encoding="utf-8").strip()
        if not token:
            raise ValueError(f"serve.token_file={serve.token_file!r} is empty; write a token in it")
        return token
    token = os.environ.get(serve.token_env, "").strip()
    if not token and not is_loopback(host):
        raise ValueError(
            f"generator.inference_engine.http_endpoint_host={host!r} can be reached from other "
            f"machines: put a secret token into the environment variable {serve.token_env}, or "
            "name a file that holds one as serve.token_file; or use 127.0.0.1"
        )
    return token or None


class Guard:
    """Let requests in.

    Without a token only programs of this machine may ask, not the web pages that its browsers show:
    these are known by an Origin, or by a Host that is not this machine.

    Args:
        token: that every request must carry; None = no request needs one.
    """

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    def check(self, headers: Mapping[str, str], host: str | None) -> None:
        """Raise `ApiError` 401, 403 or 400 for who may not come in.

        Args:
            host: that the request is addressed to, without the port; None: what it says is none.
        """
        if self._token is not None:
            _check_token(headers, self._token)
        if host is None:
            raise ApiError(400, "the Host header is no host with perhaps a port")
        if self._token is None and ("Origin" in headers or not is_loopback(host)):
            raise ApiError(403, "without a token only programs of this machine may ask")


def _check_token(headers: Mapping[str, str], token: bytes) -> None:
    scheme, _, sent = headers.get("Authorization", "").partition(" ")
    right = hmac.compare_digest(sent.strip().encode("utf-8", "surrogateescape"), token)
    if scheme.lower() != "bearer" or not right:
        message = "wrong or missing token; send Authorization: Bearer TOKEN"
        raise ApiError(401, message, code="invalid_api_key")
