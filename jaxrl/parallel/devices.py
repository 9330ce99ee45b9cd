"""The devices of this machine: whether JAX has those it was told to use, and their memory."""

import math
import os
import subprocess
import sys
from typing import Any

import jax
import psutil

from jaxrl import activity
from jaxrl.parallel.xla_flags import in_effect, set_flags

_FOUND = "import jax; d = jax.devices(); print(len(d), d[0].platform, 'of kind', d[0].device_kind)"
_SECONDS = 120


def check_devices() -> None:
    """Start JAX's platforms with the flags of `xla_flags`, before anything asks for a device.

    JAX passes over `cuda` without a word where there is no GPU, so that JAX_PLATFORMS=cuda,cpu
    would train on the CPU.

    Raises:
        ValueError: JAX_PLATFORMS (or `jax_platforms`) names one that cannot be used, or asks for an
            accelerator first where JAX has the CPU alone; says which devices there are.
    """
    set_flags()
    asked = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    try:
        platform = jax.devices()[0].platform
    except (RuntimeError, AssertionError) as error:
        if not asked:
            raise
        reason = str(error).partition(" (set JAX_PLATFORMS")[0] or "none of them could be started"
        raise _refused(asked, reason) from error
    first = (asked or platform).partition(",")[0]
    if platform == "cpu" != first:
        raise _refused(
            asked, f"{first} comes first, but JAX finds no such device and takes the CPU"
        )
    if platform == "gpu":
        activity.detail(in_effect())


def _refused(asked: str, reason: str) -> ValueError:
    """Return the error of a JAX_PLATFORMS that is not to be had."""
    return ValueError(
        f"JAX_PLATFORMS={asked}: {reason}. Without it there are: {_devices_without_choice()}. "
        "Unset JAX_PLATFORMS to use these, or install the JAX of the platform "
        "(pip install 'jaxrl[gpu]' or 'jaxrl[tpu]') on a machine that has it"
    )


def _devices_without_choice() -> str:
    """Describe the devices that JAX finds without JAX_PLATFORMS, asked in another process.

    In this one JAX would stay with what it started.
    """
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", _FOUND]
    try:
        found = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "none that start"
    return found.stdout.strip().splitlines()[-1]


def device_memory(device: Any) -> float:
    """Return the bytes of a device; host devices share the machine's."""
    if device.platform == "cpu":
        return psutil.virtual_memory().total / jax.local_device_count("cpu")
    return (device.memory_stats() or {}).get("bytes_limit", math.inf)
