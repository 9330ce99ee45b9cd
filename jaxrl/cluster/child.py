"""Start one process of a job on this machine with its log; ask, signal and end it."""

import codecs
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxrl.cluster import guard

CHUNK = 2**18  # bytes of output read at once


class Start(NamedTuple):
    """Describe a process that a host is to start.

    Attributes:
        index: number of the process in the job.
        arguments: of this Python.
        environment: changes to that of the host; None = unset.
        log: file that gets what it prints, at its end.
        heading: line of the log before that.
        stdin: what it can read.
        folder: to work in, where the host has it; None = that of the host.
    """

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    arguments: Sequence[str]
    environment: Mapping[str, str | None]
    log: Path
    heading: str = ""
    stdin: bytes = b""
    folder: str | None = None


class Child:
    """Run a process. It and all that it starts end with this process at the latest.

    Raises:
        ValueError: the log cannot be written.
    """

    def __init__(self, start: Start) -> None:
        self.index = start.index
        self._log = _opened(start)
        self._position = self._log.seek(0, os.SEEK_END)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        changed = {k: v for k, v in start.environment.items() if v is not None}
        inherited = {k: v for k, v in os.environ.items() if k not in start.environment}
        read_end, write_end = os.pipe()
        self._lifeline = os.fdopen(write_end, "wb")
        with os.fdopen(read_end, "rb"), tempfile.TemporaryFile() as stdin:
            stdin.write(start.stdin)
            stdin.seek(0)
            guarding = [sys.executable, "-I", "-S", guard.__file__, str(read_end)]
            self._process = subprocess.Popen(
                [*guarding, sys.executable, *start.arguments],
                stdin=stdin,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**inherited, "PYTHONUNBUFFERED": "1", **changed},
                cwd=start.folder if start.folder and os.path.isdir(start.folder) else None,
                pass_fds=[read_end],
                start_new_session=True,  # Ctrl-C at the terminal is the launcher's alone
            )

    def output(self) -> str:
        """Return what the process printed since the last call."""
        data = os.pread(self._log.fileno(), CHUNK, self._position)
        self._position += len(data)
        return self._decode(data)

    def status(self) -> int | None:
        """Return the exit status, 128 + n if signal n ended the process; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """Kill the process, and what it started, and wait until they are dead."""
        self._lifeline.close()
        self._process.wait()
        self._log.close()


def _opened(start: Start) -> BinaryIO:
    try:
        start.log.parent.mkdir(parents=True, exist_ok=True)
        log = start.log.open("a+b", buffering=0)
    except OSError as error:
        raise ValueError(
            f"trainer.log_path: cannot write {start.log} on {socket.gethostname()} "
            f"({type(error).__name__}: {error}). Choose a folder that every host can write to"
        ) from error
    log.write(f"{start.heading}\n".encode())
    return log
