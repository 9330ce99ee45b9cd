"""Weights from the trainer's processes to a server's, without files: the server's end.

A group is pulled from who has it (`jax.experimental.transfer`): each process of the trainer has a
part, another server that has pulled it before has all of it. It is compared with its checksums,
offered to the servers that are to pull it here, and put where it belongs. The old weights are
sampled from until the last group is there: so this holds one group beside the old weights and the
new ones, another while others pull that; and a copy in host memory, where the trainer sends
changes.
"""

import ipaddress
import math
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import transfer

from jaxrl.models.transformer import Params
from jaxrl.parallel.streams import own_address
from jaxrl.rollout.weights.changes import PLACE, Changes, changed
from jaxrl.rollout.weights.groups import Assembly, Piece, named, sums, whole_pieces

POLL_SECONDS, CONNECT_SECONDS = 0.002, 5.0
GROUP_SECONDS, SLOWEST = 120.0, 20e6  # a group takes as long at most, and bytes per second
DTYPES = ("float32", "bfloat16")


class NotAllowed(ValueError):
    """Signal that weights are on a host from which none may be pulled."""


class TransferFailed(RuntimeError):
    """Signal that a group did not come, or not as it was sent; names the group."""


# Bytes of one of an end's 16 buffers. With JAX's 256 MiB an end reserves 4 GiB of address space,
# and with a few of them the system refuses this process a fork.
TRANSFER_BYTES = 16 * 2**20


def open_transfer(peer: str) -> transfer.TransferServer:
    """Open this process's end of transfers, on any free ports.

    Its address is the one from which a peer is reached.

    Args:
        peer: name or address of a host.
    """
    address = own_address(peer)
    address = f"[{address}]" if ":" in address else address
    return transfer.start_transfer_server(
        jax.local_devices()[0].client,
        f"{address}:0",
        [f"{address}:0"],
        transfer_size=TRANSFER_BYTES,
    )


def patience(group: Sequence[Piece]) -> float:
    """Return the seconds within which a group is pulled, or will not be."""
    return GROUP_SECONDS + sum(piece.nbytes for piece in group) / SLOWEST


class Place(NamedTuple):
    """Say where some pieces of a group can be pulled.

    Attributes:
        address: of a process's end, host:port.
        uuid: that they have there.
        pieces: how many; the first place has the first ones of the group.
    """

    address: str
    uuid: int
    pieces: int

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Return both; raise ValueError where there are none."""
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"address={self.address!r}: must be host:port")
        return host.strip("[]"), int(port)


@dataclass(frozen=True)
class Notice:
    """Describe a group that can be pulled.

    Attributes:
        places: that have it together.
        transfer: the same of all groups of one update, random.
        version: of the weights.
        number, count: of the group, and of all groups.
        dtype: of the sampler.
        pieces, checksums: of the group.
        changed: how many elements of each piece are sent; None = all, without their places.
        base: the version whose changes these are; None = there are none.
        keep: remember the version, as later ones may be sent as changes of it.
        onward: numbers under which others pull the group from the receiver, each once.
        fresh: forget what others should have pulled and did not.
    """

    places: tuple[Place, ...]
    transfer: str
    version: int
    number: int
    count: int
    dtype: str
    pieces: tuple[Piece, ...]
    checksums: tuple[int, ...]
    changed: tuple[int | None, ...]
    base: int | None = None
    keep: bool = False
    onward: tuple[int, ...] = ()
    fresh: bool = False

    @classmethod
    def read(cls, body: Any) -> "Notice":
        """Read a notice from JSON.

        Raises:
            ValueError: something is missing, or of another kind.
        """
        try:
            pieces = tuple(
                Piece(str(p["name"]), _ints(p["starts"]), _ints(p["shape"]), str(p["dtype"]))
                for p in body["pieces"]
            )
            places = tuple(
                Place(str(p["address"]), int(p["uuid"]), int(p["pieces"])) for p in body["places"]
            )
            notice = cls(
                places=places,
                transfer=str(body["transfer"]),
                version=int(body["version"]),
                number=int(body["number"]),
                count=int(body["count"]),
                dtype=str(body["dtype"]),
                pieces=pieces,
                checksums=_ints(body["checksums"]),
                changed=tuple(None if n is None else int(n) for n in body["changed"]),
                base=None if body["base"] is None else int(body["base"]),
                keep=bool(body["keep"]),
                onward=_ints(body["onward"]),
                fresh=bool(body["fresh"]),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"a notice of weights without what belongs in it: {error!r}"
            ) from error
        if notice.dtype not in DTYPES or len(notice.checksums) != len(pieces) or not pieces:
            raise ValueError(f"dtype={notice.dtype!r}, {len(notice.checksums)} checksums")
        uuids = [*notice.onward, *(place.uuid for place in places)]
        if not 0 <= notice.number < notice.count or not all(0 <= n < 2**63 for n in uuids):
            raise ValueError(f"group {notice.number} of {notice.count}, uuids={uuids}")
        counts = [place.pieces for place in places]
        if min(counts, default=0) < 1 or sum(counts) != len(pieces):
            raise ValueError(f"places with {counts} of {len(pieces)} pieces")
        if len(notice.changed) != len(pieces):
            raise ValueError(f"changed={notice.changed} of {len(pieces)} pieces")
        changed = [(n, p) for n, p in zip(notice.changed, pieces, strict=True) if n is not None]
        if changed and notice.base is None:
            raise ValueError(f"changed={notice.changed} of no version")
        if any(not 0 <= n <= math.prod(piece.shape) for n, piece in changed):
            raise ValueError(f"changed={notice.changed}: more elements than the pieces have")
        _ = [place.host_and_port for place in places]
        return notice

    def parts(self) -> list[tuple[Place, list[tuple[tuple[int, ...], str]]]]:
        """Return each place, and shape and dtype of each array that is pulled there.

        That is a piece, or places and values of its changes, where there are some.
        """
        kinds, found = zip(self.changed, self.pieces, strict=True), []
        for place in self.places:
            some: list[tuple[tuple[int, ...], str]] = []
            for n, piece in islice(kinds, place.pieces):
                if n is None:
                    some.append((piece.shape, piece.dtype))
                elif n:
                    some += [((n,), PLACE.__name__), ((n,), piece.dtype)]
            found.append((place, some))
        return found

    def to_json(self) -> dict[str, Any]:
        """Return what `read` reads."""
        named = {"pieces": self.pieces, "places": self.places}
        return asdict(self) | {k: [part._asdict() for part in x] for k, x in named.items()}

    def check_places(self, peer: str | None, networks: Sequence[str]) -> None:
        """Refuse weights of hosts that nobody allowed: a token opens no way to other hosts.

        Args:
            peer: address of who sent this, where weights may be.
            networks: where they may be, too.

        Raises:
            NotAllowed: some are elsewhere.
        """
        allowed = [ipaddress.ip_network(network) for network in networks]
        for place in self.places:
            host, _ = place.host_and_port
            if not _same_host(host, peer or "") and not _within(host, allowed):
                raise NotAllowed(
                    f"address={place.address!r}: this came from {peer}, and weights must too, or "
                    f"from serve.weight_networks={list(networks)}; add the network of that host"
                )

    def __str__(self) -> str:
        names = sorted({piece.name for piece in self.pieces})
        return f"group {self.number} of {self.count} ({', '.join(names)}) of version {self.version}"


def _same_host(one: str, other: str) -> bool:
    try:
        first, second = (_plain(ipaddress.ip_address(text)) for text in (one, other))
    except ValueError:  # a name: it could lead anywhere
        return False
    return first == second or (first.is_loopback and second.is_loopback)


def _within(host: str, networks: Sequence[Any]) -> bool:
    try:
        address = _plain(ipaddress.ip_address(host))
    except ValueError:
        return False
    return any(address in network for network in networks)


def _plain(address: Any) -> Any:
    """Return an IPv4 address that is mapped into IPv6 as IPv4; others as they are."""
    return getattr(address, "ipv4_mapped", None) or address


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


class _Kept(NamedTuple):
    """Hold a version in host memory; None: not whole, or of parts of several versions."""

    version: int | None
    arrays: dict[str, np.ndarray]


class Incoming:
    """Hold the weights that are being received; none is used before all are there.

    Args:
        abstract_params: shapes of the parameters.
        shardings: of them.
        seconds: longest wait for a group.
    """

    def __init__(self, abstract_params: Params, shardings: Params, seconds: float) -> None:
        self.abstract_params, self.shardings = abstract_params, named(shardings)
        self.seconds = seconds
        self._assembly: Assembly | None = None  # None: no version is on its way
        self._next: tuple[str, int, int, int] | None = None  # transfer, version, count, number
        self._kept: _Kept | None = None  # the newest version, where its changes may come
        self._base: _Kept | None = None  # that, while it becomes the version that is on its way
        self._end: transfer.TransferServer | None = None
        self._connections: dict[str, transfer.TransferConnection] = {}  # by address
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """Return where others pull what is offered to them here."""
        assert self._end is not None
        return self._end.address()

    def receive(self, notice: Notice) -> Params | None:
        """Pull a group; return all parameters once it was the last, None before.

        Raises:
            ValueError: it is of another model; nothing was pulled.
            TransferFailed: it did not come whole, or is not the next; begin with the first again.
        """
        update = notice.transfer, notice.version, notice.count
        if notice.fresh:
            self._end, self._connections = None, {}
        if notice.number == 0:
            pieces = whole_pieces(named(self.abstract_params), notice.dtype)
            self._assembly, self._next = Assembly(pieces, self.shardings), (*update, 0)
            self._base, self._kept = self._kept, None
            if notice.keep and self._base is None:
                self._base = _Kept(None, {p.name: _blank(p) for p in pieces})
        assembly = self._assembly
        if assembly is None or self._next != (*update, notice.number):
            raise TransferFailed(f"{notice} is not the next that is expected here: begin with 0")
        try:
            assembly.check(notice.pieces)
            assembly.put(notice.pieces, self._pull(notice))
            self._next = (*update, notice.number + 1)
            if notice.number + 1 < notice.count:
                return None
            arrays = assembly.finish()
        except BaseException:
            self.forget()
            raise
        self._kept = self._base and self._base._replace(version=notice.version)
        self.forget()
        return jax.tree.unflatten(jax.tree.structure(self.abstract_params), arrays.values())

    def forget(self) -> None:
        """Throw away what has come of a version; its next group is refused."""
        self._assembly = self._next = self._base = None

    def _pull(self, notice: Notice) -> list[jax.Array]:
        base = self._base
        if notice.base is not None and (base is None or base.version != notice.base):
            message = f"{notice}: version {notice.base}, whose changes it is, is not here"
            raise TransferFailed(message)
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        came: list[jax.Array] = []
        try:
            for place, parts in notice.parts():
                wanted = [
                    jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype), sharding=device)
                    for shape, dtype in parts
                ]
                came += self._connect(place).pull(place.uuid, wanted) if wanted else []
            _wait(came, min(self.seconds, patience(notice.pieces)))
            arrays = came
            if notice.base is not None and base is not None:
                arrays = jax.device_put(_whole(notice, base.arrays, came), device)
            found = sums(arrays)
        except (RuntimeError, OSError, ValueError) as error:  # JaxRuntimeError among them
            if not isinstance(error, TimeoutError):  # a new one would cost threads and sockets
                self._connections.clear()
            places = ", ".join(place.address for place in notice.places)
            raise TransferFailed(f"{notice} did not come from {places}: {error}") from error
        if tuple(found) != notice.checksums:
            wrong = [
                p.name
                for p, ours, sent in zip(notice.pieces, found, notice.checksums, strict=True)
                if ours != sent
            ]
            raise TransferFailed(
                f"{notice} came with other bits than were sent: {', '.join(wrong)}"
            )
        if base is not None:
            for piece, array in zip(notice.pieces, arrays, strict=True):
                base.arrays[piece.name][piece.box] = array
        if notice.onward:
            self._end = self._end or open_transfer(notice.places[0].host_and_port[0])
            for uuid in notice.onward if came else ():
                self._end.await_pull(uuid, came)
        return arrays

    def _connect(self, place: Place) -> transfer.TransferConnection:
        host, port = place.host_and_port
        with self._lock:
            if place.address not in self._connections:
                # A pull from where nobody listens does not fail: it never ends.
                socket.create_connection((host, port), CONNECT_SECONDS).close()
                self._end = self._end or open_transfer(host)
                self._connections[place.address] = self._end.connect(place.address)
            return self._connections[place.address]


def _blank(piece: Piece) -> np.ndarray:
    return np.zeros(piece.shape, jax.numpy.dtype(piece.dtype))


def _whole(
    notice: Notice, base: dict[str, np.ndarray], parts: Sequence[jax.Array]
) -> list[np.ndarray]:
    """Return the pieces of a group, from those of the version before and their changes."""
    coming, pieces = map(np.asarray, parts), []
    for piece, number in zip(notice.pieces, notice.changed, strict=True):
        if number is None:
            pieces.append(next(coming))
            continue
        made = (next(coming), next(coming)) if number else (np.empty(0, PLACE), np.empty(0))
        pieces.append(changed(base[piece.name][piece.box], Changes(*made)))
    return pieces


def _wait(arrays: list[Any], seconds: float) -> None:
    """Wait until arrays are there; raise TimeoutError after `seconds`.

    A pull has no limit of its own: a peer that hangs would hang us.
    """
    deadline = time.monotonic() + seconds
    while not all(array.is_ready() for array in arrays):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing within {seconds:g} s")
        time.sleep(POLL_SECONDS)
    jax.block_until_ready(arrays)
