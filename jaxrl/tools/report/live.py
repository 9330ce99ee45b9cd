"""Serve the page of runs while they go on: the page asks for its parts, and for news.

Only names of parts are answered, no files. The runs are read again when their files have changed,
so seldom that this takes a twentieth of a core, but at least every 30 seconds.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from jaxrl.records.ledger import FILE
from jaxrl.records.run_config import CONFIG
from jaxrl.rollout.server.listening import listening
from jaxrl.tools.report import parts
from jaxrl.tools.report.blob import inert_json
from jaxrl.tools.report.find import Query, find
from jaxrl.tools.report.page import html_page
from jaxrl.tools.report.run_files import (
    METRICS,
    RunFiles,
    prompts_of_steps,
    read_run,
    run_folders,
)
from jaxrl.tools.report.selection import Selection, take
from jaxrl.tools.report.series import series
from jaxrl.tools.report.trajectories import read_step
from jaxrl.tools.report.vocabulary import Vocabulary, tokenizer_of

PORT = 7007
MOST_CONNECTIONS = 256
STEP_ROOM = 32_000_000  # bytes of the trajectories of a step at most
PAUSES = 1.0, 30.0  # seconds between two looks at the files, at least and at most
SHARE = 20  # of the time, of which reading takes one part at most
LOOPBACK = "localhost", "127.0.0.1", "::1"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_PART = re.compile(r"([mcpvt])(\d{1,4})(?:-(\d{1,12}))?")


class LiveRuns:
    """Hold runs that go on, and make the parts of their page; for one thread.

    Args:
        named: run folders, folders of runs, or patterns; runs that begin there later come too.
        tokenizer: a folder, instead of what the runs' configs name.

    Attributes:
        version: another one as soon as a part may have changed; it begins with a number of its own
            for each server, as the numbers of tokens are a server's own.
    """

    def __init__(self, named: Sequence[str | Path], tokenizer: str | None) -> None:
        self.named, self.tokenizer = named, tokenizer
        self.server, self.count = time.time_ns(), 0
        self.words: dict[int, Vocabulary] = {}
        self.runs: list[RunFiles] = []
        self.said: list[dict[str, Any]] = []  # what the page says of each
        self._made: dict[str, str] = {}  # parts of a whole run, of this version
        self._read()

    @property
    def version(self) -> str:
        """Return the version of what is held."""
        return f"{self.server}-{self.count}"

    def part(self, name: str) -> str:
        """Return a part of the page.

        Raises:
            KeyError: there is none of this name.
        """
        if name == "version":
            self._refresh()
            return self.version
        if name == "manifest":
            return parts.manifest(self.said)
        match = _PART.fullmatch(name)
        if match is None or int(match[2]) >= len(self.runs):
            raise KeyError(name)
        kind, number, rest = match[1], int(match[2]), match[3]
        run = self.runs[number]
        if rest is None:
            whole = {"m": series, "c": parts.config, "p": _prompts}
            if name not in self._made:
                self._made[name] = whole[kind](run)
            return self._made[name]
        numbered = {"v": self._vocabulary, "t": self._trajectories}
        return numbered[kind](number, int(rest))

    def found(self, number: int, query: Query, start: int) -> dict[str, Any]:
        """Search some steps of a run from step `start` on; see `find`."""
        return find(self.runs[number], query, self._words(number), start)

    def _words(self, number: int) -> Vocabulary:
        if number not in self.words:
            self.words[number] = Vocabulary(tokenizer_of(self.runs[number], self.tokenizer))
        return self.words[number]

    def _vocabulary(self, number: int, start: int) -> str:
        return parts.vocabulary(self._words(number), start)

    def _trajectories(self, number: int, step: int) -> str:
        run, found = self.runs[number], Selection(self._words(number))
        if step not in run.rollouts:
            raise KeyError(step)
        rows = read_step(run, step)
        if rows is None:
            return parts.trajectories([], 0)
        take(run, rows, step, found, STEP_ROOM)
        return parts.trajectories(found.blobs.get(step, []), len(rows.groups))

    def _refresh(self) -> None:
        if time.monotonic() < self._again:
            return
        if self._signature() == self._seen:
            self._again = time.monotonic() + PAUSES[0]
            return
        self._read()

    def _read(self) -> None:
        began, self._seen = time.thread_time(), self._signature()
        held = {run.folder: (run, said) for run, said in zip(self.runs, self.said, strict=True)}
        found = dict(held)
        for folder in self._seen:
            try:
                run = read_run(folder)
                found[folder] = run, parts.about(run)
            except Exception:  # moved away, or damaged: what was read stays
                if not held:
                    raise  # at the start
                continue
            if folder in held:
                run.data_rows = held[folder][0].data_rows  # the data do not change
        self.runs, self.said = [run for run, _ in found.values()], [x for _, x in found.values()]
        self._made.clear()
        self.count += 1
        least, most = PAUSES
        pause = max(least, min(most, SHARE * (time.thread_time() - began)))
        self._again = time.monotonic() + pause

    def _folders(self) -> list[Path]:
        """Return the folders of the runs; a run keeps its number, so new ones come last."""
        held = [run.folder for run in self.runs]
        try:
            return list(dict.fromkeys([*held, *run_folders(self.named)]))
        except (ValueError, OSError):  # all of a pattern, or a folder of runs, are gone
            if not held:
                raise
            return held

    def _signature(self) -> dict[Path, list[tuple[int, int]]]:
        found: dict[Path, list[tuple[int, int]]] = {}
        for folder in self._folders():
            found[folder] = []
            for name in (METRICS, FILE, f"{FILE}-wal", CONFIG):
                with contextlib.suppress(OSError):
                    about = (folder / name).stat()
                    found[folder].append((about.st_size, about.st_mtime_ns))
        return found


def _prompts(run: RunFiles) -> str:
    return inert_json(run.note_of("prompts of the steps", lambda: prompts_of_steps(run), {}))


def serve(
    named: Sequence[str | Path],
    *,
    host: str = LOOPBACK[1],
    port: int | None = None,
    tokenizer: str | None = None,
) -> None:
    """Serve the page of runs until Ctrl-C.

    Args:
        named: run folders, folders of runs, or patterns.
        host: the address to listen at; beside the loopback ones anybody who reaches it may read.
        port: 0 = any free one; None = `PORT`, or any free one where that is taken.

    Raises:
        ValueError, OSError: a folder is no run folder, or the address cannot be had.
    """
    runs = LiveRuns(named, tokenizer)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(runs, host, port))


async def _serve(runs: LiveRuns, host: str, port: int | None) -> None:
    async with contextlib.AsyncExitStack() as stack:

        async def listen(port: int) -> int:
            page = listening(app(runs, guarded=host in LOOPBACK), host, port, most=MOST_CONNECTIONS)
            return (await stack.enter_async_context(page))[1]

        try:
            port = await listen(PORT if port is None else port)
        except OSError as error:
            if port is not None:
                raise ValueError(
                    f"--host={host} --port={port} cannot be had ({error.strerror}): give another "
                    "--port, or 0 for any free one"
                ) from error
            port = await listen(0)
        named = f"[{host}]" if ":" in host else host
        names = ", ".join(run.name for run in runs.runs)
        print(f"http://{named}:{port}/ shows {names}; Ctrl-C ends it", flush=True)
        if host not in LOOPBACK:
            print(f"open to everyone who reaches {host}: there is no password", flush=True)
        await asyncio.Event().wait()


def app(runs: LiveRuns, *, guarded: bool) -> web.Application:
    """Return the application.

    Args:
        guarded: refuse requests that name this machine otherwise than by a loopback name: a page
            of elsewhere whose name was bound to the loopback address (DNS rebinding) then cannot
            read the runs.
    """
    thread = ThreadPoolExecutor(1)  # what is held is for one thread
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

    async def done(action: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(thread, action)

    async def page(request: web.Request) -> web.Response:
        text = await done(lambda: html_page(runs.runs, {}, connect="'self'"))
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def part(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        try:
            text = await done(lambda: runs.part(name))
        except KeyError:
            raise web.HTTPNotFound(text=f"no part {name!r}") from None
        return web.Response(text=text, headers=headers)

    async def search(request: web.Request) -> web.Response:
        try:
            number, start = int(request.query["run"]), int(request.query["from"])
            query = Query.of(request.query)
            found = await done(lambda: runs.found(number, query, start))
        except (KeyError, ValueError, IndexError) as error:
            raise web.HTTPBadRequest(text=f"not a search ({error})") from None
        return web.Response(text=inert_json(found), headers=headers)

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        name = re.sub(r":\d*$", "", request.host).strip("[]")
        if guarded and name not in LOOPBACK:
            raise web.HTTPForbidden(text="this page answers at localhost only; see --host")
        return await handler(request)

    made = web.Application(middlewares=[guard])
    made.router.add_get("/", page)
    made.router.add_get("/part/{name}", part)
    made.router.add_get("/find", search)
    return made
