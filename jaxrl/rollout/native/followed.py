"""Engines whose devices belong to several processes: one process decides, the others follow.

A program over the devices of several processes runs in all of them, and all must begin their
programs in one order. The process of the engine's first device has its queue, slots and pages as
ever (`NativeEngine`). What it asks of its `Programs`, which take and return host arrays, it says to
the others first, and they ask the same of theirs. What stays on the devices is not sent: each
process has its own parts of it.

    phase_of              what all do together: weights come, a batch is sampled, the engine sleeps
    LeadingEngine         in the first process
    FollowingEngine       in the others: follows until the leader says that the phase is over

Between phases the processes are in the collectives of training, which nothing may come between. A
call that is missing is an error, by its number; a process that is gone ends the others, by its
stream.
"""

import contextlib
import functools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl import cli
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.parallel.streams import open_streams
from jaxrl.rollout.native import decode as device
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.programs import Programs
from jaxrl.rollout.protocol import Completion, Engine, Request

SECONDS = 2.0  # from a failed computation until the stream of the process that left it has ended
BEGIN, LOAD, DECODE, END = "begin", "load", "decode", "end"  # others are methods of `Programs`


def spanning_engine(
    config: TransformerConfig, mesh: Mesh, **options: Any
) -> "LeadingEngine | FollowingEngine":
    """Make this process's part of an engine over devices of several; a collective of the job.

    Args:
        config, options: see `NativeEngine`.
        mesh: of the engine.
    """
    leader = mesh.devices.flat[0].process_index
    others = sorted({device.process_index for device in mesh.devices.flat} - {leader})
    streams = open_streams(leader, others)
    if leader in streams:
        return FollowingEngine(config, mesh, leader, streams[leader])
    return LeadingEngine(config, mesh, followers=Followers(streams), **options)


def phase_of(engine: Engine) -> AbstractContextManager[bool]:
    """Use an engine in all processes that have devices of it.

    Returns:
        A context whose value says whether this process uses it. Where it does not, it has followed
        the one that does to the end when the block begins.
    """
    phase = getattr(engine, "phase", None)
    return contextlib.nullcontext(True) if phase is None else phase()


class Followers:
    """Say to other processes what they do next.

    Args:
        streams: by process.
    """

    def __init__(self, streams: Mapping[int, Connection]) -> None:
        self._streams, self._number, self._open = dict(streams), 0, False
        self._gone: str | None = None
        self._noticed = threading.Event()
        for process, stream in streams.items():
            threading.Thread(target=self._watch, args=(process, stream), daemon=True).start()

    def tell(self, name: str, *args: Any, **options: Any) -> None:
        """Send a call.

        Raises:
            ConnectionError: a process is gone.
        """
        self._open = name not in (BEGIN, END)
        call = pickle.dumps((self._number, name, args, options), pickle.HIGHEST_PROTOCOL)
        self._number += 1
        for process, stream in self._streams.items():
            try:
                stream.send_bytes(call)
            except OSError as error:
                self._gone = self._gone or f"process {process}, which follows this engine, is gone"
                raise ConnectionError(self._gone) from error
        self.raise_gone()

    def raise_gone(self, within: float = 0.0) -> None:
        """Raise a ConnectionError if a process is gone, or is seen to be within so many seconds."""
        self._noticed.wait(within)
        if self._gone:
            raise ConnectionError(self._gone)

    def _watch(self, process: int, stream: Connection) -> None:
        """End this process when one that follows it fails: it may wait for that one's devices."""
        try:
            why = f"fails: {stream.recv()}"
        except (EOFError, OSError):
            why = "is gone"
        self._gone = f"process {process}, which follows this engine, {why}"
        self._noticed.set()
        if self._open:
            print(self._gone, file=sys.stderr, flush=True)
            os._exit(cli.CRASHED)


class LeadingPrograms(Programs):
    """Run what `Programs` runs, in the other processes of the engine too."""

    def __init__(self, *args: Any, followers: Followers, **options: Any) -> None:
        followers.tell(BEGIN, *args[2:], **options)  # they know config and mesh
        super().__init__(*args, **options)
        self._followers, self._tell = followers, followers.tell
        self._left: device.Rows | None = None  # on the devices, by the last block

    def load(self, params: Params) -> None:
        """Take over a copy of the parameters, each process of its own."""
        self._tell(LOAD)
        super().load(params)

    def drop(self, *, weights: bool) -> None:
        """Free the cache, and the weights."""
        self._tell("drop", weights=weights)
        super().drop(weights=weights)

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens."""
        self._tell("reserve", length)
        super().reserve(length)

    def decode(
        self,
        rows: device.Rows,
        prompts: device.Prompts | None = None,
        before: device.Rows | None = None,
        begins: Any = None,
    ) -> tuple[device.Rows, device.Block]:
        """Begin a block, see `Programs.decode`; `before` is of the block before, if any."""
        assert before is None or before is self._left
        self._tell(DECODE, rows, prompts, before is not None, begins)
        self._left, block = super().decode(rows, prompts, before, begins)
        return self._left, block

    def fetch(self, block: device.Block) -> device.Block:
        """Wait for a block, and return it on the host.

        Raises:
            ConnectionError: a process without which it cannot be computed is gone.
        """
        try:
            return super().fetch(block)
        except Exception as error:
            try:
                self._followers.raise_gone(within=SECONDS)
            except ConnectionError as gone:
                raise gone from error
            raise

    def take(self, part: int, pages: Sequence[int], state: int | None = None) -> Any:
        """Return what is in some pages of a part, and in a state."""
        self._tell("take", part, list(pages), state)
        return super().take(part, pages, state)

    def put(self, part: int, pages: Sequence[int], held: Any, state: int | None = None) -> None:
        """Put what `take` returned into pages of a part, and into a state."""
        self._tell("put", part, list(pages), held, state)
        super().put(part, pages, held, state)

    def read_routes(
        self, rows: Sequence[tuple[int, Sequence[int]]]
    ) -> Callable[[], list[np.ndarray]]:
        """Begin to fetch the experts of rows."""
        self._tell("read_routes", [(part, list(pages)) for part, pages in rows])
        return super().read_routes(rows)


class LeadingEngine(NativeEngine):
    """Sample on the devices of several processes, the others of which follow.

    Samples may be in flight only within a `phase`.
    """

    scores = False  # its programs would have to begin in all processes

    def __init__(self, *args: Any, followers: Followers, **options: Any) -> None:
        self._tell = followers.tell
        programs = functools.partial(LeadingPrograms, followers=followers)
        super().__init__(*args, programs=programs, **options)

    @contextmanager
    def phase(self) -> Iterator[bool]:
        """Let the others follow while the block runs; what is in flight at its end is aborted."""
        try:
            yield True
        finally:
            self.abort()
            with self._held():
                self._tell(END)

    def update_weights(self, params: Params, version: int) -> None:
        """Sample from these parameters of the whole job from now on."""
        with self.phase():
            super().update_weights(params, version)

    def sleep(self) -> None:
        """Drop weights and cache."""
        with self.phase():
            super().sleep()

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile for the shapes of these requests."""
        with self.phase():
            super().warm_up(requests)


class FollowingEngine:
    """Stand in for the `Engine` in a process that follows another one.

    Args:
        leader: process.
        stream: from it.
    """

    def __init__(
        self, config: TransformerConfig, mesh: Mesh, leader: int, stream: Connection
    ) -> None:
        self._config, self._mesh, self._leader, self._stream = config, mesh, leader, stream
        self._number = 0
        self._programs: Programs | None = None
        self._params: Params = {}  # that come
        self._left: device.Rows | None = None  # on the devices, by the last block

    @contextmanager
    def phase(self) -> Iterator[bool]:
        """Follow to the end of the phase.

        Raises:
            ConnectionError: the leader is gone.
            RuntimeError: a call is missing.
        """
        try:
            while self._follow():
                pass
        except BaseException as error:
            with contextlib.suppress(OSError):  # the leader may wait for these devices
                self._stream.send(f"{type(error).__name__}: {error}")
            if self._is_alone():
                raise ConnectionError(
                    f"process {self._leader}, which this one follows for its engine, is gone"
                ) from error
            raise
        yield False

    def _is_alone(self) -> bool:
        """Return whether the leader is gone, behind calls that are not done."""
        with contextlib.suppress(EOFError, OSError):
            while self._stream.poll(SECONDS):
                self._stream.recv_bytes()
            return False
        return True

    def _follow(self) -> bool:
        """Do what the leader says next; return False at the end of the phase."""
        number, name, args, options = self._stream.recv()
        if number != self._number:
            raise RuntimeError(f"call {self._number} of process {self._leader} did not come")
        self._number += 1
        if name == END:
            return False
        if name == BEGIN:
            self._programs = Programs(self._config, self._mesh, *args, **options)
            return True
        assert self._programs is not None  # a leader begins
        if name == LOAD:
            self._programs.load(self._params)
        elif name == DECODE:
            rows, prompts, goes_on, begins = args
            before = self._left if goes_on else None
            self._left, _ = self._programs.decode(rows, prompts, before, begins)
        else:
            getattr(self._programs, name)(*args, **options)
        return True

    def update_weights(self, params: Params, version: int) -> None:
        """Follow, while the parameters of the whole job come."""
        self._params = params
        with self.phase():
            self._params = {}

    def sleep(self) -> None:
        """Drop weights and cache when the leader does."""
        with self.phase():
            self._left = None

    def wake(self) -> None:
        """Do nothing: the cache is made when it is needed."""

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile what the leader compiles."""
        with self.phase():
            pass

    def describe(self) -> str:
        """Say whom this process follows."""
        return f"a part of that of process {self._leader}"

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Raise RuntimeError: this process follows."""
        raise RuntimeError(f"process {self._leader} samples; this one follows it")

    def submit(self, requests: Sequence[Request]) -> Any:
        """Raise RuntimeError: this process follows."""
        raise RuntimeError(f"process {self._leader} samples; this one follows it")
