"""What the launcher refuses before it starts anything."""

import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import ray

from jaxrl.cluster import initialize, launch, settings
from jaxrl.cluster.experiment import pack_job
from jaxrl.config import (
    TrainConfig,
    apply_overrides,
    load_config_file,
    resolve,
    to_train_config,
)
from jaxrl.config.recipe import converted
from jaxrl.registry.pickling import unpack
from jaxrl.train import BasePPOExp
from tests.test_train import QUICKSTART

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_ray(monkeypatch):
    """Neither Ray nor a process may be started."""

    def fail(*args, **kwargs):
        raise AssertionError("something was started")

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(subprocess, "Popen", fail)


def refused(capsys, *words):
    assert launch.main([f"--config={QUICKSTART}", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config.trainer.cluster.max_restarts=-1"], "cluster.max_restarts=-1: must not be neg"),
        (["--config.trainer.cluster.processes_per_host=0"], "processes_per_host=0: must be posit"),
        (["--config.trainer.placement.policy_num_nodes=0"], "policy_num_nodes=0: must be positive"),
        (["--config.trainer.epochs=0"], "trainer.epochs=0: must be positive"),
        (["--config.trainer.policy.mesh.tensor=3"], "the sizes must"),
        (["--local-processes=two"], "--local-processes=two: give the number of processes, e.g."),
        (["--module=jaxrl.sft"], "--module=jaxrl.sft: needs --no-ray or --local-processes=N"),
        (["--hosts=2"], "unknown argument '--hosts=2'"),
        # 8 devices of a host, in three processes
        (["--config.trainer.cluster.processes_per_host=3"], "3 processes with 8 devices in all"),
    ],
)
def test_a_wrong_config_starts_nothing(no_ray, capsys, words, message):
    assert message in refused(capsys, *words)


def test_without_ray_the_config_is_refused_too_and_the_launcher_has_no_jax(tmp_path):
    """jax and ray may be missing where the launcher runs: they are made so."""
    code = """
import sys
sys.modules["jax"] = sys.modules["ray"] = None
from jaxrl.cluster.launch import main
sys.exit(main(sys.argv[1:]))
"""
    words = ["--local-processes=3", f"--config={QUICKSTART}"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert done.stderr == "error: 3 processes with 8 devices in all: give each as many\n"


@pytest.mark.slow
def test_one_process_without_a_cluster_is_refused_and_not_started_again(tmp_path):
    words = "--no-ray", f"--config={QUICKSTART}", f"--config.trainer.log_path={tmp_path}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COORDINATOR")}
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl.cluster.launch", *words],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 2
    assert done.stdout.startswith("error: JAX found no cluster here (coordinator_address should")
    assert "JAXRL_NUM_PROCESSES and JAXRL_PROCESS_ID on every host" in done.stdout
    assert "jaxrl launch --local-processes=2" in done.stdout
    assert done.stderr == "launch: process 0 ended with status 2\n"


def test_help_names_every_way_of_starting(capsys):
    assert launch.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "--local-processes=2" in out and "--no-ray" in out


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"RAY_ADDRESS='127.0.0.1:1' does not answer \(.*refused"),
        ("10.0.0.1", r"RAY_ADDRESS='10.0.0.1' does not answer .*host:port is expected"),
        ("ray://10.0.0.1:10001", "Ray Client cannot start processes; run the launcher on a host"),
    ],
)
def test_a_cluster_that_does_not_answer_is_named(monkeypatch, no_ray, capsys, address, message):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with (
        pytest.raises(ValueError, match=message),
        initialize.joined_ray(load_config_file(QUICKSTART)),
    ):
        pass


def test_a_cluster_of_other_versions_is_named(monkeypatch):
    def init(**options):
        raise RuntimeError("Version mismatch: The cluster was started with: Ray: 2.9")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.raises(ValueError, match="cannot join Ray: Version mismatch"),
        initialize.joined_ray(load_config_file(QUICKSTART), address="auto"),
    ):
        pass


def test_an_experiment_that_cannot_be_pickled_is_named(no_ray):
    lock = threading.Lock()

    class LockedExp(BasePPOExp):
        def run(self):
            with lock:
                return super().run()

    with pytest.raises(ValueError, match="experiment LockedExp cannot be pickled .*lock"):
        launch.launch(load_config_file(QUICKSTART), LockedExp)


def test_an_experiment_and_a_config_class_travel_by_value(tmp_path, monkeypatch):
    """Loaded where neither can be imported."""
    (tmp_path / "mine.py").write_text("""
from dataclasses import dataclass
from jaxrl.config import AlgorithmConfig, make_config
from jaxrl.train import BasePPOExp

@dataclass
class MyAlgorithmConfig(AlgorithmConfig):
    my_param: int = 42

class MyExp(BasePPOExp):
    def run(self):
        return helper(self.config)

def helper(config):
    return config.trainer.algorithm.my_param + 1

def get_config():
    return make_config(algorithm_cls=MyAlgorithmConfig)()
""")
    monkeypatch.syspath_prepend(tmp_path)
    import mine  # type: ignore[import-not-found]

    job = pickle.loads(pickle.dumps(pack_job(resolve(mine.get_config()), mine.MyExp)))
    monkeypatch.undo()
    sys.modules.pop("mine")
    experiment = unpack(job.experiment, "experiment")[0]
    made = experiment.__new__(experiment)
    made.config = pickle.loads(job.config)
    assert made.run() == 43
    assert "mine" not in sys.modules


def test_the_launcher_reads_what_it_needs_of_a_recipe(tmp_path, capsys):
    words = [f"--config={QUICKSTART}", f"--config.trainer.log_path={tmp_path}"]
    assert settings.main(["--processes=2", *words, "--config.trainer.cluster.max_restarts=7"]) == 0
    found = settings.Settings(*json.loads(capsys.readouterr().out))
    assert (found.max_restarts, found.resume_mode) == (7, "latest")
    assert found.log(1) == tmp_path / "quickstart" / "logs" / "process_1.log"
    assert found.limits() == {
        "JAXRL_START_SECONDS": "300",
        "JAXRL_HEARTBEAT_SECONDS": "100",
        "JAXRL_STALL_SECONDS": "auto",
    }
    assert found._replace(stall_seconds=45).limits()["JAXRL_STALL_SECONDS"] == "45"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("environment.env_class", "__main__:Mine"),
        ("environment.reward_functions", ["jaxrl_recipe_mine:reward(weight=2)"]),
        ("trainer.watching.callbacks", ["__main__:Told"]),
        ("data.train_data", ["__main__:rows(size=3)"]),
    ],
)
def test_what_only_this_process_finds_is_refused_with_the_remedy(field, value):
    config = apply_overrides(TrainConfig(), {field: value})
    path = value if isinstance(value, str) else value[0]
    with pytest.raises(ValueError) as raised:
        pack_job(config, BasePPOExp)
    assert str(raised.value).startswith(f"{field}: {path} is defined in a script, a notebook or")
    assert str(raised.value).endswith("put it into a module of its own, and import it from there")


def test_given_rows_reach_the_other_processes(tmp_path):
    """Each writes the file: they may have no disk in common."""
    rows = {"data": {"train_data": [{"prompt": "21"}]}, "trainer": {"log_path": str(tmp_path)}}
    sent = pickle.loads(pack_job(resolve(converted(rows)), BasePPOExp).config)
    assert not list(tmp_path.iterdir())
    (file,) = to_train_config(sent).data.train_data
    assert Path(file).read_text() == '{"prompt": "21"}\n'
