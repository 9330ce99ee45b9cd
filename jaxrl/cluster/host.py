"""Hold one machine of a job: what it is, and the processes on it.

The launcher has one for its own machine; with Ray an actor holds one on each.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jaxrl
from jaxrl.cluster.child import Child, Start
from jaxrl.cluster.placement import share_of_devices

POLL_SECONDS = 0.05


class Facts(NamedTuple):
    """Hold what a host says of itself before anything is started there."""

    name: str
    address: str  # by which other hosts reach it
    versions: dict[str, str]  # that must be the same everywhere
    tpu_worker: int  # its place in a TPU slice; 0 where there is none


class Report(NamedTuple):
    """Hold news of a process."""

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    text: str  # what it printed meanwhile
    status: int | None  # None while it runs


class Host:
    """Run the processes of this machine."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def facts(self, address: str) -> Facts:
        """Return name and versions of this host.

        Args:
            address: by which other hosts reach this one.
        """
        worker = os.environ.get("TPU_WORKER_ID", "0")
        return Facts(socket.gethostname(), address, versions(), int(worker))

    def free_port(self) -> int:
        """Return a port that nobody listens on."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def start(self, starts: Sequence[Start]) -> None:
        """Start processes, which divide the devices of this host.

        Raises:
            ValueError: the devices cannot be divided; see `Child`.
        """
        for place, start in enumerate(starts):
            changed = {k: v for k, v in start.environment.items() if v is not None}
            devices = share_of_devices({**os.environ, **changed}, place, len(starts))
            environment = {**start.environment, **devices}
            self._children.append(Child(start._replace(environment=environment)))

    def poll(self, seconds: float) -> list[Report]:
        """Return news, as soon as there are any, of processes not yet reported as ended.

        Args:
            seconds: to wait for news.
        """
        deadline = time.monotonic() + seconds
        while True:
            reports = [_report(child) for child in self._children]
            reports = [r for r in reports if r.text or r.status is not None]
            if reports or not self._children or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        ended = {report.index for report in reports if report.status is not None}
        for child in (child for child in self._children if child.index in ended):
            child.stop()
        self._children = [child for child in self._children if child.index not in ended]
        return reports

    def signal(self, number: int) -> None:
        """Send a signal to all processes."""
        for child in self._children:
            child.signal(number)

    def stop(self) -> None:
        """Kill all processes; return when they are dead."""
        for child in self._children:
            child.stop()
        self._children = []


def _report(child: Child) -> Report:
    """Report all that an ended process printed, or of a running one what there is."""
    status, text = child.status(), child.output()
    while status is not None and (more := child.output()):
        text += more
    return Report(child.index, text, status)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that must agree.

    The sources of jaxrl count as its version.
    """
    installed = {}
    for name in ("jax", "jaxlib", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    content = hashlib.sha256()
    folder = Path(jaxrl.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        content.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    sources = f"{jaxrl.__version__} (sources {content.hexdigest()[:8]})"
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, **installed, "jaxrl": sources}


def check_versions(hosts: Sequence[Facts]) -> None:
    """Refuse hosts that would not run the same program.

    Raises:
        ValueError: names two of them, and the version that differs.
    """
    first = hosts[0]
    for other in hosts[1:]:
        for name in sorted({*first.versions, *other.versions}):
            here, there = (host.versions.get(name, "is missing") for host in (first, other))
            if here != there:
                raise ValueError(
                    f"{other.name} ({other.address}) has {name} {there}, {first.name} "
                    f"({first.address}) has {name} {here}: install the same on all hosts"
                )
