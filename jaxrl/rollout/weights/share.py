"""What one process of the trainer has of the weights, and offers to the servers that want them.

In a job of several processes nobody gathers the weights: of each group a process cuts what its own
devices have, merged and cast there, and servers pull from all processes at once. The first process
talks to the servers; it asks the others for their parts over a stream, while they have nothing else
to do: within a phase, as with engines over several hosts (`native.followed`).

    Share             of a process: cut, compared with the version before, offered
    OtherShare        of another process, in the first one
    SharingEngine     in the others: does what the first one asks, until the phase is over
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.models.linear import LoraWeight, Weight, is_adapted
from jaxrl.models.transformer import Params
from jaxrl.parallel.streams import open_streams
from jaxrl.rollout.conversations.across_processes import AbsentEngine
from jaxrl.rollout.weights.changes import Changes, changes
from jaxrl.rollout.weights.groups import Arrays, Piece, named, sums, take
from jaxrl.rollout.weights.incoming import open_transfer

OFFER, FORGET, SCORE, END = "offer", "forget", "score", "end"
BUSY = "the trainer is at work on the next version, which it will get"


class Gone(RuntimeError):
    """Signal that weights are no longer, or not now, to be had."""


class Offered(NamedTuple):
    """Say what can be pulled.

    Attributes:
        addresses: where, for each receiver.
        checksums: of the pieces.
        changed: how many elements of each piece are sent; None = all.
        nbytes: of what each receiver pulls.
    """

    addresses: list[str]
    checksums: tuple[int, ...]
    changed: tuple[int | None, ...]
    nbytes: int


class Held(NamedTuple):
    """Hold pieces of a version in host memory.

    Attributes:
        base: the version since which `changes` are; None = there are none, or they are not less.
    """

    version: int
    pieces: tuple[Piece, ...]
    arrays: list[np.ndarray]
    checksums: tuple[int, ...]
    base: int | None
    changes: list[Changes]


class Share:
    """Offer what this process has of a version.

    Args:
        delta: keep what was sent last in host memory, and offer what changed since.
    """

    def __init__(self, *, delta: bool) -> None:
        self.delta, self.version = delta, -1
        self._arrays: Arrays | None = None
        self._held: dict[int, Held] = {}  # by the number of the group
        self._cut: tuple[tuple[int, int], list[jax.Array], tuple[int, ...]] | None = None
        self._ends: dict[str, transfer.TransferServer] = {}  # by the host that pulls

    def publish(self, params: Params, version: int) -> None:
        """Make a version the newest: a reference, no copy. In a job, a collective."""
        self.version, self._cut = version, None
        # the same version once more may be of other weights
        self._held = {n: held for n, held in self._held.items() if held.version != version}
        self._arrays = {name: _with_whole_adapter(x) for name, x in named(params).items()}

    def release(self) -> None:
        """Hold the parameters no longer."""
        self._arrays = self._cut = None

    def forget(self, host: str) -> None:
        """Drop what was offered to a host, and not pulled."""
        self._ends.pop(host, None)

    def offer(
        self,
        version: int,
        number: int,
        pieces: Sequence[Piece],
        receivers: Sequence[tuple[str, int]],
        base: int | None,
    ) -> Offered:
        """Cut pieces of a group and let each receiver pull them.

        Args:
            number: of the group.
            receivers: host, and the number under which it pulls.
            base: the version that they have; None = they get the pieces.

        Raises:
            Gone: the trainer has donated the parameters, or does so just now.
            OSError: a host's name, or a port of this one.
        """
        if version != self.version:
            raise Gone(f"version {version} is not held, but {self.version}")
        try:
            made, parts, checksums = self._parts(number, tuple(pieces), base)
        except RuntimeError as error:  # of arrays that are deleted
            raise Gone(f"{BUSY}: {error}") from error
        addresses = []
        for host, uuid in receivers:
            if host not in self._ends:
                self._ends[host] = open_transfer(host)
            if parts:
                self._ends[host].await_pull(uuid, parts)
            addresses.append(self._ends[host].address())
        changed = tuple(c.places.size for c in made) if made else (None,) * len(pieces)
        return Offered(addresses, checksums, changed, sum(x.nbytes for x in parts))

    def _parts(
        self, number: int, pieces: tuple[Piece, ...], base: int | None
    ) -> tuple[list[Changes], list[jax.Array], tuple[int, ...]]:
        """Return the changes that are sent, if they are, all arrays to send, and checksums."""
        device = jax.local_devices()[0]
        if self.delta:
            held = self.hold(number, pieces)
            if base is not None and base == held.base:
                some = [part for c in held.changes if c.places.size for part in c]
                return held.changes, jax.device_put(some, device), held.checksums
            return [], jax.device_put(held.arrays, device), held.checksums
        if self._cut is None or self._cut[0] != (self.version, number):
            self._cut = None
            parts = self._take(pieces)
            self._cut = (self.version, number), parts, tuple(sums(parts))
        return [], *self._cut[1:]

    def _take(self, pieces: Sequence[Piece]) -> list[jax.Array]:
        """Return pieces, on one device."""
        arrays = self._arrays
        if arrays is None or any(x.is_deleted() for x in _on_devices(dict(arrays))):
            raise Gone(BUSY)
        if not spans_processes(dict(arrays)):
            taken = take(arrays, pieces)
        else:
            taken = [_take_here(arrays[piece.name], piece) for piece in pieces]
        return jax.device_put(taken, jax.local_devices()[0])

    def hold(self, number: int, pieces: tuple[Piece, ...]) -> Held:
        """Return pieces of a group in host memory, with what changed since the version before.

        With `delta` they stay there, in the place of those of that version.

        Raises:
            Gone: the trainer has donated the parameters.
        """
        before = self._held.get(number)
        if before is not None and before.version == self.version:
            return before
        taken = self._take(pieces)
        arrays, base, made = [np.array(x) for x in taken], None, []
        if before is not None and before.pieces == pieces:
            base = before.version
            made = [changes(*pair) for pair in zip(before.arrays, arrays, strict=True)]
            if sum(c.nbytes for c in made) >= sum(x.nbytes for x in arrays):
                base, made = None, []
        held = Held(self.version, pieces, arrays, tuple(sums(taken)), base, made)
        if self.delta:
            self._held[number] = held
        return held


def _on_devices(tree: Any) -> list[jax.Array]:
    """Return the leaves that are on devices: scales of adapters may be of numpy."""
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def spans_processes(tree: Any) -> bool:
    """Return whether an array has parts on devices of other processes."""
    return not all(x.is_fully_addressable for x in _on_devices(tree))


def boxes(arrays: Arrays, group: Sequence[Piece]) -> dict[int, list[Piece]]:
    """Return the parts of a group by the process that offers them: one that has them.

    Where several have the same, they take turns.
    """
    turns, found = count(), {}
    for piece in group:
        weight = arrays[piece.name]
        array = weight.w if is_adapted(weight) else weight
        owners: dict[tuple[tuple[int, int], ...], set[int]] = {}
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            owners.setdefault(_bounds(index, array.shape), set()).add(device.process_index)
        for bounds, processes in owners.items():
            ends = [at + n for at, n in zip(piece.starts, piece.shape, strict=True)]
            low = [max(at, a) for at, (a, _) in zip(piece.starts, bounds, strict=True)]
            high = [min(end, b) for end, (_, b) in zip(ends, bounds, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                shape = tuple(b - a for a, b in zip(low, high, strict=True))
                process = sorted(processes)[next(turns) % len(processes)]
                part = piece._replace(starts=tuple(low), shape=shape)
                found.setdefault(process, []).append(part)
    return dict(sorted(found.items()))


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _take_here(weight: Weight, piece: Piece) -> jax.Array:
    """Return a piece, merged and cast, from the shard of this process that it is a part of."""
    array = weight.w if isinstance(weight, LoraWeight) else weight
    for shard in array.addressable_shards:
        bounds = _bounds(shard.index, array.shape)
        ranges = zip(piece.starts, piece.shape, bounds, strict=True)
        if all(a <= at and at + n <= b for at, n, (a, b) in ranges):
            break
    else:
        raise ValueError(f"{piece} is in no shard of process {jax.process_index()}")
    part: Weight = shard.data
    if isinstance(weight, LoraWeight):
        stack, inputs = weight.scale.ndim, weight.a.ndim - 1
        box = tuple(slice(*ends) for ends in bounds)

        def here(x: Any, index: tuple[slice, ...]) -> jax.Array:
            return jax.device_put(x.addressable_data(0)[index], shard.device)

        part = LoraWeight(
            w=shard.data,
            a=here(weight.a, box[:inputs]),
            b=here(weight.b, (*box[:stack], slice(None), *box[inputs:])),
            scale=here(weight.scale, box[:stack]),
        )
    starts = tuple(at - a for at, (a, _) in zip(piece.starts, bounds, strict=True))
    return take({piece.name: part}, [piece._replace(starts=starts)])[0]


def _with_whole_adapter(weight: Weight) -> Weight:
    """Return a weight whose adapter, which is small, is whole on every device of the job."""
    if not isinstance(weight, LoraWeight) or weight.w.is_fully_addressable:
        return weight
    assert isinstance(weight.w.sharding, NamedSharding)
    everywhere = NamedSharding(weight.w.sharding.mesh, PartitionSpec())
    a, b, scale = jax.jit(lambda *x: x, out_shardings=everywhere)(weight.a, weight.b, weight.scale)
    return weight.replace(a=a, b=b, scale=scale)


# ---- the processes of a job


class OtherShare:
    """Ask another process for what it has. All calls are of one thread at a time.

    Args:
        stream: to it.
    """

    def __init__(self, stream: Connection) -> None:
        self._stream = stream

    def begin(self, name: str, *args: Any) -> None:
        """Send a call by its name and arguments; `answer` waits for what it gives."""
        self._stream.send((name, args))

    def answer(self) -> Any:
        """Wait for the answer; raise what went wrong there."""
        found = self._stream.recv()
        if isinstance(found, Exception):
            raise found
        return found


class Shares:
    """Hold what all processes of the trainer have; in the first one.

    Args:
        own: of this process.
        streams: to the others, by process.
    """

    def __init__(self, own: Share, streams: Mapping[int, Connection] | None = None) -> None:
        self.own = own
        self._others = {process: OtherShare(stream) for process, stream in (streams or {}).items()}
        self._lock, self._open = threading.Lock(), not self._others

    @contextmanager
    def phase(self) -> Iterator[bool]:
        """Let the other processes do what this one asks while the block runs."""
        with self._lock:
            self._open = True
        try:
            yield True
        finally:
            with self._lock:
                self._open = not self._others
                for other in self._others.values():
                    other.begin(END)

    def offer(
        self,
        version: int,
        number: int,
        parts: Mapping[int, Sequence[Piece]],
        receivers: Sequence[tuple[str, int]],
        base: int | None,
    ) -> list[Offered]:
        """Have each process offer its parts of a group, see `Share.offer`; in their order.

        Raises:
            Gone: outside of a phase, too.
        """
        with self._lock:
            self._check()
            asked = {p: (version, number, pieces, receivers, base) for p, pieces in parts.items()}
            own = jax.process_index()
            for process, args in asked.items():
                if process != own:
                    self._others[process].begin(OFFER, *args)
            found, errors = {}, []
            for process, args in asked.items():
                try:
                    if process == own:
                        found[process] = self.own.offer(*args)
                    else:
                        found[process] = self._others[process].answer()
                except Exception as error:  # the other answers must be read, too
                    errors.append(error)
            if errors:
                raise errors[0]
            return [found[process] for process in asked]

    def forget(self, host: str) -> None:
        """Drop what was offered to a host, and not pulled."""
        with self._lock:
            self.own.forget(host)
            for other in self._others.values() if self._open else ():
                other.begin(FORGET, host)
                other.answer()

    def score(self, score: Callable[..., Any], params: Params, *args: Any) -> Any:
        """Compute a score of parameters that all processes have; see `probe.Score`."""
        with self._lock:
            self._check()
            for other in self._others.values():
                other.begin(SCORE, *args)
            found = score(params, *args)
            for other in self._others.values():
                other.answer()
            return found

    def _check(self) -> None:
        if not self._open:
            raise Gone(BUSY)


class SharingEngine(AbsentEngine):
    """Stand in for the `Engine` where the first process talks to servers, and offer weights.

    Args:
        share: of this process.
        stream: from the first process.
        score: the probe's.
    """

    def __init__(self, share: Share, stream: Connection, score: Callable[..., Any]) -> None:
        self._share, self._stream, self._score = share, stream, score
        self._params: Params | None = None

    @contextmanager
    def phase(self) -> Iterator[bool]:
        """Do what the first process asks, to the end of the phase."""
        while (asked := self._stream.recv())[0] != END:
            try:
                answer: Any = self._do(*asked)
            except Exception as error:
                portable = isinstance(error, Gone | OSError)
                answer = error if portable else RuntimeError(f"{type(error).__name__}: {error}")
            self._stream.send(answer)
        yield False

    def update_weights(self, params: Params, version: int) -> None:
        """Offer this process's part of a version, while the first one sends it to servers."""
        self._share.publish(params, version)
        self._params = params
        with self.phase():
            self._params = None

    def sleep(self) -> None:
        """Let go of the parameters."""
        self._share.release()

    def _do(self, name: str, args: tuple[Any, ...]) -> Any:
        if name == OFFER:
            return self._share.offer(*args)
        if name == FORGET:
            return self._share.forget(*args)
        assert name == SCORE
        self._score(self._params, *args)
        return None


def open_shares(*, delta: bool) -> tuple[Share, dict[int, Connection]]:
    """Return the share of this process and its streams; a collective of the job."""
    streams = open_streams(0, range(1, jax.process_count())) if jax.process_count() > 1 else {}
    return Share(delta=delta), streams
