"""Jobs whose engines span processes: the bits of one process for each engine, whoever is killed."""

import os
import signal

import pytest

from tests import quick_compile
from tests.cluster.test_child import wait_until_dead
from tests.cluster.test_job import LOCAL, Launched, assert_same, job_text
from tests.test_processes import checksums

pytestmark = pytest.mark.slow

EIGHT = {"XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {quick_compile.FLAGS}"}
TENSOR = {"generator.inference_engine.tensor_parallel_size": 4}
SPANNING = {**TENSOR, "generator.inference_engine.hosts_per_engine": 2}


def launched(folder):
    """Four processes of two devices, and two engines."""
    return Launched(folder, LOCAL.format(4), environment=EIGHT, **SPANNING)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and the parameters of a job that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, launched(folder).finish()


def test_they_are_those_of_one_process_for_each_engine(whole, tmp_path):
    """Two processes of four devices have the same mesh, engines and shares of the prompts."""
    found = Launched(tmp_path, LOCAL.format(2), environment=EIGHT, **TENSOR).finish()
    assert_same(found, whole[1])
    assert checksums(tmp_path) == checksums(whole[0])


@pytest.mark.parametrize("index", ["1", "2"])  # a follower; the leader of the other engine
def test_a_killed_process_costs_no_step(whole, tmp_path, index):
    job = launched(tmp_path)
    job.wait_for(2)
    pids = job.pids()
    os.kill(pids[index], signal.SIGKILL)
    assert_same(job.finish(), whole[1])
    assert "restart 1 of 3 in a row, after step" in job_text(tmp_path)
    wait_until_dead(*pids.values())


def test_a_killed_launcher_leaves_nothing(whole, tmp_path):
    job = launched(tmp_path)
    job.wait_for(2)
    pids = job.pids()
    job.process.kill()
    job.process.wait()
    wait_until_dead(*pids.values())
    assert_same(launched(tmp_path).finish(), whole[1])
