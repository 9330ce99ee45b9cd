"""What XLA is told before a platform starts: one table, with the reason of each row.

A flag that XLA does not know ends the process, so each row names the versions that know and need
it. What the user has set stays. JAXRL_XLA_FLAGS=none sets nothing: it is a variable and no field of
the config, because the processes of a job start their platforms before they read one.

On TPUs nothing is set: as libtpu 0.0.42 compiles a step, the gathers of a layer's weights are
asynchronous already. Flags for what is left await a TPU to measure them on.

Considered for GPUs, and left as XLA has them: `--xla_gpu_deterministic_ops` and
`--xla_gpu_exclude_nondeterministic_ops`. They make the sum of the embedding's gradient, the one
scatter of a step of flat rows (prefix trees have more), the same in every run. But that scatter has
been a loop over the tokens, one at a time (https://github.com/openxla/xla/pull/17886), and then
wrong at index 0 (https://github.com/openxla/xla/pull/31063); the first flag also turns autotuning
off. So they are the user's choice: where `jaxrl doctor` finds a resumed step that differs it names
the flag.
"""

import importlib.metadata
import os
from typing import NamedTuple

import jax
from packaging.specifiers import SpecifierSet

from jaxrl.parallel.jax_internals import backends_are_initialized

SWITCH = "JAXRL_XLA_FLAGS"
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
OLD_NAMES = {"XLA_CLIENT_MEM_FRACTION": "XLA_PYTHON_CLIENT_MEM_FRACTION"}


class Setting(NamedTuple):
    """Describe what XLA is told on GPUs.

    Attributes:
        variable: of the environment; XLA_FLAGS holds several.
        text: "--name=value" of XLA_FLAGS, else the whole value.
        jaxlib: versions that it is for.
        reason: why, and who says so.
    """

    variable: str
    text: str
    jaxlib: str
    reason: str

    @property
    def name(self) -> str:
        """Return what the user would set instead."""
        return self.text.partition("=")[0] if self.variable == "XLA_FLAGS" else self.variable


ON_GPUS = (
    Setting(
        "XLA_FLAGS",
        "--xla_gpu_enable_latency_hiding_scheduler=true",
        ">=0.10,<0.13",
        "weights of the next layer are gathered while this one computes; off by default. "
        "https://docs.jax.dev/en/latest/gpu_performance_tips.html",
    ),
    Setting(
        "XLA_FLAGS",
        "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
        "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
        ">=0.11.2,<0.12",
        "with CONDITIONAL and WHILE beside the usual ones the GPU drives the loop over the steps "
        "of a block itself, and no step waits for the host: a decode step of 1.60 ms (blocks of "
        "32) took 1.34 on an H100; on an H200 updates took as long as before, and jaxrl doctor "
        "compared sampler and trainer (LOG.md)",
    ),
    Setting(
        "XLA_FLAGS",
        "--xla_backend_extra_options=-nvptx-allow-ftz-atomics",
        ">=0.10.2,<0.11.1",
        "the embedding's gradient adds rows of one token by a loop of compare-and-swap, hundreds "
        "of times slower, lest a subnormal sum become 0. https://github.com/jax-ml/jax/issues/38806",
    ),
    Setting(
        "XLA_CLIENT_MEM_FRACTION",
        "0.9",
        ">=0.10,<0.13",
        "of the GPU's memory, which a run has for itself; JAX takes 0.75. The rest is for CUDA, "
        "NCCL and graphs. https://docs.jax.dev/en/latest/gpu_memory_allocation.html",
    ),
)


def set_flags() -> None:
    """Tell XLA what the table has for this process, unless a platform has started already.

    Raises:
        ValueError: JAXRL_XLA_FLAGS is neither "auto" nor "none".
    """
    switch = os.environ.get(SWITCH, "auto")
    if switch not in ("auto", "none"):
        raise ValueError(
            f"{SWITCH}={switch!r} must be auto or none; flags of your own go into XLA_FLAGS, and "
            "outrank those of jaxrl"
        )
    if switch == "none" or backends_are_initialized() or not may_use_gpus():
        return
    for setting in settings_for(importlib.metadata.version("jaxlib")):
        present = os.environ.get(setting.variable)
        if setting.variable == "XLA_FLAGS":
            words = (present or "").split()
            if setting.name not in (word.partition("=")[0] for word in words):
                os.environ["XLA_FLAGS"] = " ".join([*words, setting.text])
        elif present is None and OLD_NAMES[setting.variable] not in os.environ:
            os.environ[setting.variable] = setting.text


def settings_for(jaxlib: str) -> list[Setting]:
    """Return the rows of the table for a version of jaxlib."""
    return [x for x in ON_GPUS if SpecifierSet(x.jaxlib).contains(jaxlib, prereleases=True)]


def may_use_gpus() -> bool:
    """Return whether JAX will look for GPUs of CUDA, without starting it."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and platforms.partition(",")[0] not in ("cuda", "gpu"):
        return False
    for plugin in PLUGINS:
        try:
            importlib.metadata.version(plugin)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False


def in_effect() -> str:
    """Return what of the table is set, in one line: "XLA: --xla_a=true, XLA_B=0.9 (...)"."""
    here = []
    for setting in settings_for(importlib.metadata.version("jaxlib")):
        if setting.text in os.environ.get(setting.variable, "").split():
            prefix = "" if setting.variable == "XLA_FLAGS" else f"{setting.variable}="
            here.append(prefix + setting.text)
    return f"XLA: {', '.join(here) or 'as it is'} ({SWITCH}=none sets nothing)"
