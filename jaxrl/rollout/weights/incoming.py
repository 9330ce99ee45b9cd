"""Weights from the trainer's process to a server's, without files: the server's end.

A group is pulled from the trainer's process (`jax.experimental.transfer`), compared with its
checksums and put where it belongs. The old weights are sampled from until the last group is there:
so this holds one group beside the old weights and the new ones; and a copy in host memory, where
the trainer sends changes.
"""

import ipaddress
import math
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    """Signal that weights are of another host than the one that gives notice of them."""


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


@dataclass(frozen=True)
class Notice:
    """Describe a group that can be pulled.

    Attributes:
        address: of the trainer's end.
        uuid: that the group has there.
        transfer: the same of all groups of one update of one server, random.
        version: of the weights.
        number, count: of the group, and of all groups.
        dtype: of the sampler.
        pieces, checksums: of the group.
        base: the version whose changes are sent; None = the pieces are.
        changed: how many elements of each piece are, where changes are sent.
        keep: remember the version, as later ones may be sent as changes of it.
    """

    address: str
    transfer: str
    uuid: int
    version: int
    number: int
    count: int
    dtype: str
    pieces: tuple[Piece, ...]
    checksums: list[int]
    base: int | None = None
    changed: tuple[int, ...] = ()
    keep: bool = False

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
            notice = cls(
                address=str(body["address"]),
                transfer=str(body["transfer"]),
                uuid=int(body["uuid"]),
                version=int(body["version"]),
                number=int(body["number"]),
                count=int(body["count"]),
                dtype=str(body["dtype"]),
                pieces=pieces,
                checksums=list(_ints(body["checksums"])),
                base=None if body.get("base") is None else int(body["base"]),
                changed=_ints(body.get("changed", ())),
                keep=bool(body.get("keep", False)),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"a notice of weights without what belongs in it: {error!r}"
            ) from error
        if notice.dtype not in DTYPES or len(notice.checksums) != len(pieces) or not pieces:
            raise ValueError(f"dtype={notice.dtype!r}, {len(notice.checksums)} checksums")
        if not 0 <= notice.number < notice.count or not 0 <= notice.uuid < 2**63:
            raise ValueError(f"group {notice.number} of {notice.count}, uuid={notice.uuid}")
        if notice.base is not None and len(notice.changed) != len(pieces):
            raise ValueError(f"changed={notice.changed} of {len(pieces)} pieces")
        sizes = zip(notice.changed, pieces, strict=False)
        if any(not 0 <= n <= math.prod(piece.shape) for n, piece in sizes):
            raise ValueError(f"changed={notice.changed}: more elements than the pieces have")
        _ = notice.place
        return notice

    def parts(self) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of each array that is pulled: pieces, or places and values."""
        if self.base is None:
            return [(piece.shape, piece.dtype) for piece in self.pieces]
        some = [(n, piece) for n, piece in zip(self.changed, self.pieces, strict=True) if n]
        return [part for n, p in some for part in (((n,), PLACE.__name__), ((n,), p.dtype))]

    def to_json(self) -> dict[str, Any]:
        """Return what `read` reads."""
        return asdict(self) | {"pieces": [piece._asdict() for piece in self.pieces]}

    @property
    def place(self) -> tuple[str, int]:
        """Return host and port of the trainer's end; raise ValueError where there are none."""
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"address={self.address!r}: must be host:port")
        return host.strip("[]"), int(port)

    def check_sender(self, peer: str | None) -> None:
        """Refuse weights of another host than the sender's: a token opens no way to other hosts.

        Args:
            peer: address of who sent this.

        Raises:
            NotAllowed: they are elsewhere.
        """
        host, _ = self.place
        if not _same_host(host, peer or ""):
            message = f"address={self.address!r}: this came from {peer}; weights must too"
            raise NotAllowed(message)

    def __str__(self) -> str:
        names = sorted({piece.name for piece in self.pieces})
        return f"group {self.number} of {self.count} ({', '.join(names)}) of version {self.version}"


def _same_host(one: str, other: str) -> bool:
    try:
        first, second = (_plain(ipaddress.ip_address(text)) for text in (one, other))
    except ValueError:  # a name: it could lead anywhere
        return False
    return first == second or (first.is_loopback and second.is_loopback)


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
        self._connection: tuple[str, transfer.TransferConnection] | None = None
        self._lock = threading.Lock()

    def receive(self, notice: Notice) -> Params | None:
        """Pull a group; return all parameters once it was the last, None before.

        Raises:
            ValueError: it is of another model; nothing was pulled.
            TransferFailed: it did not come whole, or is not the next; begin with the first again.
        """
        update = notice.transfer, notice.version, notice.count
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
        wanted = [
            jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype), sharding=device)
            for shape, dtype in notice.parts()
        ]
        try:
            arrays = self._connect(notice).pull(notice.uuid, wanted) if wanted else []
            _wait(arrays, min(self.seconds, patience(notice.pieces)))
            if notice.base is not None and base is not None:
                arrays = jax.device_put(_whole(notice, base.arrays, arrays), device)
            found = sums(arrays)
        except (RuntimeError, OSError, ValueError) as error:  # JaxRuntimeError among them
            if not isinstance(error, TimeoutError):  # a new one would cost threads and sockets
                self._connection = None
            raise TransferFailed(f"{notice} did not come from {notice.address}: {error}") from error
        if found != notice.checksums:
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
        return arrays

    def _connect(self, notice: Notice) -> transfer.TransferConnection:
        address, place = notice.address, notice.place
        with self._lock:
            if self._connection is None or self._connection[0] != address:
                # A pull from where nobody listens does not fail: it never ends.
                socket.create_connection(place, CONNECT_SECONDS).close()
                self._end = self._end or open_transfer(place[0])
                self._connection = address, self._end.connect(address)
            return self._connection[1]


def _blank(piece: Piece) -> np.ndarray:
    return np.zeros(piece.shape, jax.numpy.dtype(piece.dtype))


def _whole(
    notice: Notice, base: dict[str, np.ndarray], parts: Sequence[jax.Array]
) -> list[np.ndarray]:
    """Return the pieces of a group, from those of the version before and their changes."""
    coming, pieces = map(np.asarray, parts), []
    for piece, number in zip(notice.pieces, notice.changed, strict=True):
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
