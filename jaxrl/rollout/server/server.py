"""The server in a thread of its own."""

import asyncio
import errno
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from jaxrl.config import ServeConfig
from jaxrl.rollout.protocol import Engine, Sampling
from jaxrl.rollout.server.auth import Guard, read_token
from jaxrl.rollout.server.served_model import ServedModel
from jaxrl.rollout.server.sessions import ServedSession, ServedSessions
from jaxrl.rollout.server.shared_engine import HostEngine

EXTRA = "the HTTP server needs pydantic and prometheus-client: pip install 'jaxrl[serve]'"


class AddressError(ValueError):
    """Signal that the address to listen on cannot be had."""


class HttpServer:
    """Serves an engine over HTTP, from `start` to `stop`.

    Args:
        engine: whose owner calls `host` from now on, not the engine itself.
        served: its model.
        limits: of requests, and where the token is.
        host, port: to listen on; port 0 = any that is free.
        weights: function that reads the parameters in a folder, the folder that the engine's come
            from, and what pulls parameters; None: the routes that change the engine are not there.

    Attributes:
        host: the engine for its owner.
        url: of the API, once it is started; ends with "/v1".

    Raises:
        ValueError: no token, and `host` can be reached from other machines.
    """

    def __init__(
        self,
        engine: Engine,
        served: ServedModel,
        limits: ServeConfig,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        weights: tuple[Any, Path, Any] | None = None,
    ) -> None:
        self.host, self.served, self.limits = HostEngine(engine), served, limits
        self.sessions = ServedSessions(
            limits.max_sessions, limits.session_seconds, limits.max_session_tokens
        )
        self.url = ""
        self._address, self._weights = (host, port), weights
        self._guard = Guard(read_token(limits, host))
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="jaxrl-http", daemon=True)
        self._started: Future[None] = Future()

    def start(self) -> None:
        """Begin to listen.

        Raises:
            AddressError: it is in use, not one of this machine, or not allowed.
            ImportError: names the extra to install.
        """
        self._thread.start()
        self._started.result()

    def stop(self) -> None:
        """Cancel what runs, and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def open_session(
        self, name: str, sampling: Sampling, key: tuple[int, int], *, fixed: bool = False
    ) -> str:
        """Begin a session whose requests sample so, and which stays until it is taken.

        Args:
            key: names the PRNG keys of its turns.
            fixed: requests that ask for another temperature, filter or seed are not refused, but
                sampled so all the same.

        Returns:
            The secret without which no reward can be posted to it.
        """
        return self.sessions.hold(name, sampling, key, fixed=fixed)

    def take_session(self, name: str) -> ServedSession:
        """Return what was said under an X-Session-ID, and forget it.

        Raises:
            ApiError: there is no such session.
        """
        return self.sessions.take(name)

    def _run(self) -> None:
        try:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # whoever starts it must learn of it
            if self._started.done():
                raise
            self._started.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        try:
            from jaxrl.rollout.server.app import ApiRoutes
            from jaxrl.rollout.server.listening import listening
            from jaxrl.rollout.server.service import Control, Service
        except ImportError as error:
            raise ImportError(EXTRA) from error
        service = Service(self.host.guests, self.served, self.limits, self.sessions)
        control = None if self._weights is None else Control(service, self.host, *self._weights)
        serving = listening(
            ApiRoutes(service, control, self._guard).app(),
            *self._address,
            most=self.limits.max_connections,
            handler_cancellation=True,
            shutdown_timeout=5,
        )
        try:
            async with serving as (host, port):
                self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
                self._started.set_result(None)
                await self._stop.wait()
                service.abort(None)
        except OSError as error:
            if self._started.done():
                raise
            raise _refused(*self._address, error) from error
        finally:
            if control is not None:
                await control.finish()
            service.close()


def _refused(host: str, port: int, error: OSError) -> AddressError:
    """Return an error that names the field that has to change."""
    engine = "generator.inference_engine"
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        what = "in use" if error.errno == errno.EADDRINUSE else "not allowed for this user"
        return AddressError(
            f"{engine}.http_endpoint_port={port}: {what} on {host}; choose another, or 0 for any "
            "that is free"
        )
    return AddressError(
        f"{engine}.http_endpoint_host={host!r}: cannot listen there ({error.strerror or error}); "
        "set it to an address of this machine, e.g. '127.0.0.1'"
    )
