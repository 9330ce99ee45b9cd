"""Weights for engines in other processes: folders on a shared file system."""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl.models.transformer import Params

if TYPE_CHECKING:
    from jaxrl.rollout.remote.http_client import RemoteServer

Write = Callable[[Params, Path], None]  # makes a whole folder, or none


@dataclass
class WeightFolder:
    """Write `root/version-N` for every version that an engine may still have to read.

    Attributes:
        root: on a file system that trainer and engines see under the same path.
        write: as `models.export.save_pretrained` does.
    """

    root: Path
    write: Write

    def publish(self, params: Params, version: int) -> Path:
        """Write a version; it has its name only once it is whole. One that is there is replaced."""
        folder = Path(os.path.abspath(self.root)) / f"version-{version}"
        self.write(params, folder)
        return folder

    def start(self, newest: Path) -> Path:
        """Return what a server is started from."""
        return newest

    async def give(self, server: "RemoteServer", newest: Path, version: int, name: str) -> None:
        """Have a server read a version; raises ServerError.

        Args:
            name: of an adapter.
        """
        await server.load(str(newest), version, name)

    def phase(self) -> AbstractContextManager[bool]:
        """Return a context in which nothing is different: this process writes by itself."""
        return nullcontext(True)

    def release(self) -> None:
        """Do nothing: the parameters are not held."""

    def keep_only(self, *versions: int | None) -> None:
        """Delete the other versions; a file that cannot be deleted is left."""
        kept = {f"version-{version}" for version in versions}
        for other in Path(self.root).glob("version-*"):
            if other.name not in kept:
                shutil.rmtree(other, ignore_errors=True)


@dataclass
class AdapterFolder(WeightFolder):
    """Write the adapters alone of each version.

    Servers are started from their base, which is written once.

    Attributes:
        base: folder of the base; None = the servers have it.
        write_base: writes it, as `write` a version.
    """

    base: Path | None = None
    write_base: Write | None = None
    _has_base: bool = field(default=False, init=False)

    def publish(self, params: Params, version: int) -> Path:
        """Write the adapters of a version, and before the first the base."""
        if self.base and self.write_base and not self._has_base:
            self.write_base(params, self.base)
            self._has_base = True
        return super().publish(params, version)

    def start(self, newest: Path) -> Path:
        """Return the base, where there is one; a server gets the adapters when it runs."""
        return self.base or newest
