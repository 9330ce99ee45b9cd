"""Jobs that the launcher starts: killed in every way, they end with the parameters of the job that
was left alone."""

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from jaxrl.cluster.guard import descendants
from tests import quick_compile
from tests.cluster.test_child import wait_until_dead
from tests.jobs import ROOT
from tests.test_processes import arguments, assert_close, exported, trained

pytestmark = pytest.mark.slow

DEVICES = 4  # of the job, divided by its processes
EVERY_STEP = {"trainer.ckpt_interval": 1, "trainer.cluster.restart_backoff_seconds": 0.1}
LOCAL, RAY = "--local-processes={}", "--config.trainer.cluster.processes_per_host={}"


class Launched:
    """`python -m jaxrl.cluster.launch`, which trains into a folder."""

    def __init__(self, folder: Path, *words: str, environment=None, **overrides) -> None:
        self.folder = folder
        settings = {**EVERY_STEP, **overrides}
        given = arguments(folder, module="jaxrl.cluster.launch", **settings)
        flags = f"--xla_force_host_platform_device_count={DEVICES}"
        folder.mkdir(exist_ok=True)
        self.log = (folder / "launcher.log").open("a+")
        self.process = subprocess.Popen(
            [sys.executable, *given, *words],
            cwd=ROOT,
            env={
                **os.environ,
                "XLA_FLAGS": f"{flags} {quick_compile.FLAGS}",
                "RAY_ADDRESS": "local",  # not that of another test
                **(environment or {}),
            },
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def wait_for(self, step: int) -> None:
        """Until its checkpoint is there, and the next step goes on."""
        deadline = time.monotonic() + 400
        while not (self.folder / f"checkpoints/global_step_{step}").exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.02)
        time.sleep(0.3)

    def pids(self) -> dict[str, int]:
        """Processes of the job, by their numbers, and those of Ray that run actors, by class."""
        found = {}
        for pid in descendants(self.process.pid):
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
            index = [x.partition("=")[2] for x in environment if x.startswith("JAXRL_PROCESS_ID=")]
            if command.startswith("ray::"):
                found[command.removeprefix("ray::").split(".")[0].strip()] = pid
            elif index and "guard.py" not in command and "-m jaxrl." in command:
                found[index[0]] = pid
        return found

    def finish(self):
        """The parameters, once it has ended well."""
        try:
            assert self.process.wait(600) == 0, self.said()
        finally:
            self.process.kill()
            self.log.close()
        return exported(self.folder)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The parameters of two processes that nobody disturbs."""
    return Launched(tmp_path_factory.mktemp("whole"), LOCAL.format(2)).finish()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Those of one process, which was not launched."""
    return trained(tmp_path_factory.mktemp("alone"), 1, **EVERY_STEP)


def test_two_processes_without_ray_are_one(whole, alone):
    assert_close(whole, alone)


def test_two_processes_of_a_ray_actor_are_two_without(whole, tmp_path):
    job = Launched(tmp_path, RAY.format(2))
    assert_same(job.finish(), whole)
    logs = [tmp_path / f"quickstart/logs/process_{i}.log" for i in range(2)]
    assert all(log.read_text().startswith("--- process ") for log in logs)


def test_four_processes_of_a_ray_actor_are_one(alone, tmp_path):
    assert_close(Launched(tmp_path, RAY.format(4)).finish(), alone)


@pytest.mark.parametrize("how", [LOCAL, RAY])
@pytest.mark.parametrize("index", ["0", "1"])
def test_a_killed_process_costs_no_step(whole, tmp_path, how, index):
    job = Launched(tmp_path, how.format(2))
    job.wait_for(2)
    pids = job.pids()
    os.kill(pids[index], signal.SIGKILL)
    assert_same(job.finish(), whole)
    assert "restart 1 of 3 in a row, after step" in job_text(tmp_path)
    wait_until_dead(pids["0"], pids["1"])


def test_a_process_that_stands_still_costs_no_step(whole, tmp_path):
    stall = {
        "trainer.cluster.stall_seconds": 30,
        "trainer.watching.callbacks": "['tests.cluster.stalling_job:StandsStillOnce']",
    }
    mark = {"STOOD_STILL": str(tmp_path / "stood_still")}
    assert_same(Launched(tmp_path, LOCAL.format(2), environment=mark, **stall).finish(), whole)
    assert (tmp_path / "stood_still").exists()
    said = re.search("launch: the job stands still: (.*)", job_text(tmp_path))[1]
    assert said.startswith("process 1 on ")
    assert ": on_step_start of step 4, nothing done for 3" in said
    assert said.endswith("; restart 1 of 3 in a row, after step 3, in 0.1 s")


def test_a_killed_actor_costs_no_step(whole, tmp_path):
    """As a host that is lost: what it ran ends with it, and another actor takes its place."""
    job = Launched(tmp_path, RAY.format(2))
    job.wait_for(2)
    pids = job.pids()
    os.kill(pids["HostActor"], signal.SIGKILL)
    wait_until_dead(pids["0"], pids["1"])
    assert_same(job.finish(), whole)
    assert "was lost with its host; restart 1 of 3" in job_text(tmp_path)


@pytest.mark.parametrize("how", [LOCAL, RAY])
def test_a_killed_launcher_leaves_nothing_and_goes_on_when_it_is_started_again(
    whole, tmp_path, how
):
    job = Launched(tmp_path, how.format(2))
    job.wait_for(2)
    pids = job.pids()
    job.process.kill()
    job.process.wait()
    wait_until_dead(pids["0"], pids["1"])
    assert not (tmp_path / "checkpoints/global_step_5").exists()
    assert_same(Launched(tmp_path, how.format(2)).finish(), whole)
    assert "resuming after step" in job_text(tmp_path)


def test_a_launcher_on_each_host(whole, tmp_path):
    """A host's launcher starts its process again, and so do the others theirs."""
    from jaxrl.rollout.remote.vllm_process import free_port

    shared = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAXRL_NUM_PROCESSES": "2"}
    flags = f"--xla_force_host_platform_device_count={DEVICES // 2}"
    shared["XLA_FLAGS"] = f"{flags} {quick_compile.FLAGS}"
    jobs = [
        Launched(tmp_path, "--no-ray", environment={**shared, "JAXRL_PROCESS_ID": str(index)})
        for index in range(2)
    ]
    jobs[0].wait_for(2)
    os.kill(jobs[1].pids()["1"], signal.SIGKILL)
    for job in jobs:
        parameters = job.finish()
    assert_same(parameters, whole)


def test_hosts_are_nodes_of_a_ray_cluster(whole, tmp_path):
    """Two nodes on this machine have a process each, and one of them goes away with its own; a
    third one takes its place."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        second = cluster.add_node(num_cpus=1)
        environment = {
            "RAY_ADDRESS": cluster.address,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // 2} "
            + quick_compile.FLAGS,
        }
        nodes = {"trainer.placement.policy_num_nodes": 2}
        job = Launched(tmp_path, environment=environment, **nodes)
        job.wait_for(2)
        cluster.remove_node(second)
        cluster.add_node(num_cpus=1)
        assert_same(job.finish(), whole)
    finally:
        cluster.shutdown()
    assert "restart 1 of 3 in a row" in job_text(tmp_path)


@pytest.mark.parametrize("victim", ["1", None])
def test_a_job_ends_with_a_checkpoint_of_the_step_that_was_being_done(whole, tmp_path, victim):
    """Whether the launcher is told or one process; test_signals.py has one process in `make test`.

    SIGTERM to a process tells the other one, which has none, and the launcher starts both again.
    """
    settings = {
        "trainer.ckpt_interval": 100,  # which is none but that of the end
        "trainer.watching.callbacks": "['tests.cluster.stalling_job:TakesItsTime']",
    }
    job = Launched(tmp_path, LOCAL.format(2), **settings)
    lines = tmp_path / "quickstart" / "metrics.jsonl"
    while not lines.exists() or len(lines.read_text().splitlines()) < 2:
        assert job.process.poll() is None, job.said()
        time.sleep(0.01)
    os.kill(job.pids()[victim] if victim else job.process.pid, signal.SIGTERM)
    assert job.process.wait(600) == (0 if victim else 143), job.said()
    said = job.said()
    line = r"SIGTERM: ended after step (\d); the same command resumes after step \1"
    step = re.search(line, said)
    assert step, said
    assert (tmp_path / f"checkpoints/global_step_{step[1]}").is_dir()
    assert "Traceback" not in said
    again = f"was ended by SIGTERM; restart 1 of 3 in a row, after step {step[1]}, in"
    assert (again in said) == bool(victim) == ("restart" in said)
    found = job if victim else Launched(tmp_path, LOCAL.format(2), **settings)
    assert_same(found.finish(), whole)
    with closing(sqlite3.connect(tmp_path / "quickstart" / "run.db")) as db:
        done = db.execute("SELECT step FROM steps ORDER BY id").fetchall()
    assert [number for (number,) in done] == [1, 2, 3, 4, 5]  # none of them twice


def job_text(folder: Path) -> str:
    return (folder / "launcher.log").read_text()


def test_the_folder_of_a_job_is_its_own(whole, tmp_path):
    """What one of several processes refuses ends all, once, and is not tried again."""
    shutil.copytree(ROOT / "configs" / "tiny_char_model", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{")
    job = Launched(tmp_path, LOCAL.format(2), **{"trainer.policy.model.path": tmp_path / "model"})
    assert job.process.wait(300) == 2
    assert job_text(tmp_path).count("error: ") == 1
    assert "restart" not in job_text(tmp_path)
