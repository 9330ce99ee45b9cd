"""Requests for samples, within limits; pausing, and new weights."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from etils import epath

from jaxrl.config import ServeConfig
from jaxrl.rollout.conversations.submissions import Submissions
from jaxrl.rollout.protocol import PromptScores
from jaxrl.rollout.server.errors import ApiError
from jaxrl.rollout.server.prometheus import Measures
from jaxrl.rollout.server.requests import RequestReader, SampleRequest
from jaxrl.rollout.server.runs import RunningRequest
from jaxrl.rollout.server.served_model import ServedModel
from jaxrl.rollout.server.sessions import ServedSessions
from jaxrl.rollout.server.shared_engine import Guests, HostEngine
from jaxrl.rollout.server.weight_folders import folder_under
from jaxrl.rollout.weights.incoming import Incoming, NotAllowed, Notice, TransferFailed
from jaxrl.rollout.weights.versions import VersionDamaged

LONG_BYTES = 64 * 1024  # of a body whose text is tokenised beside the others
NAME_BYTES = 64  # that are tokenised while the name of a token is looked up
IDLE_SECONDS = 120.0  # between two groups of weights; then who sent the first has given up
PAUSE_MODES = ("abort", "keep", "wait")
T = TypeVar("T")


class Service:
    """Do what the routes of the server call for; an instance belongs to one loop.

    Args:
        guests: the engine.
        served: its model.
        limits: of requests.
        sessions: conversations that are kept.
    """

    def __init__(
        self, guests: Guests, served: ServedModel, limits: ServeConfig, sessions: ServedSessions
    ) -> None:
        self.guests, self.served, self.limits, self.sessions = guests, served, limits, sessions
        can = {name: getattr(guests.engine, name, False) for name in ("constrains", "scores")}
        self.reader = RequestReader(served, limits, **can)
        self.measures = Measures()
        self.submissions = Submissions(guests)
        self.runs: dict[str, RunningRequest] = {}
        self._started: set[RunningRequest] = set()
        self.samples = 0  # that run or wait
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        # Others decode meanwhile: a tokenizer allows that as long as no call asks it to pad or
        # truncate, which it would then do in the other threads, too.
        self._thread, self._slow, self._scorer = (
            ThreadPoolExecutor(1, thread_name_prefix=f"jaxrl-{name}")
            for name in ("tokenizer", "long-texts", "scores")
        )

    async def in_thread(self, call: Callable[..., Any], *arguments: Any, size: int = 0) -> Any:
        """Run what takes long in a thread of its own, one call after the other.

        Args:
            size: bytes that are tokenised; many take seconds, in which short ones are not to wait.
        """
        thread = self._slow if size > LONG_BYTES else self._thread
        return await asyncio.get_running_loop().run_in_executor(thread, call, *arguments)

    async def in_thread_of(
        self, request: SampleRequest, call: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Run what tells of the prompts of a request, too, if it asks for that; see `in_thread`."""
        return await self.in_thread(call, *arguments, size=NAME_BYTES * request.named_tokens)

    async def read(
        self, body: Mapping[str, Any], session_name: str | None, *, chat: bool, size: int
    ) -> SampleRequest:
        """Return the checked request in a body; raises `ApiError` or `ValidationError`.

        Args:
            size: bytes of the body.
        """
        session = None if session_name is None else self.sessions.open(session_name)
        read = self.reader.chat if chat else self.reader.completion
        return await self.in_thread(read, body, session, size=size)

    async def scores(self, request: SampleRequest) -> list[PromptScores]:
        """Return how likely the model finds the prompts of a request; empty if nobody asks.

        Raises:
            ApiError: 503, the engine has no weights now.
        """
        loop, prompts = asyncio.get_running_loop(), request.prompts
        return [
            await loop.run_in_executor(self._scorer, self.guests.score, prompt)
            for prompt in (prompts if request.scores_prompts else ())
        ]

    @contextlib.asynccontextmanager
    async def running(self, request: SampleRequest) -> AsyncIterator[RunningRequest]:
        """Run the samples of a request; what is left of them at the end is cancelled.

        Raises:
            ApiError: too many wait, or the id is in use.
        """
        with contextlib.ExitStack() as closing:
            if request.turn is not None:
                closing.callback(request.turn.close)
            self._check_room(request)
            async with self._running(request) as run:
                yield run

    @contextlib.asynccontextmanager
    async def _running(self, request: SampleRequest) -> AsyncIterator[RunningRequest]:
        run = self.runs[request.request_id] = RunningRequest(request)
        self._count(request.samples)
        try:
            await self._open.wait()
            self._started.add(run)
            self._idle.clear()
            await run.start(self.submissions)
            self.measures.prompt_tokens.inc(sum(map(len, request.prompts)))
            yield run
        except asyncio.CancelledError:
            self.measures.cancelled.inc()
            raise
        finally:
            run.close()
            del self.runs[request.request_id]
            self._count(-request.samples)
            self._started.discard(run)
            if not self._started:
                self._idle.set()

    def abort(self, request_ids: list[str] | None) -> list[str]:
        """End requests with the tokens they have; None = all. Returns the ids that there were."""
        found = [i for i in (self.runs if request_ids is None else request_ids) if i in self.runs]
        for request_id in found:
            self.runs[request_id].abort()
        return found

    def close(self) -> None:
        """Free the threads of the tokenizer, and of scores."""
        self._thread.shutdown(wait=False)
        self._slow.shutdown(wait=False, cancel_futures=True)
        self._scorer.shutdown(wait=False, cancel_futures=True)

    def hold_back(self) -> None:
        """Start no more requests until `let_go`."""
        self._open.clear()

    def let_go(self) -> None:
        """Undo `hold_back`."""
        self._open.set()

    async def idle(self) -> None:
        """Wait until nothing runs."""
        await self._idle.wait()

    def _check_room(self, request: SampleRequest) -> None:
        if self.guests.version is None:
            raise ApiError(503, "the engine has no weights now; try again", retry_after=1)
        if request.request_id in self.runs:
            message = f"request_id={request.request_id!r} is in use; give another"
            raise ApiError(400, message, param="request_id")
        most = self.limits.max_samples
        if self.samples + request.samples > most:
            message = f"{self.samples} of {most} samples run or wait; try again later"
            raise ApiError(429, message, code="queue_full", retry_after=1)

    def _count(self, samples: int) -> None:
        self.samples += samples
        self.measures.samples.set(self.samples)


class Undisturbed:
    """Does one piece of work after the other, each to its end even if whoever asked for it leaves.

    A load whose client hangs up cannot be called back from its thread. Were it forgotten, the
    engine would have weights that nobody has a number for, and the next load would run beside it.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._work: asyncio.Task[Any] | None = None  # a loop does not hold on to its tasks

    async def do(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """Wait for what was asked for before, then do the work; raises what it raises."""
        await self._lock.acquire()  # who leaves while waiting has asked for nothing
        task = self._work = asyncio.create_task(work(*arguments))
        task.add_done_callback(lambda _: self._lock.release())
        return await asyncio.shield(task)

    async def finish(self) -> None:
        """Wait until nothing is done any more."""
        async with self._lock:
            pass


class Control:
    """Do what only the engine's owner may do.

    It is not there beside a training run, which owns the engine.

    Args:
        service: of the same engine.
        host: the engine.
        load: reads the parameters in a model folder, or of a version by its index.
        folder: of the weights that the engine has; None = they came from no folder.
        incoming: pulls weights from the trainer's process.
    """

    def __init__(
        self,
        service: Service,
        host: HostEngine,
        load: Callable[[Path | epath.Path], Any],
        folder: Path,
        incoming: Incoming,
    ) -> None:
        self.service, self.host, self.load, self.incoming = service, host, load, incoming
        self.folder: Path | epath.Path | None = folder
        self.version = 0
        self._weights, self._switch = Undisturbed(), Undisturbed()
        self._halted, self._pauses = False, set[object]()  # the engine; calls that wait to halt it
        self._given_up: asyncio.TimerHandle | None = None

    @property
    def paused(self) -> bool:
        """Return whether requests wait for `resume`."""
        return self._halted or bool(self._pauses)

    async def pause(self, mode: str) -> None:
        """Draw no more tokens; what runs is aborted, kept, or waited for.

        A client that leaves while it waits has not paused anything.

        Raises:
            ApiError: 409, `resume` came while it waited.
        """
        if mode not in PAUSE_MODES:
            message = f"mode={mode!r}: must be one of {', '.join(PAUSE_MODES)}"
            raise ApiError(400, message, param="mode")
        this = object()
        self._pauses.add(this)
        self.service.hold_back()
        try:
            if mode == "wait":
                await self.service.idle()
            if mode == "abort":
                self.service.abort(None)
            if this not in self._pauses:
                raise ApiError(409, "resumed while it was waited for the samples that run")
            await self._switch.do(self._halt)
        finally:
            self._pauses.discard(this)
            if not self.paused:
                self.service.let_go()

    async def resume(self) -> None:
        """Undo `pause`: let requests run again."""
        self._pauses.clear()
        await self._switch.do(self._go_on)

    async def sleep(self) -> None:
        """Free the engine's memory, and that of weights on their way; what runs is answered 503."""
        await self._weights.do(self._sleep)

    async def wake(self) -> None:
        """Undo `sleep`: read the weights again."""
        await self._weights.do(self._wake)

    async def update_weights(self, path: str, version: int | None) -> int:
        """Load new weights from a folder under the root; what runs goes on with them.

        Returns:
            Their version.

        Raises:
            ApiError: 400 or 403, the folder is not one to read, or holds another model; 502, a
                version is damaged; the engine goes on with the weights that it had.
        """
        return await self._weights.do(self._update_from, path, version)

    async def receive_weights(self, notice: Notice, peer: str | None) -> tuple[bool, str | None]:
        """Pull a group; with the last one the engine has the new weights, whatever runs goes on.

        Args:
            peer: address of who gives notice.

        Returns:
            Whether it was the last, and where others can pull it, if they shall.

        Raises:
            ApiError: 403, 400 or 502; the engine goes on with the weights that it had.
        """
        if not self.service.limits.receive_weights:
            message = "no weights are pulled here; start with serve.receive_weights=true"
            raise ApiError(403, message)
        try:
            notice.check_places(peer, self.service.limits.weight_networks)
        except NotAllowed as error:
            raise ApiError(403, str(error), param="places") from error
        last = await self._weights.do(self._receive, notice)
        return last, self.incoming.address if notice.onward else None

    async def finish(self) -> None:
        """Wait for the end of what cannot be interrupted."""
        await self._weights.finish()

    async def _halt(self) -> None:
        self._halted = True
        self.service.hold_back()
        await asyncio.to_thread(self.host.pause)

    async def _go_on(self) -> None:
        await asyncio.to_thread(self.host.resume)
        self._halted = False
        if not self.paused:
            self.service.let_go()

    async def _sleep(self) -> None:
        self._forget_incoming()
        await asyncio.to_thread(self.host.sleep)

    async def _update_from(self, path: str, version: int | None) -> int:
        folder = folder_under(self.service.limits.weights_root, path)
        return await self._update(folder, version)

    async def _wake(self) -> None:
        if self.folder is None:
            raise ApiError(409, "the weights came from no folder; send them again")
        await self._update(self.folder, self.version)

    async def _receive(self, notice: Notice) -> bool:
        self._hold_incoming()
        try:
            params = await asyncio.to_thread(self.incoming.receive, notice)
        except ValueError as error:
            raise ApiError(400, f"{notice}: {error}", param="pieces") from error
        except TransferFailed as error:
            raise ApiError(502, str(error), code="transfer_failed") from error
        if params is None:
            loop = asyncio.get_running_loop()
            self._given_up = loop.call_later(IDLE_SECONDS, self.incoming.forget)
            return False
        await asyncio.to_thread(self.host.update_weights, params, notice.version)
        self._now(None, notice.version)
        return True

    async def _update(self, folder: Path | epath.Path, version: int | None) -> int:
        number = self.version + 1 if version is None else version
        try:
            params = await asyncio.to_thread(self.load, folder)
        except (ValueError, OSError) as error:
            raise ApiError(400, f"path: {error}", param="path") from error
        except VersionDamaged as error:
            raise ApiError(502, str(error), code="version_damaged") from error
        await asyncio.to_thread(self.host.update_weights, params, number)
        self._now(folder, number)
        return number

    def _hold_incoming(self) -> None:
        if self._given_up is not None:
            self._given_up.cancel()
            self._given_up = None

    def _forget_incoming(self) -> None:
        """Forget what has come of new weights: something else was asked of the engine meanwhile."""
        self._hold_incoming()
        self.incoming.forget()

    def _now(self, folder: Path | epath.Path | None, version: int) -> None:
        self._forget_incoming()
        self.folder, self.version = folder, version
        self.service.measures.version.set(version)
