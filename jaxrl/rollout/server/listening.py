"""A port that takes a bounded number of connections, and none that says nothing for long."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

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
            answered 503 and sent away. As many files may be open from now on.
        options: of `aiohttp.web.AppRunner`.

    Raises:
        ValueError: this process may not have as many files open.
        OSError: the address cannot be had.
    """
    _allow_open_files(most + RESERVED)
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


def _allow_open_files(number: int) -> None:
    """Raise the soft limit of open files, with which many systems begin at 1024."""
    with contextlib.suppress(ImportError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY or soft >= number:
            return
        if hard != resource.RLIM_INFINITY and hard < number:
            raise ValueError(
                f"serve.max_connections={number - RESERVED} needs {number} open files, and this "
                f"process may have {hard}: set it to at most {max(hard - RESERVED, 1)}, or raise "
                "the hard limit (ulimit -Hn)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
