"""A server in a process of its own: started, watched, and ended with this one."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxrl.files import writing
from jaxrl.rollout.remote.http_client import ServerError

LOOPBACK = "127.0.0.1"
TAIL_LINES = 30
POLL_SECONDS, STOP_SECONDS = 0.5, 15.0


class ServerStarter(Protocol):
    """Describe what starts a server, and starts it again.

    Examples: `vllm.VllmServer` and `worker.OwnServer`.
    """

    @property
    def url(self) -> str:
        """Return where the server runs: another address, perhaps, once it was started again."""
        ...

    async def ensure(self, folder: Any) -> bool:
        """Have the server run; return True if it had to be started.

        Args:
            folder: of the weights to start it with; None = those that it begins with by itself.
        """
        ...

    def stop(self) -> None:
        """End the server."""
        ...


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


class ServerProcess:
    """Hold the process of a server; a part of what starts one.

    Attributes:
        kind: of the server, for errors.
        log: file that gets what it prints.
        start_seconds: until it must answer.
    """

    kind: str
    log: Path
    start_seconds: float
    _process: "subprocess.Popen[bytes] | None" = None

    @property
    def runs(self) -> bool:
        """Return whether the process is there."""
        return self._process is not None and self._process.poll() is None

    async def _start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        answers: Callable[[], Awaitable[bool]],
    ) -> None:
        """Start the server and wait until it answers.

        Its standard input stays open for as long as this process lives, and no longer.

        Raises:
            ServerError: it ended, or does not answer; with the end of its log.
            FolderError: its log cannot be written.
        """
        if not hasattr(os, "killpg"):
            raise ServerError(
                f"a run starts servers on Linux and macOS only, for their process groups; this is "
                f"{sys.platform}: start the server yourself, and name it in "
                "generator.inference_engine.remote_urls",
                retryable=False,
            )
        self.stop()  # what it started may have outlived it
        with writing(self.log):
            self.log.parent.mkdir(parents=True, exist_ok=True)
            log = self.log.open("ab")
        with log:
            self._process = process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,  # it has processes of its own: they end together
            )
        deadline = time.monotonic() + self.start_seconds
        while not await answers():
            status = process.poll()
            if status is not None:
                raise self._failure(f"ended with status {status}")
            if time.monotonic() > deadline:
                self.stop()
                raise self._failure(f"did not answer within {self.start_seconds:g} s")
            await asyncio.sleep(POLL_SECONDS)

    def _failure(self, what: str) -> ServerError:
        tail = self.log.read_text(errors="replace", encoding="utf-8").splitlines()[-TAIL_LINES:]
        command = " ".join(self._process.args) if self._process else ""  # type: ignore[arg-type]
        text = "\n".join(tail)
        return ServerError(
            f"the {self.kind} server `{command}` {what}. The end of its log {self.log}:\n{text}",
            retryable=False,
        )

    def stop(self) -> None:
        """End the server, and the processes that it started."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, kind)
                process.wait(STOP_SECONDS)
            except (ProcessLookupError, PermissionError):  # none is left
                return
            except subprocess.TimeoutExpired:
                continue
