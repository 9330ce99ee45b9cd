"""A port that takes a bounded number of connections, and none that says nothing for long."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from jaxrl import activity

IDLE_SECONDS = 60.0  # of a connection without a request; one that is half a header is none
RESERVED = 256  # files that the rest of the process may have open: data, logs, devices
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, *, most: int, **options: Any
) -> AsyncIterator[tuple[str, int]]:
    """Serve an application while the block runs; yield the address and port that it listens at.

    Args:
        port: 0 = any that is free.
        most: connections at a time, those without a request included; who comes beyond them is
            answered 503 and sent away. As many files may be open from now on; where the system
            allows fewer, so many connections are taken.
        options: of `aiohttp.web.AppRunner`.

    Raises:
        OSError: the address cannot be had.
    """
    most = _most_of(most)
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=IDLE_SECONDS, **options)
    await runner.setup()
    server = runner.server
    assert server is not None  # set up

    def connection() -> asyncio.Protocol:  # those of one burst, 100 at most, are not counted yet
        return server() if len(server.connections) < most else _Full()

    try:
        listener = await asyncio.get_running_loop().create_server(connection, host, port)
        try:
            yield listener.sockets[0].getsockname()[:2]
        finally:
            listener.close()
    finally:
        await runner.cleanup()


class _Full(asyncio.Protocol):
    """Send a connection away without having read anything."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(_FULL)
        transport.close()


def _most_of(wanted: int) -> int:
    """Return as many connections as are wanted, or as this process may have files for.

    The soft limit of open files, with which many systems begin at 1024, is raised.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    given = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in given)
    files = int(min(wanted + RESERVED, hard))
    most = max(files - RESERVED, 1)
    if most < wanted:
        activity.warn(
            f"{most} connections at a time in place of {wanted}: this process may have {hard:.0f} "
            "open files (ulimit -Hn)"
        )
    if soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, given[1]))
    return most
