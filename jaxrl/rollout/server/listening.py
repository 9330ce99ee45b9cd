"""A port that takes a bounded number of connections at a time."""

import asyncio
import contextlib

from aiohttp import web

RESERVED = 256  # files that the rest of the process may have open: data, logs, devices
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


async def listen(runner: web.AppRunner, host: str, port: int, *, most: int) -> asyncio.Server:
    """Begin to listen; who comes beyond `most` connections is answered 503 and sent away.

    Args:
        runner: of the application, set up; who cleans it up closes the listener before.
        port: 0 = any that is free.
        most: connections at a time, those without a request included. As many files may be open
            from now on.

    Raises:
        ValueError: this process may not have as many files open.
        OSError: the address cannot be had.
    """
    _allow_open_files(most + RESERVED)
    server = runner.server
    assert server is not None  # set up

    def connection() -> asyncio.Protocol:  # those of one burst, 100 at most, are not counted yet
        return server() if len(server.connections) < most else _Full()

    return await asyncio.get_running_loop().create_server(connection, host, port)


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
