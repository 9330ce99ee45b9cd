"""Requests for samples, within limits; pausing, and new weights."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxrl.config import ServeConfig
from jaxrl.rollout.incoming_weights import Incoming, NotAllowed, Notice, TransferFailed
from jaxrl.rollout.submissions import Submissions
from jaxrl.serving.errors import ApiError
from jaxrl.serving.prometheus import Measures
from jaxrl.serving.requests import Ask, AskReader, ServedModel
from jaxrl.serving.runs import Run
from jaxrl.serving.sessions import Sessions
from jaxrl.serving.shared_engine import Guests, HostEngine
from jaxrl.serving.weights import folder_under

IDLE_SECONDS = 120.0  # between two groups of weights; then who sent the first has given up
PAUSE_MODES = ("abort", "keep", "wait")


class Service:
    """What the routes of the server call; belongs to one loop.

    Args:
        guests: the engine.
        served: its model.
        limits: of requests.
        sessions: conversations that are kept.
    """

    def __init__(
        self, guests: Guests, served: ServedModel, limits: ServeConfig, sessions: Sessions
    ) -> None:
        self.guests, self.served, self.limits, self.sessions = guests, served, limits, sessions
        self.reader, self.measures = AskReader(served, limits), Measures()
        self.submissions = Submissions(guests)
        self.runs: dict[str, Run] = {}
        self._started: set[Run] = set()
        self.samples = 0  # that run or wait
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        # Tokenizers may not be used by several threads at a time, and take long for long texts.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxrl-tokenizer")

    async def in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What tokenises runs in a thread of its own, one call after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    async def read(self, body: Mapping[str, Any], session_name: str | None, *, chat: bool) -> Ask:
        """The checked request in a body; raises `ApiError`."""
        session = None if session_name is None else self.sessions.open(session_name)
        read = self.reader.chat if chat else self.reader.completion
        return await self.in_thread(read, body, session)

    @contextlib.asynccontextmanager
    async def running(self, ask: Ask) -> AsyncIterator[Run]:
        """The samples of a request; what is left of them at the end is cancelled.

        Raises:
            ApiError: too many wait, or the id is in use.
        """
        self._check_room(ask)
        run = self.runs[ask.request_id] = Run(ask)
        self._count(ask.samples)
        try:
            await self._open.wait()
            self._started.add(run)
            self._idle.clear()
            await run.start(self.submissions)
            self.measures.prompt_tokens.inc(sum(map(len, ask.prompts)))
            yield run
        except asyncio.CancelledError:
            self.measures.cancelled.inc()
            raise
        finally:
            run.close()
            del self.runs[ask.request_id]
            self._count(-ask.samples)
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
        """Free the thread."""
        self._thread.shutdown(wait=False)

    def hold_back(self) -> None:
        """Start no more requests until `let_go`."""
        self._open.clear()

    def let_go(self) -> None:
        """Undo `hold_back`."""
        self._open.set()

    async def idle(self) -> None:
        """Wait until nothing runs."""
        await self._idle.wait()

    def _check_room(self, ask: Ask) -> None:
        if self.guests.version is None:
            raise ApiError(503, "the engine has no weights now; try again", retry_after=1)
        if ask.request_id in self.runs:
            message = f"request_id={ask.request_id!r} is in use; give another"
            raise ApiError(400, message, param="request_id")
        most = self.limits.max_samples
        if self.samples + ask.samples > most:
            message = f"{self.samples} of {most} samples run or wait; try again later"
            raise ApiError(429, message, code="queue_full", retry_after=1)

    def _count(self, samples: int) -> None:
        self.samples += samples
        self.measures.samples.set(self.samples)


class Control:
    """What only the engine's owner may do; not there beside a training run, which owns it.

    Args:
        service: of the same engine.
        host: the engine.
        load: reads the parameters in a model folder.
        folder: of the weights that the engine has; None = they came from no folder.
        incoming: pulls weights from the trainer's process.
    """

    def __init__(
        self,
        service: Service,
        host: HostEngine,
        load: Callable[[Path], Any],
        folder: Path,
        incoming: Incoming,
    ) -> None:
        self.service, self.host, self.load, self.incoming = service, host, load, incoming
        self.folder: Path | None = folder
        self.version, self.paused = 0, False
        self._alone = asyncio.Lock()
        self._given_up: asyncio.TimerHandle | None = None

    async def pause(self, mode: str) -> None:
        """Draw no more tokens; what runs is aborted, kept, or waited for."""
        if mode not in PAUSE_MODES:
            message = f"mode={mode!r}: must be one of {', '.join(PAUSE_MODES)}"
            raise ApiError(400, message, param="mode")
        self.paused = True
        self.service.hold_back()
        if mode == "wait":
            await self.service.idle()
        if mode == "abort":
            self.service.abort(None)
        await asyncio.to_thread(self.host.pause)

    async def resume(self) -> None:
        """Undo `pause`."""
        await asyncio.to_thread(self.host.resume)
        self.paused = False
        self.service.let_go()

    async def sleep(self) -> None:
        """Free the engine's memory, and that of weights on their way; what runs is answered 503."""
        async with self._alone:
            self._forget_incoming()
            await asyncio.to_thread(self.host.sleep)

    async def wake(self) -> None:
        """Undo `sleep`: read the weights again."""
        async with self._alone:
            if self.folder is None:
                raise ApiError(409, "the weights came from no folder; send them again")
            await self._update(self.folder, self.version)

    async def update_weights(self, path: str, version: int | None) -> int:
        """New weights from a folder under the root; what runs goes on with them.

        Returns:
            Their version.

        Raises:
            ApiError: 400 or 403, the folder is not one to read, or holds another model.
        """
        async with self._alone:
            folder = folder_under(self.service.limits.weights_root, path)
            number = self.version + 1 if version is None else version
            await self._update(folder, number)
            return number

    async def receive_weights(self, notice: Notice, peer: str | None) -> bool:
        """Pull a group; with the last one the engine has the new weights, whatever runs goes on.

        Args:
            peer: address of who gives notice.

        Returns:
            Whether it was the last.

        Raises:
            ApiError: 403, 400 or 502; the engine goes on with the weights that it had.
        """
        if not self.service.limits.receive_weights:
            message = "no weights are pulled here; start with serve.receive_weights=true"
            raise ApiError(403, message)
        try:
            notice.check_sender(peer)
        except NotAllowed as error:
            raise ApiError(403, str(error), param="address") from error
        async with self._alone:
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

    async def _update(self, folder: Path, version: int) -> None:
        try:
            params = await asyncio.to_thread(self.load, folder)
        except (ValueError, OSError) as error:
            raise ApiError(400, f"path: {error}", param="path") from error
        await asyncio.to_thread(self.host.update_weights, params, version)
        self._now(folder, version)

    def _hold_incoming(self) -> None:
        if self._given_up is not None:
            self._given_up.cancel()
            self._given_up = None

    def _forget_incoming(self) -> None:
        """What has come before anything else was asked of the engine is not what it shall have."""
        self._hold_incoming()
        self.incoming.forget()

    def _now(self, folder: Path | None, version: int) -> None:
        self._forget_incoming()
        self.folder, self.version = folder, version
        self.service.measures.version.set(version)
