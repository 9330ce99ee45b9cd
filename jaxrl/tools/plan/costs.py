"""Find what a phase needs of a device: memory by the compiler or an estimate, least seconds."""

import functools
import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl import config as cfg
from jaxrl.parallel.rules import batch_devices
from jaxrl.tools.plan import estimate, hlo
from jaxrl.tools.plan.operations import Program, Totals
from jaxrl.tools.plan.phases import SAMPLING, Phase
from jaxrl.tools.plan.topology import Machine
from jaxrl.training.resident_memory import device_bytes

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Memory:
    """Hold the bytes of one device while a program runs.

    Attributes:
        aliased: results in the place of arguments.
        refusal: the compiler's words, if the program does not fit by itself; the temporaries are
            then what it says they would be.
        collectives: bytes that the device sends in one execution, by kind.
        totals: what the text of a TPU program says of its FLOPs and bytes; other compilers hide
            products in calls of their libraries.
        estimated: from shapes, not from the compiler.
    """

    arguments: float
    results: float
    aliased: float
    temporaries: float
    collectives: dict[str, float] = field(default_factory=dict)
    refusal: str | None = None
    totals: Totals | None = None
    estimated: bool = False

    @property
    def peak(self) -> float:
        """Return the bytes in use while the program runs."""
        return self.arguments + self.results - self.aliased + self.temporaries


class Compiler:
    """Compile the programs of phases, each once: also where several phases have the same one."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, str] | str] = {}

    def __call__(self, phase: Phase) -> Memory:
        """Return the memory of a program."""
        lowered = phase.call.lower()
        name = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        if name not in self._known:
            self._known[name] = _compiled(lowered)
        found = self._known[name]
        return _refused(phase, found) if isinstance(found, str) else _read(phase, *found)


def _compiled(lowered: jax.stages.Lowered) -> tuple[Any, str] | str:
    """Return the compiler's figures and the text of a program, or its words if it does not fit."""
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return str(error)
    return compiled.memory_analysis(), compiled.as_text() or ""


def _read(phase: Phase, stats: Any, text: str) -> Memory:
    sent: dict[str, float] = {}
    readable = phase.part.placement.platform == "tpu"
    for collective in hlo.collectives(text, phase.inner):
        times = collective.times * (1 if collective.fixed else phase.trips)
        sent[collective.kind] = sent.get(collective.kind, 0.0) + times * collective.moved
    return Memory(
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        collectives=sent,
        totals=Program(text, phase.trips, phase.inner).totals() if readable else None,
    )


def _refused(phase: Phase, message: str) -> Memory:
    """Read from the compiler's refusal what memory a program would need.

    It says "... HLO temporaries (30.00G) exceeds available HBM", or "Used 20.3G of 15.75G hbm".
    """
    from_shapes = _from_shapes(phase)
    whole = re.search(r"Used ([\d.]+)([KMGT]) of", message)
    parts = re.search(r"temporaries \(([\d.]+)([KMGT])\)", message)
    temporaries = 0.0
    if found := whole or parts:
        temporaries = float(found[1]) * UNITS[found[2]]
        temporaries -= from_shapes.peak if whole else 0
    words = next(line for line in message.splitlines() if "RESOURCE_EXHAUSTED" in line)
    refusal = words.partition("RESOURCE_EXHAUSTED: ")[2][:200]
    return replace(from_shapes, temporaries=max(temporaries, 0.0), refusal=refusal)


def estimated(phase: Phase, config: cfg.TrainConfig) -> Memory:
    """Estimate the memory of a program from shapes."""
    trainer = config.trainer
    remat = trainer.remat_policy if trainer.gradient_checkpointing else "none"
    return replace(
        _from_shapes(phase),
        temporaries=estimate.temporaries(
            phase, remat, trainer.flash_attn is True, trainer.expert_exchange
        ),
        collectives=estimate.collectives(phase, remat, trainer.expert_exchange),
        estimated=True,
    )


def _from_shapes(phase: Phase) -> Memory:
    """Return the memory of a program without temporaries."""
    args, place = phase.call.args, phase.part.placement
    if phase.donated is not None:  # numbers of a few rows beside it: not worth a trace of the model
        donated = device_bytes(args[phase.donated])
        return Memory(
            arguments=device_bytes(args), results=donated, aliased=donated, temporaries=0.0
        )
    results = device_bytes(phase.call.results(), batch_devices(place.mesh, place.rules))
    return Memory(arguments=device_bytes(args), results=results, aliased=0.0, temporaries=0.0)


# ---------------------------------------------------------------- time


@dataclass(frozen=True)
class Limits:
    """Describe what a device can do: FLOP/s, bytes/s of its memory, bytes/s it sends in a ring."""

    flops: float
    bandwidth: float
    network: float
    source: str


def limits(machine: Machine) -> Limits:
    """Return the limits of a device from the table of chips.

    Those of other devices are measured here, shared by all devices of the machine.
    """
    if machine.chip is not None:
        chip = machine.chip
        return Limits(chip.flops, chip.bandwidth, chip.ring, "maker's figures")
    rates, number = _measured(), len(machine.devices)
    flops, bandwidth = rates.matmul_flops / number, rates.bandwidth / number
    return Limits(flops, bandwidth, bandwidth, "measured here, float32")


@dataclass(frozen=True)
class Rates:
    """Hold the measured limits of this machine."""

    matmul_flops: float  # FLOP/s of a large square matrix product
    bandwidth: float  # bytes/s read by the sum of a large array


@functools.cache
def _measured() -> Rates:
    return measure_rates(jnp.dtype(jnp.float32))


def measure_rates(dtype: jnp.dtype, *, smoke: bool = False) -> Rates:
    """Measure the matmul rate in `dtype` and the memory bandwidth of the first device."""
    large = jax.default_backend() != "cpu"
    size, elements = (8192, 2**30) if large else (2048, 2**26)  # 2**26 float32 = 256 MiB
    if smoke:
        size, elements = 64, 2**12
    a = jnp.ones((size, size), dtype)
    matmul = best_seconds(jax.jit(lambda x, y: x @ y), a, a)
    x = jnp.ones((64, elements // 64), dtype)
    read = best_seconds(jax.jit(lambda x: x.sum(-1)), x)
    return Rates(matmul_flops=2 * size**3 / matmul, bandwidth=x.nbytes / read)


def best_seconds(func: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """Return the least seconds of a call, after one that compiles."""
    jax.block_until_ready(func(*args))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(func(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def seconds(phase: Phase, memory: Memory, device: Limits) -> dict[str, float]:
    """Return least seconds of one execution by what bounds it: "compute", "memory", "network".

    And "host", of what the host does for one; see `Phase.ahead`.
    """
    found = {
        "compute": device_flops(phase, memory) / device.flops,
        "memory": device_traffic(phase, memory) / device.bandwidth,
        "network": sent(phase, memory) / device.network,
    }
    return found | {"host": phase.host} if phase.host else found


def device_flops(phase: Phase, memory: Memory) -> float:
    """Return the FLOPs of one execution on a device: as its program has them, else by formulas."""
    work, devices = phase.work, phase.part.placement.mesh.size
    if memory.totals is None:
        return (work.flops + work.recomputed) / devices
    hidden = work.attention if memory.totals.kernel_moved else 0.0
    if phase.part.head_kernel == "pallas":
        hidden += work.head
    return memory.totals.flops + hidden / devices


def sent(phase: Phase, memory: Memory) -> float:
    """Return the bytes that a device sends in one execution."""
    return phase.sends + sum(memory.collectives.values())


def device_traffic(phase: Phase, memory: Memory) -> float:
    """Return bytes that a device moves.

    Those that its program reads and writes, or at least: arguments, results, weights in every pass.
    Of the cache counts what is read of it.
    """
    part, call, totals = phase.part, phase.call, memory.totals
    if totals is not None:
        kernels = phase.cache if phase.kind in SAMPLING else totals.kernel_moved
        return totals.moved + (kernels if totals.kernel_moved else 0.0)
    if phase.kind in SAMPLING:
        return phase.reads
    moved = memory.arguments + memory.results
    if phase.work.weight_reads == 0:
        return moved
    # the weights as a device computes with them: whole but for the tensor axis
    params = call.args[0] if phase.kind == "forward" else call.args[1]
    elements = sum(x.size for x in jax.tree.leaves(params) if hasattr(x, "sharding"))
    weights = elements * part.dtype.itemsize / part.placement.mesh.shape["tensor"]
    return moved + phase.work.weight_reads * weights
