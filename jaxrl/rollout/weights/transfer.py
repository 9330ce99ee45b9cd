"""Weights from the trainer's process to a server's, without files: the trainer's end.

The trainer offers a group under a secret number (`jax.experimental.transfer`) and says so over
HTTP; the server pulls it and answers (`weights.incoming`); then comes the next. So the trainer
holds one group beside its parameters, however many servers there are.

With `delta` it keeps the version that it sent last in host memory, and a server that has that gets
its changes alone (`weights.changes`).
"""

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import jax
import numpy as np
from jax.experimental import transfer

from jaxrl.models.transformer import Params
from jaxrl.rollout.remote.http_client import RemoteServer, ServerError
from jaxrl.rollout.weights.changes import Changes, changes
from jaxrl.rollout.weights.groups import GROUP_BYTES, Piece, named, plan, sums, take, whole_pieces
from jaxrl.rollout.weights.incoming import Notice, open_transfer, patience

_log = logging.getLogger(__name__)
ANSWER_SECONDS = 10.0  # for the answer of a server that has waited its own patience


@dataclass
class Offer:
    """Hold the weights of a version, and how they are cut.

    Attributes:
        params: a reference, no copy; None once nobody will ask for this version.
    """

    version: int
    params: Params | None
    groups: list[tuple[Piece, ...]] = field(repr=False)

    def __str__(self) -> str:
        return f"version {self.version}"


class _Held(NamedTuple):
    """Hold a group in host memory, and what changed in it since the version before, if any."""

    offer: Offer
    arrays: list[np.ndarray]
    checksums: list[int]
    base: int | None
    changes: list[Changes]

    @property
    def shrinks(self) -> bool:
        """Return whether the changes are less than the group."""
        return sum(c.nbytes for c in self.changes) < sum(x.nbytes for x in self.arrays)


class WeightTransfer:
    """Send weights to jaxrl's own servers, group by group; a `Source` like `WeightFolder`.

    Between updates it holds a reference to the trainer's parameters, for servers that come back. It
    costs nothing: when the trainer donates them to its next update they are gone, and a server that
    comes back then waits for the weights of that update. Nobody can wait for samples meanwhile, for
    who trains does not wait.

    Args:
        dtype: of the sampler.
        group_bytes: most bytes of a group.
        delta: send a server what changed since the version that it has, where that is less.

    Attributes:
        sent_bytes: of the newest version, to all servers.
    """

    def __init__(self, dtype: Any, group_bytes: int = GROUP_BYTES, *, delta: bool = False) -> None:
        self.dtype, self.group_bytes, self.delta = dtype, group_bytes, delta
        self.sent_bytes = 0
        self._held: dict[int, _Held] = {}  # by the number of the group
        self._turn = asyncio.Lock()  # of the server that is being served
        self._ends: dict[str, transfer.TransferServer] = {}  # by the host that pulls
        self._newest: Offer | None = None

    def publish(self, params: Params, version: int) -> Offer:
        """Make a version the newest; nothing is moved yet."""
        self.release()
        groups = plan(whole_pieces(named(params), self.dtype), self.group_bytes)
        self._newest, self.sent_bytes = Offer(version, params, groups), 0
        return self._newest

    def start(self, newest: Offer) -> None:
        """Return what a server is started from: None, its own first weights."""

    def keep_only(self, *versions: int | None) -> None:
        """Do nothing: older versions are held by nobody."""

    def release(self) -> None:
        """Hold the parameters no longer; servers that come back wait for the next version."""
        if self._newest is not None:
            self._newest.params = None

    async def give(self, server: RemoteServer, newest: Offer, version: int, name: str) -> None:
        """Have a server pull all groups, one server after the other.

        Raises:
            ServerError: it has not got them, and goes on with what it had.
        """
        del name
        if self.delta and server.version is not None:
            try:
                await self._send(server, newest, server.version)
                return
            except ServerError as error:  # it may have been started again meanwhile
                _log.info("%s gets version %d whole: %s", server.url, version, error)
        await self._send(server, newest, None)

    async def _send(self, server: RemoteServer, newest: Offer, base: int | None) -> None:
        """Have a server pull all groups, as changes of the version that it has or whole."""
        host, transfer_id = urlsplit(server.url).hostname or "", secrets.token_hex(16)
        async with self._turn:
            try:
                for number, group in enumerate(newest.groups):
                    offered = self.offer, host, newest, number, transfer_id, base
                    notice = await asyncio.to_thread(*offered)
                    await server.receive(notice.to_json(), patience(group) + ANSWER_SECONDS)
            except BaseException as error:
                self._ends.pop(host, None)  # with it goes what was offered and not pulled
                if isinstance(error, (RuntimeError, OSError)):  # of jax, and of sockets
                    message = f"the weights could not be offered to {host}: {error}"
                    raise ServerError(message) from error
                raise

    def offer(
        self, host: str, offer: Offer, number: int, transfer_id: str, base: int | None = None
    ) -> Notice:
        """Cut a group and let it be pulled; return what its receiver must know of it.

        Args:
            base: the version that the receiver has; None = it gets the group whole.

        Raises:
            ServerError: the trainer has donated the parameters.
            RuntimeError: it does so just now.
            OSError: the host's name, or a port of this one.
        """
        group, made = offer.groups[number], []
        if self.delta:
            held = self._hold(offer, number)
            made = held.changes if base is not None and base == held.base and held.shrinks else []
            parts: Any = (
                [part for c in made if c.places.size for part in c] if made else held.arrays
            )
            parts, checksums = jax.device_put(parts, jax.local_devices()[0]), held.checksums
        else:
            parts = self._take(offer, number)
            checksums = sums(parts)
        if host not in self._ends:
            self._ends[host] = open_transfer(host)
        end, uuid = self._ends[host], secrets.randbits(62)
        notice = Notice(
            address=end.address(),
            transfer=transfer_id,
            uuid=uuid,
            version=offer.version,
            number=number,
            count=len(offer.groups),
            dtype=str(jax.numpy.dtype(self.dtype)),
            pieces=group,
            checksums=checksums,
            base=base if made else None,
            changed=tuple(c.places.size for c in made),
            keep=self.delta,
        )
        if parts:
            end.await_pull(uuid, parts)
        self.sent_bytes += sum(x.nbytes for x in parts)
        return notice

    def _take(self, offer: Offer, number: int) -> list[jax.Array]:
        """Return the pieces of a group, on one device."""
        params = offer.params
        if params is None or any(x.is_deleted() for x in jax.tree.leaves(params)):
            raise ServerError("the trainer is at work on the next version, which it will get")
        return jax.device_put(take(named(params), offer.groups[number]), jax.local_devices()[0])

    def _hold(self, offer: Offer, number: int) -> _Held:
        """Return a group of a version in host memory, which takes the place of the one before."""
        before = self._held.get(number)
        if before is not None and before.offer is offer:
            return before
        taken = self._take(offer, number)
        arrays, base = [np.array(x) for x in taken], before and before.offer.version
        made = zip(before.arrays if before else (), arrays, strict=before is not None)
        held = _Held(offer, arrays, sums(taken), base, [changes(*pair) for pair in made])
        self._held[number] = held
        return held
