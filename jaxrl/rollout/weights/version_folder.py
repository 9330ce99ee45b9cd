"""Weights for jaxrl's own servers through a folder or a bucket: the trainer's end."""

import asyncio
import contextlib
import secrets
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax.numpy as jnp
from etils import epath

from jaxrl.models.transformer import Params
from jaxrl.rollout.remote.http_client import RemoteServer, ServerError
from jaxrl.rollout.weights.groups import GROUP_BYTES, Piece, named, plan, whole_pieces
from jaxrl.rollout.weights.share import Share
from jaxrl.rollout.weights.versions import (
    INDEX,
    Index,
    delete_version,
    new_version,
    version_folder,
    write_group,
)

BAD_GATEWAY = 502  # of a server that finds a version damaged


class VersionFolder:
    """Write each version under a folder or a bucket, in the sampler's dtype; a `Source`.

    With `delta` it keeps the newest version in host memory, and writes what changed since, where
    that is less than the whole. A version is whole, too, where all changes since the last whole one
    would be more than that: nobody ever reads more than twice the weights.

    Args:
        root: that trainer and servers see under the same path or address.
        dtype: of the sampler.
        group_bytes: most bytes of a group, which is a file.

    Attributes:
        written_bytes: of the newest version.
    """

    def __init__(
        self, root: epath.Path, dtype: Any, group_bytes: int = GROUP_BYTES, *, delta: bool
    ) -> None:
        self.root, self.dtype, self.group_bytes, self.delta = root, dtype, group_bytes, delta
        self.written_bytes = 0
        self._share = Share(delta=delta)
        self._groups: list[tuple[Piece, ...]] = []
        self._bases: dict[int, int | None] = {}  # of the versions that there are
        self._newest: int | None = None  # None: it could not be written
        self._chain_bytes = 0  # of the changes since the last whole version
        self._again: int | None = None  # the version that was written once more
        self._lock = threading.Lock()  # servers that come back are given weights in another thread

    def publish(self, params: Params, version: int) -> str:
        """Write a version; return where its index is. It is there only once it is whole.

        Raises:
            FolderError: it could not be written.
        """
        with self._lock:
            self._groups = plan(whole_pieces(named(params), self.dtype), self.group_bytes)
            self._share.publish(params, version)
            base, self._newest, self._again = self._newest, None, None
            try:
                self._write(version, base if base is not None and base < version else None)
            finally:
                self._share.release()
        return str(version_folder(self.root, version) / INDEX)

    def start(self, newest: str) -> None:
        """Return what a server is started from: None, its own first weights."""

    async def give(self, server: RemoteServer, newest: str, version: int, name: str) -> None:
        """Have a server read a version, which is written whole where it finds that damaged.

        Raises:
            ServerError: it has not got it, and goes on with what it had.
        """
        try:
            await server.load(newest, version, name)
        except ServerError as error:
            again = error.status == BAD_GATEWAY and await asyncio.to_thread(self._mend, version)
            if not again:
                raise
            await server.load(newest, version, name)

    def phase(self) -> AbstractContextManager[bool]:
        """Return a context in which nothing is different: this process writes by itself."""
        return nullcontext(True)

    def release(self) -> None:
        """Do nothing: the parameters are not held."""

    def keep_only(self, *versions: int | None) -> None:
        """Delete the other versions, but for those whose changes these are."""
        kept: dict[int, int | None] = {}
        with self._lock:
            for needed in versions:
                at = needed
                while at is not None and at in self._bases:
                    kept[at] = self._bases[at]
                    at = kept[at]
            self._bases = kept
            names = {version_folder(self.root, version).name for version in kept}
        with contextlib.suppress(OSError):
            for other in [path.name for path in self.root.iterdir()]:
                if other.startswith("version-") and other not in names:
                    delete_version(self.root / other)

    def _mend(self, version: int) -> bool:
        """Write the newest version whole, once; return whether a server may try again."""
        with self._lock:
            if not self.delta or version != self._newest:
                return False
            if version != self._again:
                self._again = version
                self._write(version, None)
        return True

    def _write(self, version: int, base: int | None) -> None:
        """Write a version, as changes of a base where that is less than the whole."""
        written = whole = sum(piece.nbytes for group in self._groups for piece in group)
        if base is not None:
            groups = [self._share.hold(n, group) for n, group in enumerate(self._groups)]
            written = sum(
                part.nbytes
                for held in groups
                for part in (held.changes if held.base == base else held.arrays)
            )
            if written == whole or self._chain_bytes + written > whole:
                base, written = None, whole
        token, files = secrets.token_hex(4), []  # no file is written over
        with new_version(version_folder(self.root, version)) as folder:
            for number, group in enumerate(self._groups):
                path = folder / f"{token}-{number:05d}.safetensors"
                files.append(write_group(path, self._share.hold(number, group), base))
            dtype = str(jnp.dtype(self.dtype))
            Index(version, base, dtype, self.delta, tuple(files)).write(folder)
        self.written_bytes, self._bases[version] = written, base
        self._chain_bytes = 0 if base is None else self._chain_bytes + written
        self._newest = version if self.delta else None
