"""Servers that are only asked: their weights are what they are."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxrl.models.transformer import Params
from jaxrl.rollout.remote.engine import RemoteEngine
from jaxrl.rollout.remote.http_client import RemoteOptions, RemoteServer, ServerError
from jaxrl.rollout.weights.source import Weights


class ServedEngine(RemoteEngine):
    """Sample from servers without giving them weights or probing them; a `RemoteEngine`.

    Args:
        urls, dialect, options: see `RemoteEngine`.

    Raises:
        ConnectionError: a server is not there, or has no weights.
    """

    def __init__(self, urls: Sequence[str], dialect: str, options: RemoteOptions) -> None:
        super().__init__(urls, dialect, weights=None, probe=None, options=options)
        try:
            self._call(self._attach())
        except ConnectionError:
            self.close()
            raise

    def update_weights(self, params: Params, version: int) -> NoReturn:
        """Raises RuntimeError: these servers keep their own weights."""
        raise RuntimeError("these servers keep their own weights")

    async def _attach(self) -> None:
        self._weights = Weights(Path(), -1, None)  # theirs: the folder is never read
        outcomes = await asyncio.gather(*(self._bring(server) for server in self.servers))
        for server, error in zip(self.servers, outcomes, strict=True):
            if error is not None:
                raise ConnectionError(
                    f"{server.url} does not answer as a {self.dialect.name} server: {error}. See "
                    "that it runs at this address, and that its kind is "
                    "generator.inference_engine.backend"
                ) from error

    async def _refresh(self, server: RemoteServer) -> None:
        server.version = await server.look()
        if self.dialect.says_versions and server.version is None:
            raise ServerError("it has no weights yet")
