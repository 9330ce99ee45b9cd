"""What a phase needs of a device: memory from the compiler (or estimated), and least seconds."""

import functools
import hashlib
import re
from dataclasses import dataclass, field

import jax

from jaxrl import config as cfg
from jaxrl.parallel.rules import batch_devices
from jaxrl.tools.plan import estimate, hlo
from jaxrl.tools.plan.phases import Phase
from jaxrl.tools.plan.rates import Rates, measure_rates
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
        estimated: from shapes, not from the compiler.
    """

    arguments: float
    results: float
    aliased: float
    temporaries: float
    collectives: dict[str, float] = field(default_factory=dict)
    refusal: str | None = None
    estimated: bool = False

    @property
    def peak(self) -> float:
        """Return the bytes in use while the program runs."""
        return self.arguments + self.results - self.aliased + self.temporaries


class Compiler:
    """Compiles the programs of phases, each once."""

    def __init__(self) -> None:
        self._known: dict[str, Memory] = {}

    def __call__(self, phase: Phase) -> Memory:
        """Return the memory of a program."""
        lowered = phase.call.lower()
        text = f"{phase.trips} {lowered.as_text()}"
        name = hashlib.sha256(text.encode()).hexdigest()
        if name not in self._known:
            self._known[name] = _compiled(phase, lowered)
        return self._known[name]


def _compiled(phase: Phase, lowered: jax.stages.Lowered) -> Memory:
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refused(phase, str(error))
    stats, sent = compiled.memory_analysis(), {}
    assert stats is not None
    for one in hlo.collectives(compiled.as_text() or ""):
        times = one.times * (1 if one.fixed else phase.trips)
        sent[one.kind] = sent.get(one.kind, 0.0) + times * one.moved
    return Memory(
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        collectives=sent,
    )


def _refused(phase: Phase, message: str) -> Memory:
    """Read from the compiler's refusal what memory a program would need.

    It says "... HLO temporaries (30.00G) exceeds available HBM", or "Used 20.3G of 15.75G hbm".
    """
    given = _from_shapes(phase)
    whole = re.search(r"Used ([\d.]+)([KMGT]) of", message)
    parts = re.search(r"temporaries \(([\d.]+)([KMGT])\)", message)
    temporaries = 0.0
    if found := whole or parts:
        temporaries = float(found[1]) * UNITS[found[2]]
        temporaries -= given.peak if whole else 0
    words = next(line for line in message.splitlines() if "RESOURCE_EXHAUSTED" in line)
    refusal = words.partition("RESOURCE_EXHAUSTED: ")[2][:200]
    changed = {"temporaries": max(temporaries, 0.0), "refusal": refusal}
    return Memory(given.arguments, given.results, given.aliased, **changed)


def estimated(phase: Phase, config: cfg.TrainConfig) -> Memory:
    """Estimate the memory of a program from shapes."""
    trainer, given = config.trainer, _from_shapes(phase)
    remat = trainer.remat_policy if trainer.gradient_checkpointing else "none"
    return Memory(
        given.arguments,
        given.results,
        given.aliased,
        estimate.temporaries(phase, remat, trainer.flash_attn is True),
        estimate.collectives(phase, remat),
        estimated=True,
    )


def _from_shapes(phase: Phase) -> Memory:
    args, place = phase.call.args, phase.part.placement
    if phase.donated is not None:  # numbers of a few rows beside it: not worth a trace of the model
        donated = device_bytes(args[phase.donated])
        return Memory(device_bytes(args), donated, donated, 0.0)
    results = phase.call.results()
    return Memory(
        device_bytes(args), device_bytes(results, batch_devices(place.mesh, place.rules)), 0.0, 0.0
    )


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


@functools.cache
def _measured() -> Rates:
    return measure_rates(jax.numpy.float32, smoke=False)


def seconds(phase: Phase, memory: Memory, can: Limits) -> dict[str, float]:
    """Return least seconds of one execution by what bounds it: "compute", "memory", "network"."""
    work, mesh = phase.work, phase.part.placement.mesh
    return {
        "compute": (work.flops + work.recomputed) / mesh.size / can.flops,
        "memory": device_traffic(phase, memory) / can.bandwidth,
        "network": sent(phase, memory) / can.network,
    }


def sent(phase: Phase, memory: Memory) -> float:
    """Return the bytes that a device sends in one execution."""
    return phase.sends + sum(memory.collectives.values())


def device_traffic(phase: Phase, memory: Memory) -> float:
    """Return bytes that a device moves at least.

    They are arguments, results, weights in every pass, the cache. What is donated and only written
    in part, as the cache, counts by what is read of it.
    """
    part, call = phase.part, phase.call
    if phase.kind in ("copy", "decode"):
        return phase.reads
    moved = memory.arguments + memory.results
    if phase.kind == "prefill":
        return moved - 2 * memory.aliased
    if phase.work.weight_reads == 0:
        return moved
    # the weights as a device computes with them: whole but for the tensor axis
    params = call.args[0] if phase.kind == "forward" else call.args[1]
    elements = sum(x.size for x in jax.tree.leaves(params) if hasattr(x, "sharding"))
    weights = elements * part.dtype.itemsize / part.placement.mesh.shape["tensor"]
    return moved + phase.work.weight_reads * weights
