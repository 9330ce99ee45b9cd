"""How new weights come to servers."""

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jaxrl.models.transformer import Params
from jaxrl.rollout.remote.http_client import RemoteServer
from jaxrl.rollout.remote.probe import Expected


class Source(Protocol):
    """Bring weights to servers, as `folder.WeightFolder` or `transfer.WeightTransfer` does.

    What `publish` returns stands for a version; its `str` names it.
    """

    def publish(self, params: Params, version: int) -> Any:
        """Make the parameters of a version available."""
        ...

    def start(self, newest: Any) -> Path | None:
        """Return the folder that a server is started with, if it is."""
        ...

    def phase(self) -> AbstractContextManager[bool]:
        """Return a context in which other processes of the trainer help, see `share.Shares`."""
        ...

    async def give(self, server: RemoteServer, newest: Any, version: int, name: str) -> None:
        """Have a server take a version; raises ServerError."""
        ...

    def release(self) -> None:
        """Note that no server needs the newest version any more."""
        ...

    def keep_only(self, *versions: int | None) -> None:
        """Forget the other versions."""
        ...


@dataclass
class Weights:
    """Hold the newest weights."""

    source: Any  # as `Source.publish` returned it
    version: int
    params: Params | None  # only while `update_weights` runs
    expected: list[Expected] = field(default_factory=list)  # of the probe
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
