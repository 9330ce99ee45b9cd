"""The machine: its devices, versions and flags; what a product and a read of memory reach."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxrl
from jaxrl.config.recipe import recipe_files
from jaxrl.parallel.chips import GIB, chip_of
from jaxrl.parallel.devices import device_memory
from jaxrl.tools.doctor.machine_report import machine_report
from jaxrl.tools.plan.costs import measure_rates
from jaxrl.tools.prove.section import Machine, Result, Row, contents_hash

SAID = (  # of the machine report
    *("jaxrl", "python", "system", "processors", "memory_gib", "packages"),
    *("backend", "processes", "driver"),
)
FLAGS = (  # variables that change what is measured
    *("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "JAXRL_XLA_FLAGS"),
    *("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
)


def look() -> tuple[Machine, Result]:
    """Describe the machine, and measure the rates of its first device."""
    device = jax.devices()[0]
    dtype = jnp.dtype("float32" if device.platform == "cpu" else "bfloat16")
    rates, chip, report = measure_rates(dtype), chip_of(device), machine_report()
    memory = device_memory(device)
    quickstart = [file.resolve() for name, file in recipe_files().items() if name == "quickstart"]
    sharing = jax.local_device_count() if device.platform == "cpu" else 1  # of what is measured
    machine = Machine(
        platform=device.platform,
        device=device.device_kind,
        number=len(jax.devices()),
        memory=memory if memory < float("inf") else None,
        flops=chip.flops if chip else rates.matmul_flops / sharing,
        bandwidth=chip.bandwidth if chip else rates.bandwidth / sharing,
        source="the maker's figures" if chip else f"measured here, {dtype.name}",
        known=chip is not None,
        contents=contents_hash(Path(jaxrl.__file__).parent, *quickstart),
    )
    rows: list[Row] = [
        {"fact": "matmul TFLOP/s, measured", "value": rates.matmul_flops / 1e12},
        {"fact": "memory GB/s, measured", "value": rates.bandwidth / 1e9},
    ]
    missing = []
    if chip:
        rows.append({"fact": "matmul TFLOP/s, the maker's", "value": chip.flops / 1e12})
        rows.append({"fact": "memory GB/s, the maker's", "value": chip.bandwidth / 1e9})
    else:
        missing.append(f"the maker's rates of a {device.device_kind}: shares are of measured ones")
    size = f", {memory / GIB:.1f} GiB each" if machine.memory else ""
    figure = (
        f"{machine.number} x {machine.device}{size}; {rates.matmul_flops / 1e12:.3g} TFLOP/s, "
        f"{rates.bandwidth / 1e9:.0f} GB/s measured, {dtype.name}"
    )
    return machine, Result(True, figure, rows=[*rows, *_facts(report)], missing=missing)


def _facts(report: dict[str, Any]) -> list[Row]:
    """Return versions, driver and flags, a row each; no names and places of this machine."""
    said = {name: report[name] for name in SAID}
    said |= {name: report["environment"].get(name) for name in FLAGS}
    return [
        {"fact": name, "value": _text(value)} for name, value in said.items() if value is not None
    ]


def _text(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return ", ".join(f"{name} {x}" for name, x in value.items() if x is not None)
