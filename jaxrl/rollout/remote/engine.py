"""An engine whose samples come over HTTP: from vLLM, or from jaxrl's own server.

One event loop in a daemon thread serves everything. A request is one call that carries all its
samples, to the server with the fewest samples in flight, or to the one that served the conversation
so far. A call that fails is made again, perhaps elsewhere; samples are handed over only from a
whole answer, so each is delivered once. Every server has a keeper: a coroutine that looks whether
it lives, and gives it the newest weights, verified by a probe, before it is asked for samples.
"""

import asyncio
import atexit
import contextlib
import logging
import random
import secrets
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxrl.models.transformer import Params
from jaxrl.rollout.protocol import Completion, Request
from jaxrl.rollout.remote.dialects import DIALECTS
from jaxrl.rollout.remote.http_client import (
    NOT_FOUND,
    RemoteOptions,
    RemoteServer,
    ServerError,
    open_session,
)
from jaxrl.rollout.remote.probe import Probe, WeightMismatch
from jaxrl.rollout.remote.routes import ConversationRoutes
from jaxrl.rollout.remote.server_process import ServerStarter
from jaxrl.rollout.weights.source import Source, Weights

_log = logging.getLogger(__name__)
T = TypeVar("T")
LONGEST_WAIT = 30.0  # seconds between two tries, unless the server asks for more


class RemoteEngineError(RuntimeError):
    """Signal that servers did not do what was asked, however often.

    The message names server, request and last cause.
    """


@dataclass
class PendingRequest:
    """Hold a request, and who waits for its samples."""

    request: Request
    futures: list[Future[Completion]]

    def deliver(self, outcome: list[Completion] | BaseException) -> None:
        """Give the outcome to whoever still waits."""
        for number, future in enumerate(self.futures):
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome[number])


class RemoteEngine:
    """Sample from HTTP servers; an `Engine`.

    Args:
        urls: of the servers, e.g. ["http://10.0.0.2:8000"].
        dialect: a key of `dialects.DIALECTS`.
        weights: how new weights come to them; None = they keep those that they have.
        probe: asked of every server after every update; None = servers are trusted.
        hosts: what starts each of the servers; none = they run already.
        proxy_url: of a router before them, which then chooses who samples.
        options: timeouts and retries.

    Raises:
        ValueError: no servers, or an unknown dialect.
        ConnectionError: a server that keeps its weights is not there, or has none.
    """

    def __init__(
        self,
        urls: Sequence[str],
        dialect: str,
        *,
        weights: Source | None,
        probe: Probe | None,
        hosts: Sequence[ServerStarter] = (),
        proxy_url: str | None = None,
        options: RemoteOptions | None = None,
    ) -> None:
        if not urls or dialect not in DIALECTS:
            raise ValueError(f"urls={list(urls)} and dialect={dialect!r} ({', '.join(DIALECTS)})")
        self.options = options or RemoteOptions()
        self.dialect, self.source, self.probe = DIALECTS[dialect], weights, probe
        self.servers = [RemoteServer(url, self.dialect, self.options, proxy_url) for url in urls]
        self.hosts = dict(zip(self.servers, hosts, strict=True)) if hosts else {}
        self._label = secrets.token_hex(4)  # vLLM's cache knows an adapter by name and folder
        self._weights: Weights | None = None
        self._failure: BaseException | None = None
        self._routes = ConversationRoutes()
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()  # a server got ready, or none ever will
        self._tasks: set[asyncio.Task[Any]] = set()
        threading.Thread(target=self._run, name="jaxrl-remote-engine", daemon=True).start()
        self._call(self._open())
        atexit.register(self.close)
        if self.source is None:
            try:
                self._call(self._attach())
            except ConnectionError:
                self.close()
                raise

    # ---- the loop's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _open(self) -> None:
        self._session = open_session(self.options.token)
        for server in self.servers:
            server.session = self._session
            self._spawn(self._keep(server))

    def close(self) -> None:
        """End requests, servers that were started here, and the thread; the engine is used up."""
        atexit.unregister(self.close)
        if self._loop.is_running():
            self._call(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
        for host in self.hosts.values():
            host.stop()

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    # ---- requests

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """Queue requests; see `protocol.Engine`. The samples of a request come all at once.

        Raises:
            ValueError: a request that can never be served, or settings that the servers' protocol
                cannot express.
            RuntimeError: no weights yet.
        """
        for request in requests:
            request.check(self.options.max_model_len, True)
            self.dialect.check(request.sampling)
        if self._weights is None:
            raise RuntimeError("the engine has no weights: call update_weights first")
        jobs = [PendingRequest(request, [Future() for _ in request.keys]) for request in requests]
        self._loop.call_soon_threadsafe(self._begin, [job for job in jobs if job.futures])
        return [job.futures for job in jobs]

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Return the samples of each request, in order.

        Raises what `submit` raises, and what befell.
        """
        return [[future.result() for future in group] for group in self.submit(requests)]

    def _begin(self, jobs: Sequence[PendingRequest]) -> None:
        for job in jobs:
            task = self._spawn(self._serve(job))
            for future in job.futures:
                future.add_done_callback(lambda _, job=job, task=task: self._left(job, task))

    def _left(self, job: PendingRequest, task: asyncio.Task[Any]) -> None:
        """Give up the call of a future that is done if nobody waits for the call any more."""
        if all(future.cancelled() for future in job.futures):
            self._loop.call_soon_threadsafe(task.cancel)

    async def _serve(self, job: PendingRequest) -> None:
        try:
            job.deliver(await self._complete(job.request))
        except asyncio.CancelledError:
            job.deliver(RemoteEngineError("the engine was closed"))
            raise
        except Exception as error:
            job.deliver(error)

    async def _complete(self, request: Request) -> list[Completion]:
        """Return the samples of a request, from whichever server has them to give."""
        failed, last, tries, name = None, None, 0, _describe(request)
        deadline = self._loop.time() + self.options.timeout_seconds
        while tries < self.options.attempts:
            server = await self._choose(request, failed)
            try:
                return await self._attempt(server, request)
            except ServerError as error:
                failed, last = server, error
                if not error.retryable:
                    raise RemoteEngineError(f"{server.url} refuses {name}: {error}") from error
                if error.broken:
                    self._suspect(server, error)
                crowded = bool(error.wait) and self._loop.time() < deadline
                tries += not crowded
                _log.info("%s: attempt %d of %s failed: %s", server.url, tries, name, error)
                await asyncio.sleep(self._pause(tries, error))
        url = failed.url if failed else ""
        raise RemoteEngineError(f"{url}: {tries} attempts at {name} failed; the last: {last}")

    def _suspect(self, server: RemoteServer, error: ServerError) -> None:
        """Leave out a server that failed, and have it looked at.

        Where one behind a router lacks an adapter it is not known which: then all are left out.
        """
        anyone = error.status == NOT_FOUND and server.samples_url != server.url
        for one in self.servers if anyone else [server]:
            self._leave_out(one, error)
            one.doubt.set()

    def _pause(self, tries: int, error: ServerError) -> float:
        """Return the seconds before the next attempt."""
        doubled = self.options.backoff_seconds * 2 ** max(tries - 1, 0)
        return max(error.wait, min(doubled, LONGEST_WAIT)) * random.uniform(0.5, 1.5)

    async def _choose(self, request: Request, failed: RemoteServer | None) -> RemoteServer:
        """Choose the conversation's server so far, else that with the fewest samples in flight."""
        ready = await self._wait_for_servers()
        others = [server for server in ready if server is not failed] or ready
        known = self._routes.find(request.prompt_tokens)
        chosen = min(others, key=lambda s: (s is not known, s.in_flight))
        self._routes.add(request.prompt_tokens, chosen)
        return chosen

    def _ready(self) -> list[RemoteServer]:
        return [server for server in self.servers if server.ready]

    async def _wait_for_servers(self) -> list[RemoteServer]:
        """Return the servers that are ready, as soon as there is one."""
        try:
            async with asyncio.timeout(self.options.recovery_seconds):
                while self._failure is None and not self._ready():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            causes = "; ".join(f"{server.url}: {server.cause}" for server in self.servers)
            raise RemoteEngineError(
                f"no server was ready for {self.options.recovery_seconds:g} s: {causes}"
            ) from error
        if self._failure is not None:
            raise self._failure
        return self._ready()

    async def _attempt(self, server: RemoteServer, request: Request) -> list[Completion]:
        """Make one call, which ends when the server is given up."""
        call = self._loop.create_task(server.complete(request))
        server.calls[call] = server.version
        server.in_flight += len(request.keys)
        try:
            return await call
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ServerError(f"given up: {server.cause}") from error
        finally:
            server.in_flight -= len(request.keys)
            del server.calls[call]

    # ---- weights

    def update_weights(self, params: Params, version: int) -> None:
        """Have every server take the parameters, and see that it has.

        Samples in flight go on with them. A server that is dead meanwhile gets them when it is
        back; if none is alive this waits for one.

        Raises:
            WeightMismatch: a server answers the probe otherwise than the trainer.
            RemoteEngineError: no server took them.
            RuntimeError: these servers keep their own weights.
        """
        if self.source is None:
            raise RuntimeError("these servers keep their own weights")
        with self.phase():
            published = self.source.publish(params, version)
            self._call(self._update(Weights(published, version, params)))
        self.source.keep_only(version, *self._versions_in_use())

    def phase(self) -> AbstractContextManager[bool]:
        """Let other processes of the trainer bring weights to servers while the block runs."""
        return contextlib.nullcontext(True) if self.source is None else self.source.phase()

    def _versions_in_use(self) -> set[int | None]:
        """Return the versions of adapters that servers may still read.

        vLLM puts them aside when it has too many, and may read them again.
        """
        if not self.dialect.adapters:
            return set()
        asked = {version for server in self.servers for version in list(server.calls.values())}
        return asked | {server.version for server in self.servers}

    async def _update(self, weights: Weights) -> None:
        self._weights, self._failure = weights, None
        self._routes = (
            ConversationRoutes()
        )  # new weights, no more old keys and values to go back to
        awaited = self._awaited(weights)
        outcomes = await asyncio.gather(*(self._bring(server) for server in awaited))
        for server, error in zip(awaited, outcomes, strict=True):
            if isinstance(error, WeightMismatch):
                raise error
            if error is not None and not error.retryable:
                message = f"{server.url} does not take the weights of {weights.source}: {error}"
                raise RemoteEngineError(message) from error
        await self._wait_for_servers()
        async with weights.lock:  # the caller may donate them once this returns
            weights.params = None

    def _awaited(self, weights: Weights) -> list[RemoteServer]:
        """Return the servers that have the weights when an update ends.

        A server that is out of use while others are not gets them of its keeper: it may take long
        to start. But where it is started from a folder, which goes with the next update.
        """
        assert self.source is not None
        ready = self._ready()
        if not ready or self.source.start(weights.source) is not None:
            return self.servers
        for server in self.servers:
            if not server.ready:
                server.doubt.set()
        return ready

    async def _keep(self, server: RemoteServer) -> None:
        """Look at a server for as long as the engine lives, and mend what can be mended."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.doubt.wait(), self.options.poll_seconds)
            server.doubt.clear()
            if self._weights is None:
                continue
            try:
                error = await self._bring(server)
            except Exception as unexpected:  # without its keeper it would never come back
                _log.exception("%s: looking after it failed; it is tried again", server.url)
                self._leave_out(server, unexpected)
                continue
            if isinstance(error, WeightMismatch):  # nobody may sample; whoever waits must know
                self._failure = error
                self._news.set()

    async def _bring(self, server: RemoteServer) -> ServerError | WeightMismatch | None:
        """See that a server lives and has the newest weights; return the reason if it has not."""
        async with server.lock:
            weights = None
            try:
                while weights is not self._weights:  # others may have come meanwhile
                    weights = self._weights
                    await self._refresh(server)
            except (ServerError, WeightMismatch) as error:
                self._leave_out(server, error)
                for call in list(server.calls):
                    call.cancel()
                return error
        server.ready = True
        self._news.set()
        return None

    async def _attach(self) -> None:
        """Find out whether servers that keep their weights are there, and have some."""
        self._weights = Weights(Path(), -1, None)  # theirs: the folder is never read
        outcomes = await asyncio.gather(*(self._bring(server) for server in self.servers))
        for server, error in zip(self.servers, outcomes, strict=True):
            if error is not None:
                raise ConnectionError(
                    f"{server.url} does not answer as a {self.dialect.name} server: {error}. See "
                    "that it runs at this address, and that its kind is "
                    "generator.inference_engine.backend"
                ) from error

    async def _refresh(self, server: RemoteServer) -> None:
        """Have a server run and hold the newest weights; one that keeps its own must have some."""
        if self.source is None:
            server.version = await server.look()
            if self.dialect.says_versions and server.version is None:
                raise ServerError("it has no weights yet")
            return
        weights = self._weights
        assert weights is not None  # nobody is brought to none
        host, first = self.hosts.get(server), self.source.start(weights.source)
        started = False
        if host is not None:
            started = await host.ensure(first)
            server.move(host.url)
        reported = await server.look()
        if started:
            server.version, server.ready = None, False
        elif server.ready and reported == server.version == weights.version:
            return
        if not started or first != weights.source:
            name = f"version-{weights.version}-{self._label}"
            await self.source.give(server, weights.source, weights.version, name)
        server.version = weights.version
        await self._verify(server, weights)

    async def _verify(self, server: RemoteServer, weights: Weights) -> None:
        """Compare what a server says to the probe with what the trainer thinks of it.

        Its tokens are scored while the trainer's parameters are there; a server that comes back
        later is held against what was scored then.
        """
        if self.probe is None:
            return
        (completion,) = await server.complete(self.probe.request, server.url)  # past a router
        async with weights.lock:
            same = [e for e in weights.expected if e.tokens == completion.tokens]
            if not same and weights.params is not None:
                same = [await asyncio.to_thread(self.probe.expect, weights.params, completion)]
                weights.expected += same
        expected = (same or weights.expected)[0]
        difference = self.probe.check(server.url, weights.version, completion, expected)
        _log.info("%s has version %d, probe %.2g", server.url, weights.version, difference)

    def _leave_out(self, server: RemoteServer, error: Exception) -> None:
        """Ask a server for nothing until its keeper has seen to it."""
        if server.ready or str(error) != server.cause:
            _log.warning("%s is left out: %s", server.url, error)
        server.ready, server.cause = False, str(error)

    # ---- what the trainer asks of every engine

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Do nothing: servers compile by themselves."""

    def describe(self) -> str:
        """Name the servers and their versions."""
        held = ", ".join(f"{server.url} version {server.version}" for server in self.servers)
        return f"{len(self.servers)} {self.dialect.name} servers: {held}"

    def sleep(self) -> None:
        """Let go of what is held for servers that come back; their memory is their own."""
        if self.source is not None:
            self.source.release()

    def wake(self) -> None:
        """Do nothing: `update_weights` brings back what `sleep` let go."""


def _describe(request: Request) -> str:
    """Describe a request as error messages call it."""
    return (
        f"a request of {len(request.keys)} samples of at most {request.sampling.max_tokens} tokens "
        f"for a prompt of {len(request.prompt_tokens)} tokens {list(request.prompt_tokens[:8])}..."
    )
