"""Divide hosts and devices: what a job takes of a cluster, and a process of its host."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ACCELERATORS = ("TPU", "GPU")  # Ray's names of resources
NODES, EACH = "trainer.placement.policy_num_nodes", "trainer.cluster.processes_per_host"
_HOST_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


class Placement(NamedTuple):
    """Describe what a job takes of a cluster, the same on every host.

    Attributes:
        bundle: Ray's resources of a host.
        devices: of a host; None where Ray does not count them: CPU.
    """

    bundle: dict[str, float]
    devices: int | None


def place(
    nodes: Sequence[Mapping[str, Any]],
    hosts: int,
    processes_per_host: int,
    platforms: str = "",
    *,
    field: str = NODES,
    taken: int = 0,
) -> Placement:
    """Take all accelerators of some hosts; other hosts, and the CPUs but one, stay free for others.

    Args:
        nodes: of `ray.nodes()`.
        hosts: that the job needs.
        platforms: JAX_PLATFORMS of the job; "cpu" = no accelerators.
        field: that says how many hosts.
        taken: hosts with accelerators that others hold.

    Raises:
        ValueError: too few hosts, or devices that the processes of a host cannot divide.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    wanted = () if platforms.split(",", maxsplit=1)[0] == "cpu" else ACCELERATORS
    kind = next((k for k in wanted if any(r.get(k, 0) for r in alive)), None)
    counts = sorted((int(r.get(kind or "CPU", 0)) for r in alive), reverse=True)
    counts = [count for count in counts if count > 0]
    if kind is not None:
        counts = counts[taken:]
    if len(counts) < hosts:
        what = f"host(s) with a {kind}" if kind else "host(s)"
        what += f" beside the trainer's {taken}" if kind and taken else ""
        fix = "start Ray on more (ray start --address=...), or lower it"
        _fail(field, hosts, f"the Ray cluster has {len(counts)} {what}; {fix}")
    if kind is None:
        return Placement({"CPU": 1.0}, None)
    count = counts[hosts - 1]
    if kind == "TPU" and processes_per_host > 1:
        _fail(
            EACH, processes_per_host, "a TPU host runs one process, on all its chips; set it to 1"
        )
    if count % processes_per_host:
        _fail(EACH, processes_per_host, f"does not divide the {count} {kind}s of a host")
    return Placement({"CPU": 1.0, kind: float(count)}, count)


def share_of_devices(environment: Mapping[str, str], place: int, count: int) -> dict[str, str]:
    """Return the variables by which one of `count` processes of a host sees only its own devices.

    The CPU's are those of XLA_FLAGS, the GPUs those of CUDA_VISIBLE_DEVICES or /dev.

    Raises:
        ValueError: they cannot be divided.
    """
    if count == 1:
        return {}
    changes, flags = {}, environment.get("XLA_FLAGS", "")
    if found := _HOST_DEVICES.search(flags):
        each = _divided(int(found[1]), count, f"devices of {found[0]} in XLA_FLAGS")
        changes["XLA_FLAGS"] = _HOST_DEVICES.sub(found[0].replace(found[1], str(each)), flags)
    if gpus := _gpus(environment):
        each = _divided(len(gpus), count, "GPUs of this host")
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[place * each : (place + 1) * each])
    return changes


def host_devices(flags: str) -> int:
    """Return how many devices XLA_FLAGS make of a CPU; 0 where they say nothing.

    Then there is one for each process.
    """
    found = _HOST_DEVICES.search(flags)
    return int(found[1]) if found else 0


def _gpus(environment: Mapping[str, str]) -> list[str]:
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name.strip()]
    names = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*"))
    return sorted((name for name in names if name.isdigit()), key=int)


def _fail(field: str, value: int, fix: str) -> NoReturn:
    """Raise as `jaxrl.config.constraints.fail` does, whose package imports jax."""
    raise ValueError(f"{field}={value}: {fix}")


def _divided(devices: int, count: int, what: str) -> int:
    if devices % count:
        _fail(EACH, count, f"does not divide the {devices} {what}")
    return devices // count
