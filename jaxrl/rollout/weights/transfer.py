"""Weights from the trainer's process to a server's, without files: the trainer's end.

The trainer offers a group under a secret number (`jax.experimental.transfer`) and says so over
HTTP; the server pulls it and answers (`weights.incoming`); then comes the next. So the trainer
holds one group beside its parameters, however many servers there are.
"""

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import jax
from jax.experimental import transfer

from jaxrl.models.transformer import Params
from jaxrl.rollout.remote.http_client import RemoteServer, ServerError
from jaxrl.rollout.weights.groups import GROUP_BYTES, Piece, named, plan, sums, take, whole_pieces
from jaxrl.rollout.weights.incoming import Notice, open_transfer, patience

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


class WeightTransfer:
    """Send weights to jaxrl's own servers, group by group; a `Source` like `WeightFolder`.

    Between updates it holds a reference to the trainer's parameters, for servers that come back. It
    costs nothing: when the trainer donates them to its next update they are gone, and a server that
    comes back then waits for the weights of that update. Nobody can wait for samples meanwhile, for
    who trains does not wait.

    Args:
        dtype: of the sampler.
        group_bytes: most bytes of a group.
    """

    def __init__(self, dtype: Any, group_bytes: int = GROUP_BYTES) -> None:
        self.dtype, self.group_bytes = dtype, group_bytes
        self._turn = asyncio.Lock()  # of the server that is being served
        self._ends: dict[str, transfer.TransferServer] = {}  # by the host that pulls
        self._newest: Offer | None = None

    def publish(self, params: Params, version: int) -> Offer:
        """Make a version the newest; nothing is moved yet."""
        self.release()
        groups = plan(whole_pieces(named(params), self.dtype), self.group_bytes)
        self._newest = Offer(version, params, groups)
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
        host, transfer_id = urlsplit(server.url).hostname or "", secrets.token_hex(16)
        async with self._turn:
            try:
                for number, group in enumerate(newest.groups):
                    notice = await asyncio.to_thread(self.offer, host, newest, number, transfer_id)
                    await server.receive(notice.to_json(), patience(group) + ANSWER_SECONDS)
            except BaseException as error:
                self._ends.pop(host, None)  # with it goes what was offered and not pulled
                if isinstance(error, (RuntimeError, OSError)):  # of jax, and of sockets
                    message = f"the weights could not be offered to {host}: {error}"
                    raise ServerError(message) from error
                raise

    def offer(self, host: str, offer: Offer, number: int, transfer_id: str) -> Notice:
        """Cut a group and let it be pulled; return what its receiver must know of it.

        Raises:
            ServerError: the trainer has donated the parameters.
            RuntimeError: it does so just now.
            OSError: the host's name, or a port of this one.
        """
        group, params = offer.groups[number], offer.params
        if params is None or any(x.is_deleted() for x in jax.tree.leaves(params)):
            raise ServerError("the trainer is at work on the next version, which it will get")
        if host not in self._ends:
            self._ends[host] = open_transfer(host)
        end, uuid = self._ends[host], secrets.randbits(62)
        arrays = jax.device_put(take(named(params), group), jax.local_devices()[0])
        notice = Notice(
            address=end.address(),
            transfer=transfer_id,
            uuid=uuid,
            version=offer.version,
            number=number,
            count=len(offer.groups),
            dtype=str(jax.numpy.dtype(self.dtype)),
            pieces=group,
            checksums=sums(arrays),
        )
        end.await_pull(uuid, arrays)
        return notice
