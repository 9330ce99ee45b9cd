"""Show a plan as text and as JSON."""

from collections.abc import Sequence
from typing import Any

from jaxrl.tools.plan.costs import device_flops, sent
from jaxrl.tools.plan.plan import Line, Plan
from jaxrl.tools.plan.remedies import Remedy, as_flags

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_COLUMNS = (
    f"{'phase':<18} {'x':>4} {'arguments':>11} {'results':>11} {'temps':>11} {'beside':>11} "
    f"{'peak':>11} {'TFLOP':>10} {'GB moved':>10} {'GB sent':>9} {'seconds':>9}  bound by"
)


def size(number: float) -> str:
    """Write a number of bytes in binary units, from 1,000 of one in the next."""
    unit = next((unit for unit in ("KiB", "MiB") if abs(number) < _UNITS[unit] * 1000), "GiB")
    return f"{number / _UNITS[unit]:,.2f} {unit}"


def text(plan: Plan) -> str:
    """Return the whole plan as text, memory in GiB of one device."""
    machine, limits, peak = plan.machine, plan.limits, plan.peak
    lines = [
        f"plan for {machine.name}: {size(machine.memory)} per device",
        f"mesh {_sizes(plan)}; {limits.source}: {limits.flops / 1e12:,.4g} TFLOP/s, memory "
        f"{limits.bandwidth / 1e9:,.4g} GB/s, network {limits.network / 1e9:,.4g} GB/s",
    ]
    if any(line.memory.estimated for line in plan.lines):
        lines.append("ESTIMATE: nothing was compiled; temporaries and collectives are formulas")
    lines += ["", "memory of one device; its work, bytes and least seconds in one step", _COLUMNS]
    lines += [_row(line) for line in plan.lines]
    total = sum(line.seconds for line in plan.lines)
    lines += [f"{'step at least':<{len(_COLUMNS) - 19}}{total:>9,.3f}", ""]
    lines += ["stays between programs"]
    for resident in plan.residents:
        where = "" if resident.size else "  in host memory"
        when = "" if resident.kinds is None else "  while sampling"
        lines.append(f"  {resident.name:<18} {size(resident.size):>11}{where}{when}")
    if plan.host:
        known = machine.host_memory
        lines += [f"stays in a host's memory{f', of {size(known)}' if known else ''}"]
        lines += [f"  {name:<18} {size(number):>11}" for name, number in plan.host.items()]
    lines += _cache_lines(plan) + _collective_lines(plan) + [f"note: {x}" for x in plan.notes]
    left = machine.memory - peak.peak
    lines += ["", f"peak {size(peak.peak)}, in {peak.phase.name}, {size(left)} left"]
    return "\n".join(lines + _verdict(plan))


def _sizes(plan: Plan) -> dict[str, int]:
    return dict(plan.lines[-1].phase.part.placement.mesh.shape)


def _row(line: Line) -> str:
    phase, memory = line.phase, line.memory
    fresh = memory.results - memory.aliased
    parts = memory.arguments, fresh, memory.temporaries, line.beside, line.peak
    sizes = " ".join(f"{size(x):>11}" for x in parts)
    flops = phase.runs * device_flops(phase, memory)
    total = phase.runs * sent(phase, memory)
    return (
        f"{phase.name:<18} {phase.runs:>4} {sizes} {flops / 1e12:>10,.4g} "
        f"{line.traffic / 1e9:>10,.4g} {total / 1e9:>9,.4g} {line.seconds:>9,.4g}  {line.bound}"
    )


def _cache_lines(plan: Plan) -> list[str]:
    left, cache = plan.left_for_cache, plan.cache
    if cache is None or left is None:
        return []
    whole = next(resident.size for resident in plan.residents if resident.name == "KV cache")
    more = max(int(left // (whole / cache.pages)), 0)
    rows = f"{cache.longest:,} of the longest"
    if plan.mean_response is not None:
        rows += f", {cache.mean:,} of the mean response"
    return [
        f"KV cache: {cache.pages:,} pages of {cache.page} positions on a device; of its "
        f"{cache.slots:,} rows these hold {rows}; {size(left)} left while sampling, {more:,} more "
        "pages"
    ]


def _collective_lines(plan: Plan) -> list[str]:
    """Return lines of the bytes by kind, where anything is sent."""
    lines = []
    for line in plan.lines:
        if counted := line.memory.collectives:
            kinds = (f"{kind} {number / 1e6:,.1f}" for kind, number in sorted(counted.items()))
            parts = ", ".join(kinds)
            lines.append(f"  {line.phase.name:<18} {parts}")
    return ["collectives, MB that a device sends in one execution", *lines] if lines else []


def _verdict(plan: Plan) -> list[str]:
    if plan.fits:
        return ["fits"]
    lines = [f"does not fit: {plan.refusal}"] if plan.refusal else []
    for line in plan.too_large:
        words = f"{size(line.peak)} of {size(plan.machine.memory)}"
        why = f" (compiler: {line.memory.refusal})" if line.memory.refusal else ""
        lines.append(f"does not fit: {line.phase.name} needs {words}{why}")
    return lines


def remedies_text(remedies: Sequence[Remedy]) -> str:
    """Return what was tried and fits, as flags."""
    if not remedies:
        return (
            "no change that the planner knows makes it fit: take more or larger devices, shorter "
            "prompts and responses, adapters (trainer.policy.model.lora.rank), or servers to "
            "sample on (generator.inference_engine.backend='vllm')"
        )
    lines = ["to make it fit, any of:" if len(remedies) > 1 else "to make it fit:"]
    for remedy in remedies:
        peak = f"peak {size(remedy.plan.peak.peak)} in {remedy.plan.peak.phase.name}"
        lines.append(f"  {as_flags(remedy.changes)}\n    applied, fits: {peak}; {remedy.cost}")
    return "\n".join(lines)


def as_json(plan: Plan, remedies: Sequence[Remedy]) -> dict[str, Any]:
    """Return all figures: bytes, FLOPs and seconds of one device."""
    machine = plan.machine
    return {
        "remedies": [
            {"changes": remedy.changes, "peak": remedy.plan.peak.peak} for remedy in remedies
        ],
        "machine": machine.name,
        "devices": len(machine.devices),
        "hosts": machine.hosts,
        "memory": machine.memory,
        "mesh": _sizes(plan),
        "fits": plan.fits,
        "refusal": plan.refusal,
        "peak": plan.peak.peak,
        "peak_phase": plan.peak.phase.name,
        "left_for_cache": plan.left_for_cache,
        "cache": plan.cache and plan.cache._asdict(),
        "residents": {resident.name: resident.size for resident in plan.residents},
        "host": plan.host,
        "host_memory": machine.host_memory,
        "phases": [_phase_json(line) for line in plan.lines],
        "notes": plan.notes,
    }


def _phase_json(line: Line) -> dict[str, Any]:
    phase, memory = line.phase, line.memory
    devices = len(phase.part.devices)
    return {
        "name": phase.name,
        "runs": phase.runs,
        "live": phase.live,
        "arguments": memory.arguments,
        "results": memory.results,
        "aliased": memory.aliased,
        "temporaries": memory.temporaries,
        "estimated": memory.estimated,
        "refusal": memory.refusal,
        "beside": line.beside,
        "peak": line.peak,
        "flops": phase.runs * phase.work.flops / devices,
        "recomputed_flops": phase.runs * phase.work.recomputed / devices,
        "bytes": line.traffic,
        "sent": phase.runs * sent(phase, memory),
        "collectives": {kind: phase.runs * n for kind, n in memory.collectives.items()},
        "seconds": line.times,
        "bound": line.bound,
    }
