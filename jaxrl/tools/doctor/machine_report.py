"""Describe a machine for a bug report: versions, devices, settings; no secrets."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import psutil

import jaxrl
from jaxrl.redaction import names_key, redacted

PACKAGES = """
    jax jaxlib libtpu jax-cuda12-plugin jax-cuda13-plugin flax optax orbax-checkpoint numpy scipy
    transformers tokenizers safetensors pyarrow ml-collections chex etils ray vllm aiohttp grpcio
    torch reasoning-gym
"""
VARIABLES = re.compile(
    "^(JAX|JAXRL|XLA|LIBTPU|TPU|CUDA|NVIDIA|NCCL|RAY|SLURM|OMP|MKL|HF|TRANSFORMERS|TOKENIZERS|VLLM|"
    "ROCR|HIP)_|^(LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|TF_CPP_MIN_LOG_LEVEL)$"
)


def machine_report() -> dict[str, Any]:
    """Return the whole report, fit for JSON."""
    return {
        "jaxrl": {"version": jaxrl.__version__, "commit": git_state()},
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "memory_gib": _gib(psutil.virtual_memory().total),
        "packages": packages(),
        "backend": jax.default_backend(),
        "processes": jax.process_count(),
        "devices": [_device(device) for device in jax.devices()],
        "driver": driver(),
        "settings": {
            name: jax.config.values.get(name)
            for name in (
                *("jax_platforms", "jax_default_matmul_precision", "jax_enable_x64"),
                *("jax_compilation_cache_dir", "jax_debug_nans", "jax_disable_jit"),
            )
        },
        "environment": variables(os.environ),
    }


def packages() -> dict[str, str]:
    """Return the versions of those `PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES.split():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that change what a run does; what may be secret is not shown."""

    def shown(name: str, value: str) -> str:
        return "<set>" if names_key(name) else redacted(value)

    return {name: shown(name, environ[name]) for name in sorted(environ) if VARIABLES.search(name)}


def git_state() -> str | None:
    """Return the commit of jaxrl's own folder, or None if it is no checkout.

    It says as well how many files differ from the commit.
    """
    folder = Path(jaxrl.__file__).parent.parent
    if shutil.which("git") is None or not (folder / ".git").exists():
        return None
    commit = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "-uno")
    if commit is None or changed is None:
        return None
    files = len(changed.splitlines())
    return f"{commit}, {files} files changed" if files else commit


def driver() -> str | None:
    """Return driver version, name and memory of NVIDIA's GPUs, or None."""
    if shutil.which("nvidia-smi") is None:
        return None
    wanted = "--query-gpu=driver_version,name,memory.total"
    return _output("nvidia-smi", wanted, "--format=csv,noheader")


def as_text(report: dict[str, Any]) -> str:
    """Return the report as text, a line for each fact."""
    lines = []
    for name, value in report.items():
        if isinstance(value, dict):
            lines += [f"{name}:"] + [f"  {key}: {x}" for key, x in value.items()]
        elif isinstance(value, list):
            lines += [f"{name}: {len(value)}"] + [f"  {x}" for x in _runs(value)]
        else:
            lines.append(f"{name}: {value}")
    return "\n".join(lines)


def _runs(items: list[str]) -> list[str]:
    """Return equal items once, with their number."""
    return [f"{items.count(item)} x {item}" for item in dict.fromkeys(items)]


def _device(device: Any) -> str:
    stats = device.memory_stats() or {}
    limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use")
    memory = f", {_gib(limit)} GiB, {_gib(used or 0)} GiB in use" if limit else ""
    return f"{device.device_kind} ({device.platform}) of process {device.process_index}{memory}"


def _gib(size: float) -> float:
    return round(size / 2**30, 2)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{command[0]}: {error}", file=sys.stderr)
        return None
    return done.stdout.strip()
