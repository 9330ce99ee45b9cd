"""Divide hosts and devices: what a job takes of a cluster, and a process of its host."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

ACCELERATORS = ("TPU", "GPU")  # Ray's names of resources
NODES, EACH = "trainer.placement.policy_num_nodes", "trainer.cluster.processes_per_host"
SLICE_LABEL = "ray.io/tpu-slice-name"
_HEAD = re.compile(r"TPU-.+-head")  # e.g. TPU-v5e-16-head
# Resources that hosts of several slices have: Ray's own, and the heads'.
_KNOWN = re.compile(r"(CPU|GPU|TPU|memory|object_store_memory)$|(TPU-|node:|accelerator_type:)")
_HOST_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


class Placement(NamedTuple):
    """Describe what a job takes of a cluster, the same on every host but for `head`.

    Attributes:
        bundle: Ray's resources of a host.
        devices: of a host; None where Ray does not count them: CPU.
        head: what it takes of the first host of a TPU slice beside that.
    """

    bundle: dict[str, float]
    devices: int | None
    head: Mapping[str, float] = MappingProxyType({})

    def bundles(self, hosts: int) -> list[dict[str, float]]:
        """Return Ray's resources of every host."""
        return [{**self.bundle, **self.head}, *[self.bundle] * (hosts - 1)]


def place_in_slice(
    nodes: Sequence[Mapping[str, Any]],
    hosts: int,
    processes_per_host: int,
    platforms: str,
    free: Mapping[str, float],
) -> Placement:
    """Take all accelerators of some hosts, see `place`; where these are TPUs, a slice whole.

    Its chips are wired to one another and to no other slice's, and a program on them begins when
    all its hosts are there. Ray gives each host of a slice the slice's name as a resource, and the
    first `TPU-<type>-head`; Ray Train reserves slices by the latter, which is therefore taken too.

    Args:
        free: of `ray.available_resources()`.

    Raises:
        ValueError: see `place`; no slice has so many hosts.
    """
    alive = [node for node in nodes if node["Alive"]]
    slices: dict[str, list[Mapping[str, Any]]] = {}
    for node in alive:
        if node["Resources"].get("TPU", 0) and (name := _slice_name(node, alive)):
            slices.setdefault(name, []).append(node)
    if not slices or platforms.split(",", maxsplit=1)[0] == "cpu":
        return place(nodes, hosts, processes_per_host, platforms)
    whole = [name for name, members in slices.items() if len(members) == hosts]
    if not whole:
        found = ", ".join(f"{name} has {len(members)}" for name, members in slices.items())
        fix = (
            f"a job takes a TPU slice whole, and of the hosts alive {found}; set it to one of these"
        )
        _fail(NODES, hosts, fix)
    name = max(whole, key=lambda name: free.get(name, 0) >= hosts)  # the first that is free
    found = place(slices[name], hosts, processes_per_host, platforms)
    heads = {head: 1.0 for node in slices[name] if (head := _head(node))}
    named = {name: 1.0} if all(name in node["Resources"] for node in slices[name]) else {}
    return found._replace(bundle=found.bundle | named, head=heads)


def _head(node: Mapping[str, Any]) -> str | None:
    """Return the resource that only the first host of a TPU slice has, if this is it."""
    return next((name for name in node["Resources"] if _HEAD.fullmatch(name)), None)


def _slice_name(node: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the TPU slice of a host: its label, or the resource that it shares with a head."""
    if name := node.get("Labels", {}).get(SLICE_LABEL):
        return name
    for first in filter(_head, nodes):
        common = [x for x in first["Resources"] if x in node["Resources"] and not _KNOWN.match(x)]
        if common:
            return common[0]
    return None


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
