"""JAX_PLATFORMS that names what is not there."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from jaxrl.parallel.devices import check_devices


def fails(error):
    def devices():
        raise error

    return devices


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AssertionError(), "none of them could be started"),  # JAX's, of cuda without its plugin
        (
            RuntimeError("no libtpu.so (set JAX_PLATFORMS='' to automatically choose one)"),
            "no libtpu.so",
        ),
    ],
)
def test_the_platform_the_devices_that_there_are_and_the_fix_are_one_line(
    monkeypatch, error, reason
):
    monkeypatch.setattr("jaxrl.parallel.devices._devices_without_choice", lambda: "1 cpu of kind x")
    monkeypatch.setattr(jax, "devices", fails(error))
    with pytest.raises(ValueError) as refused:
        check_devices()
    assert str(refused.value) == (
        f"JAX_PLATFORMS=cpu: {reason}. Without it there are: 1 cpu of kind x. Unset JAX_PLATFORMS "
        "to use these, or install the JAX of the platform (pip install 'jaxrl[gpu]' or "
        "'jaxrl[tpu]') on a machine that has it"
    )


@pytest.mark.parametrize(
    ("asked", "platform", "first"),
    [
        ("cuda,cpu", "cpu", "cuda"),  # JAX passes over cuda where there is no /dev/nvidia*
        ("gpu,cpu", "cpu", "gpu"),
        ("cuda,cpu", "gpu", None),  # what JAX calls the platform of cuda
        ("tpu,cpu", "tpu", None),
        ("cpu", "cpu", None),
        ("cpu,cuda", "cpu", None),
        ("", "cpu", None),
        (None, "cpu", None),
    ],
)
def test_the_cpu_does_not_stand_in_for_an_accelerator(monkeypatch, asked, platform, first):
    device = SimpleNamespace(platform=platform)
    monkeypatch.setattr("jaxrl.parallel.devices._devices_without_choice", lambda: "1 cpu of kind x")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr("jaxrl.parallel.devices.set_flags", lambda: None)
    monkeypatch.setattr(jax, "config", SimpleNamespace(jax_platforms=asked))
    if first is None:
        check_devices()
        return
    with pytest.raises(ValueError) as refused:
        check_devices()
    assert str(refused.value).startswith(
        f"JAX_PLATFORMS={asked}: {first} comes first, but JAX finds no such device and takes the "
        "CPU. Without it there are: 1 cpu of kind x. Unset JAX_PLATFORMS to use these, or install "
    )


def test_what_jax_chose_itself_is_not_blamed_on_the_variable(monkeypatch):
    monkeypatch.setattr(jax, "devices", fails(RuntimeError("the chip is in use")))
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    try:
        with pytest.raises(RuntimeError, match="^the chip is in use$"):
            check_devices()
    finally:
        jax.config.update("jax_platforms", before)


@pytest.mark.slow  # two processes that import JAX
def test_a_command_ends_with_one_line():
    command = [sys.executable, "-m", "jaxrl.doctor", "--config=configs/quickstart.py"]
    done = subprocess.run(
        command,
        env=os.environ | {"JAX_PLATFORMS": "nonsense"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: JAX_PLATFORMS=nonsense: ")
    assert "Without it there are: " in line and "none that start" not in line
