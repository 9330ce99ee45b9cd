"""What XLA is told: which rows, what the user keeps, and that XLA knows them."""

import importlib.metadata
import os
import subprocess
import sys

import jax
import pytest

from jaxrl.parallel import xla_flags

SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler=true"
LOOPS = (
    "--xla_gpu_enable_command_buffer="
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
)
ATOMICS = "--xla_backend_extra_options=-nvptx-allow-ftz-atomics"


@pytest.fixture
def gpu_machine(monkeypatch):
    """As a process on a machine with GPUs, before JAX starts; a version of jaxlib can be chosen."""
    monkeypatch.setattr(xla_flags, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(xla_flags, "may_use_gpus", lambda: True)
    for name in ("XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", xla_flags.SWITCH):
        monkeypatch.setenv(name, "")  # so that it is undone, whoever sets it
        monkeypatch.delenv(name)

    def of(version):
        monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
        return monkeypatch

    return of


@pytest.mark.parametrize(
    ("jaxlib", "flags"),
    [
        ("0.10.1", [SCHEDULER]),
        ("0.10.2", [SCHEDULER, ATOMICS]),
        ("0.11.0", [SCHEDULER, ATOMICS]),
        ("0.11.1", [SCHEDULER]),
        ("0.11.2", [SCHEDULER, LOOPS]),
        ("0.12.0.1", [SCHEDULER]),
        ("0.13.0", []),  # nobody has tried whether it knows them
    ],
)
def test_the_rows_of_a_version(gpu_machine, jaxlib, flags):
    gpu_machine(jaxlib)
    xla_flags.set_flags()
    assert os.environ.get("XLA_FLAGS", "").split() == flags
    assert os.environ.get("XLA_CLIENT_MEM_FRACTION") == ("0.9" if flags else None)


def test_what_the_user_has_set_stays(gpu_machine):
    patch = gpu_machine("0.10.2")
    own = "--xla_gpu_enable_latency_hiding_scheduler=false --xla_dump_to=x"
    patch.setenv("XLA_FLAGS", own)
    patch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # JAX refuses both names together
    xla_flags.set_flags()
    assert os.environ["XLA_FLAGS"] == f"{own} {ATOMICS}"
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
    assert xla_flags.in_effect() == f"XLA: {ATOMICS} (JAXRL_XLA_FLAGS=none sets nothing)"


def test_set_twice_is_set_once(gpu_machine):
    gpu_machine("0.12.0")
    xla_flags.set_flags()
    xla_flags.set_flags()
    assert os.environ["XLA_FLAGS"] == SCHEDULER
    assert xla_flags.in_effect() == (
        f"XLA: {SCHEDULER}, XLA_CLIENT_MEM_FRACTION=0.9 (JAXRL_XLA_FLAGS=none sets nothing)"
    )


def test_none_sets_nothing_and_another_word_is_refused(gpu_machine):
    patch = gpu_machine("0.12.0")
    patch.setenv("JAXRL_XLA_FLAGS", "none")
    xla_flags.set_flags()
    assert "XLA_FLAGS" not in os.environ
    patch.setenv("JAXRL_XLA_FLAGS", "--xla_a=1")
    with pytest.raises(ValueError, match="JAXRL_XLA_FLAGS='--xla_a=1' must be auto or none; flags"):
        xla_flags.set_flags()


def test_gpus_are_looked_for_where_their_plugin_is_and_the_platform_is_not_another(monkeypatch):
    def version(name):
        if name != "jax-cuda13-plugin":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.12.0"

    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    assert not xla_flags.may_use_gpus()  # JAX_PLATFORMS=cpu
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert not xla_flags.may_use_gpus()
    before = jax.config.jax_platforms
    try:
        for platforms, expected in (("", True), ("cuda,cpu", True), ("tpu,cpu", False)):
            jax.config.update("jax_platforms", platforms)
            assert xla_flags.may_use_gpus() == expected
        monkeypatch.setattr(importlib.metadata, "version", none)
        jax.config.update("jax_platforms", "")
        assert not xla_flags.may_use_gpus()  # no plugin
    finally:
        jax.config.update("jax_platforms", before)


def test_the_installed_xla_knows_the_flags_and_they_are_there_before_it_starts():
    """XLA parses those of all its platforms when the first starts, and aborts at an unknown one."""
    code = (
        "import os, jax\n"
        "from jaxrl.parallel import devices, xla_flags\n"
        "xla_flags.may_use_gpus = lambda: True\n"
        "devices.check_devices()\n"
        "print(os.environ['XLA_FLAGS'], jax.jit(lambda x: 3 * x)(2))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(SCHEDULER) and done.stdout.endswith(" 6\n")
