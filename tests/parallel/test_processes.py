"""Real jobs of two processes on this machine, gloo between them."""

import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxrl.parallel import agree, allgather, fetch, local_slice, put
from jaxrl.parallel.processes import ProcessError, joined_main, start_processes
from tests.jobs import ROOT, run

JOB = "tests/parallel/job.py"


def test_two_processes():
    for ended in run(["-m", "tests.parallel.job"], 2, devices=2):
        assert ended.status == 0, ended.error
        assert ended.out.endswith("all checked\n")


@pytest.mark.slow
def test_other_versions_are_refused():
    """Before a computation hangs or gives other bits, and with what differs."""
    for ended in run(["-m", "tests.parallel.job", "other_version"], 2, devices=2):
        assert ended.status != 0
        assert "ProcessError: process 1 on " in ended.error
        assert "has jaxrl 0.1, process 0 on " in ended.error
        assert "has 0.0: make them the same on all hosts" in ended.error


def test_one_process_needs_no_job():
    value = {"a": np.arange(3)}
    assert allgather(value) == [value]
    assert agree(value) is value
    assert local_slice([1, 2, 3]) == [1, 2, 3]
    arrays = put(value, None)
    assert isinstance(arrays["a"], jax.Array)
    np.testing.assert_array_equal(fetch(arrays)["a"], value["a"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"JAXRL_NUM_PROCESSES": "2"}, "without JAXRL_NUM_PROCESSES and JAXRL_PROCESS_ID: set"),
        ({"JAXRL_NUM_PROCESSES": "two"}, "JAXRL_NUM_PROCESSES='two' must be a whole number"),
    ],
)
def test_half_an_address(monkeypatch, given, message):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ProcessError, match=message):
        start_processes()


def test_importing_jaxrl_starts_no_backend():
    """`jax.distributed.initialize` must come before it."""
    code = (
        "import jaxrl.train, jaxrl.sft, jaxrl.serve\n"
        "from jax._src import xla_bridge\n"
        "raise SystemExit(len(xla_bridge._backends))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ((), "the same command resumes from the last checkpoint, if there is one"),
        (("the same command resumes after step 2",), "the same command resumes after step 2"),
    ],
)
def test_an_interrupt_outside_of_a_job_is_one_line(capsys, monkeypatch, said, shown):
    handlers = []
    monkeypatch.setattr(signal, "signal", lambda *given: handlers.append(given))

    def main(argv):
        raise KeyboardInterrupt(*said)

    assert joined_main(main, []) == 130
    assert handlers == [(signal.SIGINT, signal.SIG_DFL)]  # another one ends it here and now
    assert capsys.readouterr().err == f"interrupted; {shown}\n"
