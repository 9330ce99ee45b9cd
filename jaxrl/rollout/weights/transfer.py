"""Weights from the trainer's processes to servers, without files: the trainer's end.

The trainer offers a group under secret numbers (`jax.experimental.transfer`) and says so over HTTP;
servers pull it and answer (`weights.incoming`). A server that has a group offers it to others: they
form a tree, through which the groups go one behind the other. So the trainer holds one group beside
its parameters and sends it few times, however many servers there are.

With `delta` it keeps the version that it sent last in host memory, and servers that have that get
its changes alone (`weights.changes`).
"""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import jax

from jaxrl.models.transformer import Params
from jaxrl.rollout.remote.http_client import RemoteServer, ServerError
from jaxrl.rollout.weights.groups import GROUP_BYTES, Piece, named, plan, whole_pieces
from jaxrl.rollout.weights.incoming import Notice, Place, patience
from jaxrl.rollout.weights.share import Gone, Share, Shares, boxes, spans_processes

_log = logging.getLogger(__name__)
ANSWER_SECONDS = 10.0  # for the answer of a server that has waited its own patience
MOST_BRANCHES = 4  # of a sender
FORBIDDEN = 403
OTHERS_SECONDS = 0.02  # within which servers ask that are served together


@dataclass
class Offer:
    """Hold how the weights of a version are cut: the parts of each group, by process."""

    version: int
    groups: list[dict[int, list[Piece]]] = field(repr=False)

    def __str__(self) -> str:
        return f"version {self.version}"


@dataclass(eq=False)
class Receiver:
    """Hold a server that is to get a version, and its place in the tree.

    Attributes:
        parent: who offers it the groups; None = the trainer.
        depth: how many groups it is behind those that the trainer offers them.
        places: where its next group is.
        onward: under which numbers its children pull the group that it pulls now.
        error: why it has not got the version.
    """

    server: RemoteServer
    parent: "Receiver | None" = None
    children: list["Receiver"] = field(default_factory=list)
    depth: int = 0
    places: tuple[Place, ...] = ()
    onward: dict["Receiver", int] = field(default_factory=dict)
    error: ServerError | None = None

    @property
    def host(self) -> str:
        """Return the host by which the trainer calls the server."""
        return urlsplit(self.server.url).hostname or ""

    @property
    def cut_off(self) -> bool:
        """Return whether a server above it has failed."""
        parent = self.parent
        return parent is not None and (parent.error is not None or parent.cut_off)


class Group(NamedTuple):
    """Describe a group as it travels: its pieces, their checksums, what changed in each."""

    pieces: tuple[Piece, ...]
    checksums: tuple[int, ...]
    changed: tuple[int | None, ...]


def branches(receivers: int, groups: int) -> tuple[int, int]:
    """Return how many receivers each sender should have, and the depth of such a tree.

    Groups move one behind the other, and a sender needs the time of a group for each receiver: k
    branches of depth d take k (groups + d - 1). So a chain is best for many groups, and costs log n
    for one.
    """

    def depth(each: int) -> int:
        levels, reached = 0, 0
        while reached < receivers:
            levels += 1
            reached += each**levels
        return levels

    ways = [(each, depth(each)) for each in range(1, MOST_BRANCHES + 1)]
    return min(ways, key=lambda way: way[0] * (groups + way[1] - 1))


def arrange(servers: Sequence[RemoteServer], groups: int, alone: set[str]) -> list[Receiver]:
    """Return the receivers, each after its parent.

    Args:
        alone: addresses of servers that pull from nobody but the trainer.
    """
    found = [Receiver(server) for server in servers]
    joined = [receiver for receiver in found if receiver.server.url not in alone]
    each, _ = branches(len(joined), groups)
    for number, receiver in enumerate(joined[each:]):
        receiver.parent = joined[number // each]
        receiver.depth = receiver.parent.depth + 1
        receiver.parent.children.append(receiver)
    return found


class WeightTransfer:
    """Send weights to jaxrl's own servers, group by group; a `Source` like `WeightFolder`.

    Between updates it holds a reference to the trainer's parameters, for servers that come back. It
    costs nothing: when the trainer donates them to its next update they are gone, and a server that
    comes back then waits for the weights of that update. Nobody can wait for samples meanwhile, for
    who trains does not wait.

    Args:
        dtype: of the sampler.
        group_bytes: most bytes of a group.
        shares: what the processes of the trainer have; None = this one has everything.
        delta: send servers what changed since the version that they have, where that is less.

    Attributes:
        sent_bytes: of the newest version, by the trainer.
    """

    def __init__(
        self,
        dtype: Any,
        group_bytes: int = GROUP_BYTES,
        *,
        shares: Shares | None = None,
        delta: bool = False,
    ) -> None:
        self.dtype, self.group_bytes, self.delta = dtype, group_bytes, delta
        self.shares = shares or Shares(Share(delta=delta))
        self.sent_bytes = 0
        self._turn = asyncio.Lock()  # of those that are being served
        self._waiting: dict[RemoteServer, Offer] = {}
        self._errors: dict[RemoteServer, ServerError | None] = {}  # of those that were served
        self._alone: set[str] = set()  # addresses of servers that pull from the trainer only
        self._stale: set[str] = set()  # of those whose offers were perhaps not pulled

    def phase(self) -> AbstractContextManager[bool]:
        """Return the context in which other processes of the trainer offer their parts."""
        return self.shares.phase()

    def publish(self, params: Params, version: int) -> Offer:
        """Make a version the newest; nothing is moved yet."""
        self.shares.own.publish(params, version)
        arrays = named(params)
        groups = plan(whole_pieces(arrays, self.dtype), self.group_bytes)
        self.sent_bytes = 0
        spans = spans_processes(params)
        return Offer(
            version,
            [boxes(arrays, group) if spans else {0: list(group)} for group in groups],
        )

    def start(self, newest: Offer) -> None:
        """Return what a server is started from: None, its own first weights."""

    def keep_only(self, *versions: int | None) -> None:
        """Do nothing: older versions are held by nobody."""

    def release(self) -> None:
        """Hold the parameters no longer; servers that come back wait for the next version."""
        self.shares.own.release()

    async def give(self, server: RemoteServer, newest: Offer, version: int, name: str) -> None:
        """Have a server pull all groups, together with the others that wait for them.

        Raises:
            ServerError: it has not got them, and goes on with what it had.
        """
        del name, version
        self._waiting[server] = newest
        async with self._turn:
            if server in self._waiting:
                await asyncio.sleep(OTHERS_SECONDS)
                await self._serve(newest)
        error = self._errors.pop(server, ServerError("who served it was stopped"))
        if error is not None:
            raise error

    async def _serve(self, newest: Offer) -> None:
        """Bring a version to all that wait for it, by as many trees as it needs."""
        served = [server for server, offer in self._waiting.items() if offer is newest]
        bases = {server: server.version if self.delta else None for server in served}
        for server in served:
            del self._waiting[server]
        while bases:
            base = next(iter(bases.values()))
            alike = [server for server, its in bases.items() if its == base]
            tree = arrange(alike, len(newest.groups), self._alone)
            await self._send(tree, newest, base)
            for receiver in tree:
                server, error = receiver.server, receiver.error
                if receiver.cut_off:  # once more, without the one above it
                    continue
                if error and receiver.parent and error.status == FORBIDDEN:
                    _log.warning("%s gets weights of the trainer alone: %s", server.url, error)
                    self._alone.add(server.url)
                elif error and base is not None:  # it may have been started again meanwhile
                    _log.info("%s gets version %d whole: %s", server.url, newest.version, error)
                    bases[server] = None
                else:
                    self._errors[server] = error
                    del bases[server]

    async def _send(self, tree: Sequence[Receiver], newest: Offer, base: int | None) -> None:
        """Have all receivers of a tree pull all groups, or note of each why it could not.

        In a wave each pulls a group: the children the one that their parent pulled in the last.
        """
        transfer_id, deepest = secrets.token_hex(16), max(receiver.depth for receiver in tree)
        groups: list[Group] = []
        for wave in range(len(newest.groups) + deepest):
            alive = [r for r in tree if r.error is None and not r.cut_off]
            active = [r for r in alive if 0 <= wave - r.depth < len(newest.groups)]
            roots = [receiver for receiver in active if receiver.parent is None]
            if roots:
                try:
                    groups.append(await asyncio.to_thread(self._offer, newest, wave, roots, base))
                except ServerError as error:
                    for receiver in roots:
                        receiver.error = error
                    active = [r for r in active if r.error is None and not r.cut_off]
            notices = [
                self._notice(r, newest, wave - r.depth, groups[wave - r.depth], transfer_id, base)
                for r in active
            ]
            pairs = zip(active, notices, strict=True)
            await asyncio.gather(*(_hand(receiver, notice) for receiver, notice in pairs))
        for receiver in tree:
            if receiver.parent is None and receiver.error is not None:
                await asyncio.to_thread(self.shares.forget, receiver.host)
            self._stale.discard(receiver.server.url)
            if any(child.error is not None for child in receiver.children):
                self._stale.add(receiver.server.url)

    def _offer(
        self, newest: Offer, number: int, roots: Sequence[Receiver], base: int | None
    ) -> Group:
        """Let the receivers of the trainer pull a group; return what they must know of it."""
        parts = newest.groups[number]
        asks = [(receiver.host, secrets.randbits(62)) for receiver in roots]
        try:
            found = self.shares.offer(newest.version, number, parts, asks, base)
        except Gone as error:
            raise ServerError(str(error)) from error
        except (RuntimeError, OSError) as error:  # of jax, and of sockets
            hosts = ", ".join(sorted({host for host, _ in asks}))
            raise ServerError(f"the weights could not be offered to {hosts}: {error}") from error
        sizes = list(map(len, parts.values()))
        for i, (receiver, (_, uuid)) in enumerate(zip(roots, asks, strict=True)):
            receiver.places = tuple(
                Place(offered.addresses[i], uuid, size)
                for offered, size in zip(found, sizes, strict=True)
            )
        self.sent_bytes += len(roots) * sum(offered.nbytes for offered in found)
        return Group(
            tuple(chain.from_iterable(parts.values())),
            tuple(chain.from_iterable(offered.checksums for offered in found)),
            tuple(chain.from_iterable(offered.changed for offered in found)),
        )

    def _notice(
        self,
        receiver: Receiver,
        newest: Offer,
        number: int,
        group: Group,
        transfer_id: str,
        base: int | None,
    ) -> Notice:
        """Return what a receiver must know to pull a group, and to offer it to its children."""
        children = [child for child in receiver.children if child.error is None]
        receiver.onward = {child: secrets.randbits(62) for child in children}
        return Notice(
            places=receiver.places,
            transfer=transfer_id,
            version=newest.version,
            number=number,
            count=len(newest.groups),
            dtype=str(jax.numpy.dtype(self.dtype)),
            **group._asdict(),
            base=base if any(n is not None for n in group.changed) else None,
            keep=self.delta,
            onward=tuple(receiver.onward.values()),
            fresh=number == 0 and receiver.server.url in self._stale,
        )


async def _hand(receiver: Receiver, notice: Notice) -> None:
    """Have a receiver pull a group; its children find it there."""
    try:
        seconds = patience(notice.pieces) + ANSWER_SECONDS
        address = await receiver.server.receive(notice.to_json(), seconds)
    except ServerError as error:
        receiver.error = error
        return
    for child, uuid in receiver.onward.items():
        child.places = (Place(address, uuid, len(notice.pieces)),)
