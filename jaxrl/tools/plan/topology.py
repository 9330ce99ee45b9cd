"""Find the devices of a plan: those of this process, or some that need not be there.

TPU programs compile wherever libtpu is installed, without a chip; the compiler then states what a
program will need of each device. Of GPUs that are not there nothing can be compiled: CPU devices
stand in for them, and what they will need is estimated.
"""

import contextlib
import functools
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import psutil
from jax.experimental import topologies

from jaxrl.parallel import by_process
from jaxrl.parallel.chips import CHIPS, GIB, Chip, chip_named, chip_of
from jaxrl.parallel.devices import device_memory

# Chips of a host along each side, by their number, where hosts come in several forms; slices that
# are one host (docs.cloud.google.com/tpu/docs/v5e and v6e, VM types).
HOSTS = dict.fromkeys(("v5e", "v6e"), {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)})
ONE_HOST = {"1x1": 1, "2x2": 4, "2x4": 8}


@dataclass(frozen=True)
class Machine:
    """Describe the devices to plan for.

    Attributes:
        name: in words.
        memory: bytes of each that programs may use.
        chip: None for a kind that is not in the table.
        stand_in: these are CPU devices in the place of others.
        first_hosts: of several TPU hosts, number -> the devices of as many by themselves: the
            compiler wants those of a whole topology.
        host_memory: bytes of a host's; None = not known, or what the devices share.
    """

    name: str
    devices: list[Any]
    memory: float
    chip: Chip | None
    stand_in: bool = False
    first_hosts: Callable[[int], list[Any]] | None = None
    host_memory: float | None = None

    @property
    def platform(self) -> str:
        """Return the platform as JAX calls it."""
        return "gpu" if self.stand_in else self.devices[0].platform

    @property
    def hosts(self) -> int:
        """Return the number of processes of a run on the machine, one for each host."""
        return len(by_process(self.devices))


def machine(
    topology: str | None = None, hbm_gib: float | None = None, chips_per_host: int | None = None
) -> Machine:
    """Return the machine of a topology, or that of this process.

    Args:
        topology: "v5e:2x4" of TPUs, or Cloud's "v5litepod-8" for it; "h100:8" of GPUs.
        hbm_gib: memory of a device, in place of what is known of it.
        chips_per_host: of TPUs, in place of what is usual.

    Raises:
        ValueError: there is no such topology, or no compiler for it; names the fix.
    """
    memory = None if hbm_gib is None else hbm_gib * GIB
    if hbm_gib is not None and not 0 < hbm_gib < math.inf:
        raise ValueError(f"--hbm-gib={hbm_gib:g} must be positive: GiB of one device")
    if chips_per_host is not None and (topology is None or topology.split(":")[0] not in HOSTS):
        raise ValueError(
            f"--chips-per-host={chips_per_host} needs a --topology of {', '.join(HOSTS)}: other "
            "machines have one form of host"
        )
    if topology is None:
        devices = jax.devices()
        chip = chip_of(devices[0])
        name = f"{len(devices)} x {devices[0].device_kind}"
        own = None if devices[0].platform == "cpu" else float(psutil.virtual_memory().total)
        of_each = memory or device_memory(devices[0])
        return Machine(name, devices, of_each, chip, host_memory=own)
    topology = of_accelerator_type(topology) or topology
    kind, _, size = topology.partition(":")
    chip = chip_named(kind)
    if chip is None or not size:
        names = ", ".join(dict.fromkeys(chip.name for chip in CHIPS))
        raise ValueError(
            f"--topology={topology} is not known; write KIND:SIZE, for example v5e:2x4 or h100:8, "
            f"with one of {names}, or a type of Cloud TPU such as v5litepod-8"
        )
    of_tpu = chip.kind.startswith("TPU")
    found = Machine(
        f"{topology}, which need not be here",
        topology_devices(topology, chips_per_host) if of_tpu else _stand_ins(topology, size),
        memory or chip.hbm,
        chip,
        stand_in=not of_tpu,
    )
    if chip.host is not None:
        each = len(found.devices) // found.hosts
        found = replace(found, host_memory=chip.host * each)
    if found.hosts == 1:
        return found
    return replace(found, first_hosts=functools.partial(_first_hosts, found, kind))


def make_stand_ins(topology: str) -> None:
    """Let the CPU have as many devices as GPUs of a topology, if nobody said how many.

    Once JAX has started its devices there are no more of them: `machine` then says what to do.
    """
    kind, _, size = topology.partition(":")
    chip = chip_named(kind)
    gpus = chip is not None and not chip.kind.startswith("TPU") and size.isdigit()
    if gpus and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", max(int(size), 1))


def of_accelerator_type(name: str) -> str | None:
    """Return the topology of a type of Cloud TPU, "v5p:2x4x4" of "v5p-64"; None if it is none.

    Its number counts the chips, or the two cores of each, and their sides are as equal as powers of
    two can be. These are the rows of tpu/accelerators.tsv, which an installed jaxrl lacks.
    """
    family, _, number = name.partition("-")
    kind = "v5e" if family == "v5litepod" else family
    if kind not in ("v5e", "v5p", "v6e") or not number.isdecimal():
        return None
    cores, dimensions = (2, 3) if kind == "v5p" else (1, 2)
    chips, left = divmod(int(number), cores)
    doublings = chips.bit_length() - 1
    if left or chips != 2**doublings or chips == 2:
        return None
    sides = [2 ** ((doublings + i) // dimensions) for i in range(dimensions)]
    sides = [2, 2, 1] if sides == [1, 2, 2] else sides
    return f"{kind}:{'x'.join(map(str, sides))}"


def topology_devices(name: str, chips_per_host: int | None = None) -> list[Any]:
    """Return the devices of a TPU slice, for example "v5e:2x4", to compile for.

    Args:
        chips_per_host: of v5e and v6e: 1, 4 or 8; None = 4, of slices that are one host all.

    Raises:
        ValueError: libtpu is not installed, or does not know the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"--topology={name} needs the TPU compiler: pip install 'jaxrl[tpu]' into an "
            "environment of its own, or leave --topology out"
        )
    for variable, value in {
        "TPU_SKIP_MDS_QUERY": "1",  # no question to a cloud's metadata server
        "TPU_ACCELERATOR_TYPE": name.replace(":", "-"),
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling takes no chip
    }.items():
        if os.environ.get(variable, "WARNING").startswith("WARNING"):  # JAX's, without an answer
            os.environ[variable] = value
    # the two cores of a v4 chip run as one device
    options: dict[str, Any] = {"chip_config_name": "megacore"} if name.startswith("v4:") else {}
    kind, _, size = name.partition(":")
    if kind in HOSTS:
        chips = chips_per_host or ONE_HOST.get(size, 4)
        if chips not in HOSTS[kind]:
            raise ValueError(f"--chips-per-host={chips} of {kind} must be 1, 4 or 8")
        options["chips_per_host_bounds"] = HOSTS[kind][chips]
    try:
        return list(
            topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
        )
    except Exception as error:  # libtpu's own kinds
        raise ValueError(
            f"--topology={name} is not one that libtpu knows: {str(error).splitlines()[0]}; write "
            "the chips along each side, for example v5e:2x4, v6e:4x4 or v5p:2x2x2"
        ) from error


def _first_hosts(whole: Machine, kind: str, number: int) -> list[Any]:
    """Return the devices of a topology that is the first hosts of another, in the same order.

    Raises:
        ValueError: they do not fill a box, or no topology has its sides.
    """
    hosts = by_process(whole.devices)[:number]
    owned = [device for host in hosts for device in host]
    coords = np.array([device.coords for device in owned])
    sides = (np.ptp(coords, axis=0) + 1).tolist()
    if np.prod(sides) > len({tuple(device.coords) for device in owned}):
        raise ValueError(
            f"generator.inference_engine.hosts_per_engine={number}: those of {whole.name} "
            f"do not fill a box of {'x'.join(map(str, sides))} chips, for which alone a compiler "
            "can be asked; choose a number that does"
        )
    in_name = 2 if kind in HOSTS else 3  # sides
    name = f"{kind}:{'x'.join(map(str, sides[:in_name]))}"
    alone = topology_devices(name, len(hosts[0]) if kind in HOSTS else None)

    def place(device: Any, first: Any) -> tuple[int, ...]:
        at = np.array(device.coords) - np.array(first.coords)
        return (*at.tolist(), getattr(device, "core_on_chip", 0))

    first = min(owned, key=lambda device: tuple(device.coords))
    at = {place(device, alone[0]): device for device in alone}
    return [at[place(device, first)] for device in owned]


def _stand_ins(topology: str, size: str) -> list[Any]:
    if not size.isdigit() or int(size) < 1:
        raise ValueError(f"--topology={topology}: the size of GPUs is their number, as in h100:8")
    devices = jax.devices("cpu")
    if len(devices) < int(size):
        raise ValueError(
            f"--topology={topology}: {len(devices)} CPU devices cannot stand in for {size}; start "
            f"with XLA_FLAGS=--xla_force_host_platform_device_count={size}"
        )
    return devices[: int(size)]
