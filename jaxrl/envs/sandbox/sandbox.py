"""Run Python that nobody trusts, on Linux: no network, no files but its own, bounded, killed.

What holds the code is in `jail.py`: namespaces, an unprivileged user, resource limits, a seccomp
filter, and a file system in memory. Where the machine does not allow one of these, nothing runs:
`require` says what is missing.
"""

import functools
import json
import os
import platform
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxrl.envs.sandbox.seccomp import CALLS, filter_lines

_JAIL = Path(__file__).with_name("jail.py")
_START_SECONDS = 30.0  # for the jail itself, on a busy machine
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
# Not /dev/zero: a shared mapping of it is memory that no process and no folder holds.
_DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")
_HOMES = ("/tmp", "/sandbox")  # the empty folder of a run: the first in which no package lies
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same rewards every time
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_SEE_AND_REACH = """
import os, socket
print(os.getuid() not in (0, {uid}) or {uid} != 0, os.path.exists({here!r}), os.listdir())
seen = [folder for folder in {packages!r} if os.access(folder, os.R_OK | os.X_OK)]
print(len(seen), "of", len({packages!r}), "folders of packages")
try:
    socket.socket(socket.AF_INET)
    print("network")
except OSError:
    print("no network")
"""


class SandboxError(RuntimeError):
    """Signals that this machine cannot hold the code; nothing of it was run."""


@dataclass(frozen=True)
class Limits:
    """Describes what one run may use."""

    seconds: float = 10.0
    """Until it is killed, by the clock."""
    cpu_seconds: float = 10.0
    """Processor time that all its processes may use together."""
    memory_mb: int = 1024
    """Address space of a process, and memory of all of them together with their files."""
    disk_mb: int = 64
    """All files together; they lie in memory and count in `memory_mb`."""
    files: int = 1024
    """Files and folders at a time."""
    processes: int = 32
    """Processes and threads at a time."""
    output_bytes: int = 1 << 20
    """Bytes that stdout and stderr may each have; the rest is cut and the program killed."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not value > 0:
                raise ValueError(f"sandbox limit {name} must be > 0, got {value!r}")


@dataclass(frozen=True)
class Result:
    """Describes how a run ended."""

    reason: str
    """"ok"; "error": an exception or another exit code than 0; or what ended it: "timeout",
    "memory", "output", "killed" (by a signal)."""
    stdout: str
    stderr: str
    exit_code: int
    """Status as `subprocess` gives it: minus the signal that ended the program."""
    seconds: float
    """By the clock, without making the sandbox."""
    peak_mb: float
    """Largest memory that was seen; short peaks are missed."""

    @property
    def ok(self) -> bool:
        """Return whether the program ended by itself with exit code 0, within its limits."""
        return self.reason == "ok"


def run(code: str, stdin: str = "", limits: Limits = Limits()) -> Result:
    """Run a program as `__main__`, in an empty folder.

    Args:
        code: Python source, for the Python of this process with its installed packages.
        stdin: what the program reads.
        limits: what it may use.

    Raises:
        SandboxError: the machine cannot hold it.
    """
    [result] = run_each(code, [stdin], limits)
    return result


def run_each(
    code: str, stdins: Sequence[str], limits: Limits = Limits()
) -> Generator[Result, None, None]:
    """Run a program once for every input, one after the other, in one sandbox.

    Each run has an empty folder, and starts when the one before is over with all its processes. An
    iterator that is closed early ends the sandbox. A program that has the sandbox itself killed
    was "killed", and that result is the last.

    Raises:
        SandboxError: the machine cannot hold it.
    """
    request = _request(code, stdins, limits)
    command = [sys._base_executable, "-I", "-S", "-B", str(_JAIL)]  # type: ignore[attr-defined]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env={}, start_new_session=True
    ) as child:
        # The jail keeps the limits itself; this is for a machine on which it hangs.
        most = _START_SECONDS + len(stdins) * (limits.seconds + 1)
        clock = threading.Timer(most, child.kill)
        clock.daemon = True
        clock.start()
        try:
            yield from _converse(child, request)
            child.wait()
        finally:
            clock.cancel()
            child.kill()  # process 1 of the sandbox dies with it, and the rest with process 1


def _converse(child: subprocess.Popen[bytes], request: dict[str, Any]) -> Iterator[Result]:
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    with child.stdin:
        child.stdin.write(json.dumps(request).encode())
    begun, running, missing = None, False, len(request["stdins"])
    wrong = "killed"
    for line in child.stdout:
        if not line.endswith(b"\n"):
            break  # it was killed while it spoke
        report = json.loads(line)
        if "begun" in report:
            begun, running = time.monotonic(), True
        elif running and "refused" in report:
            wrong = report["refused"]
            break
        else:
            yield _read_result(report)
            running, missing = False, missing - 1
    if missing:
        wrong = child.stderr.read().decode(errors="replace")[-2000:] or wrong
        if begun is None:
            raise SandboxError(f"the sandbox ended without a result: {wrong}")
        # The program's doing, as far as anyone can tell: it must not be a way out of its reward.
        yield Result("killed", "", wrong, -signal.SIGKILL, time.monotonic() - begun, 0.0)


@functools.cache
def require() -> None:
    """Make sure, once per process, that sandboxes work here.

    Raises:
        SandboxError: they do not; says what the machine does not allow.
    """
    _require_linux()
    packages = [folder for folder in _packages() if os.path.isdir(folder)]
    result = run(_SEE_AND_REACH.format(here=str(_JAIL), uid=os.getuid(), packages=packages))
    count = len(packages)
    wanted = f"True False ['main.py']\n{count} of {count} folders of packages\nno network\n"
    if not result.ok or result.stdout != wanted:
        raise SandboxError(
            f"the sandbox does not hold: expected {wanted!r}, got {result.stdout!r} "
            f"({result.reason}) {result.stderr[-500:]}"
        )


def _require_linux() -> None:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in CALLS:
        here = f"this is {sys.platform} on {machine}"
        raise SandboxError(f"the sandbox needs Linux on one of {', '.join(CALLS)}; {here}")


def _request(code: str, stdins: Sequence[str], limits: Limits) -> dict[str, Any]:
    _require_linux()
    machine = platform.machine()
    packages = _packages()
    python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    paths = _outermost([sys.base_prefix, python, *packages, *_LIBRARIES, *_DEVICES])
    free = [h for h in _HOMES if all(Path(h) not in (Path(p), *Path(p).parents) for p in paths)]
    if not free:
        raise SandboxError(f"the sandbox needs one of {', '.join(_HOMES)} without packages")
    return asdict(limits) | {
        "parent": os.getpid(),
        "code": code,
        "stdins": list(stdins),
        "filter": filter_lines(machine),
        "pivot_root": CALLS[machine]["pivot_root"],
        "paths": paths,
        "home": free[0],
        "python": python,
        "arguments": [python, "-s", "-B", "main.py"],
        "environment": {"PYTHONPATH": ":".join(packages), "HOME": free[0], "TMPDIR": free[0]}
        | _ENVIRONMENT,
    }


def _packages() -> list[str]:
    """Return the folders of the installed packages."""
    return sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})


def _outermost(paths: Sequence[str]) -> list[str]:
    """Return the paths without those that lie in another."""
    folders = [Path(os.path.abspath(path)) for path in dict.fromkeys(paths)]
    outermost = [path for path in folders if not any(other in path.parents for other in folders)]
    return [str(path) for path in outermost]


def _read_result(report: dict[str, Any]) -> Result:
    if "refused" in report:
        raise SandboxError(
            f"this machine does not allow the sandbox: {report['refused']}. It needs Linux 5.12 "
            "with namespaces: as root with CAP_SYS_ADMIN, or as a user who may make user "
            "namespaces (in a container: --security-opt seccomp=unconfined, or --privileged)"
        )
    stdout, stderr = (
        report[name].encode("latin-1").decode("utf-8", "replace") for name in ("stdout", "stderr")
    )
    exit_code = os.waitstatus_to_exitcode(report["status"])
    return Result(
        reason=_reason(report["limit"], exit_code, stderr),
        stdout=stdout,
        stderr=stderr,
        exit_code=exit_code,
        seconds=report["seconds"],
        peak_mb=report["peak_mb"],
    )


def _reason(limit: object, exit_code: int, stderr: str) -> str:
    if limit:
        return str(limit)
    if exit_code == 0:
        return "ok"
    if exit_code < 0:
        return "timeout" if -exit_code == signal.SIGXCPU else "killed"
    # The limit of the address space shows itself as an exception.
    last_line = stderr.rstrip().rpartition("\n")[2]
    return "memory" if last_line.startswith("MemoryError") else "error"
