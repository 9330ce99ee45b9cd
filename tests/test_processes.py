"""Training in jobs of several processes: the same parameters as one process, bit for bit between
them; checkpoints of one job in another; errors that one process has alone."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.audit import audit
from jaxrl.models import hf
from jaxrl.models.transformer import init_params
from jaxrl.records.lease import FolderLock
from jaxrl.rollout.server.build import make_server
from jaxrl.rollout.weights.incoming import Incoming
from tests.jobs import run
from tests.rollout.http_servers import FakeServer
from tests.rollout.server.conftest import model_folder, serve_config

pytestmark = pytest.mark.slow

STEPS = 5
SETTINGS = {
    "data.train_data": "['jaxrl.envs.toys.sort_digits:prompts(size=20, seed=0)']",
    "data.val_data": "['jaxrl.envs.toys.sort_digits:prompts(size=3, seed=1)']",
    "trainer.train_batch_size": 4,
    "trainer.policy_mini_batch_size": 2,
    "trainer.micro_train_batch_size_per_gpu": 1,
    "trainer.micro_forward_batch_size_per_gpu": 2,
    "generator.n_samples_per_prompt": 4,
    "generator.sampling_params.max_generate_length": 3,
    "trainer.policy.optimizer_config.scheduler": "constant",
    "trainer.algorithm.use_kl_loss": True,
    "trainer.eval_interval": STEPS,
    "trainer.ckpt_interval": 3,
    "trainer.hf_save_interval": STEPS,
    "trainer.logger": "jsonl",
}


def arguments(folder, *, module="jaxrl.train", steps=STEPS, **overrides):
    """A command that trains the quickstart's model into `folder`."""
    where = {
        "trainer.max_training_steps": steps,
        "trainer.log_path": folder,
        "trainer.ckpt_path": folder / "checkpoints",
        "trainer.export_path": folder / "exports",
    }
    settings = SETTINGS | where | overrides
    said = [f"--config.{name}={value}" for name, value in settings.items()]
    return ["-m", module, "--config=configs/quickstart.py", *said]


def trained(folder, count, devices=4, **overrides):
    """Run it on so many processes, which share the devices; the parameters after the last step."""
    for ended in run(arguments(folder, **overrides), count, devices=devices // count):
        assert ended.status == 0, ended.error[-3000:]
    return exported(folder)


def exported(folder):
    """The parameters after the last step: of the model, or of its adapters."""
    (file,) = (folder / f"exports/global_step_{STEPS}/policy").glob("*model.safetensors")
    return load_file(file)


def checksums(folder):
    """Step -> checksums of its batch and state, as the ledger has them."""
    with closing(sqlite3.connect(folder / "quickstart" / "run.db")) as db:
        rows = db.execute("SELECT step, checksums FROM steps WHERE superseded IS NULL")
        return {step: json.loads(numbers) for step, numbers in rows}


def assert_close(found, wanted, bound=2e-5):
    """The difference of each tensor in relation to its size."""
    for name, array in wanted.items():
        difference = np.linalg.norm(found[name] - array) / np.linalg.norm(array)
        assert difference <= bound, (name, difference)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of whole runs by number of processes."""
    folders = {count: tmp_path_factory.mktemp(f"of_{count}") for count in (1, 2, 4)}
    for count, folder in folders.items():
        trained(folder, count)
    return folders


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_are_one(runs, count):
    """Each step, all processes compare the bits of batch and state before it is recorded."""
    assert_close(exported(runs[count]), exported(runs[1]))
    assert sorted(checksums(runs[count])) == [1, 2, 3, 4, 5]
    of_batch = [
        {k: v for k, v in checksums(runs[n])[1].items() if "tokens" in k or "rewards" in k}
        for n in (1, count)
    ]
    assert of_batch[0] == of_batch[1] != {}  # the same trajectories, whoever sampled them


def test_samples_that_go_on_in_the_next_step(tmp_path):
    """All processes have the groups that wait, whoever sampled them, and go on from there."""
    carries = {
        "data.train_data": "['jaxrl.envs.toys.sort_digits:prompts(size=8, seed=0)']",
        "trainer.epochs": STEPS,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.algorithm.policy_loss_type": "rollout_is",
        "generator.longest_first": True,
        "generator.sampling_params.max_generate_length": 7,
        "generator.partial_rollouts.max_tokens_per_step": 3,
        "generator.partial_rollouts.extra_prompts": 3,
        "generator.inference_engine.speculative_tokens": 3,
        "generator.inference_engine.speculative_history": 32,
    }
    found = {n: trained(tmp_path / f"of_{n}", n, **carries) for n in (1, 2)}
    assert_close(found[2], found[1])
    since = {
        "trainer.resume_mode": "from_path",
        "trainer.resume_path": tmp_path / "of_2/checkpoints/global_step_4",
    }
    again = trained(tmp_path / "again", 2, **carries, **since)
    for name, array in found[2].items():
        np.testing.assert_array_equal(again[name], array)
    for folder in ("of_2", "again"):
        failed = {c.name: c.failures for c in audit(tmp_path / folder / "quickstart") if c.failures}
        assert not failed


def test_what_is_written_once(runs):
    """By process 0; the others have their own times, in folders of their own."""
    folder = runs[2] / "quickstart"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    others = folder / "processes" / "1"
    assert len(lines) == len((others / "metrics.jsonl").read_text().splitlines())
    assert not (others / "run.db").exists()
    assert sorted(p.name for p in (folder / "processes").iterdir()) == ["1"]
    assert "eval/all/avg_score" in json.loads(lines[-1])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_checkpoint_of_four_restores_on(runs, tmp_path, count):
    """Restored, its checksums are compared; two more steps give the parameters of the whole run."""
    shutil.copytree(runs[4] / "checkpoints" / "global_step_3", tmp_path / "of_four/global_step_3")
    continued = trained(
        tmp_path / "continued",
        count,
        **{
            "trainer.resume_mode": "from_path",
            "trainer.resume_path": tmp_path / "of_four/global_step_3",
        },
    )
    if count == 4:
        for name, array in exported(runs[4]).items():
            np.testing.assert_array_equal(continued[name], array)
    assert_close(continued, exported(runs[1]))


def test_a_job_of_two_is_replayed_by_two(runs):
    """Bit for bit, from its checkpoint of step 3; so many processes are said to be needed."""
    folder = str(runs[2] / "quickstart")
    launch = ["-m", "jaxrl.cluster.launch", "--local-processes=2", "--module=jaxrl.replay"]
    (ended,) = run([*launch, folder], 1, devices=4)
    assert ended.status == 0, ended.error[-3000:]
    for step in (3, 4, 5):
        assert f"step {step}: bit-identical" in ended.out
    assert "other machines" not in ended.out
    (alone,) = run(["-m", "jaxrl.replay", folder, "--step=4"], 1, devices=4)
    assert alone.status in (0, 1), alone.error[-3000:]  # sums may be in another order
    assert "the run had 2 process(es), and this is 1" in alone.out


def test_supervised(tmp_path):
    """`jaxrl.sft` too."""
    found = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        argv = [
            "-m",
            "jaxrl.sft",
            "--config=configs/sft_addition.py",
            "--config.trainer.train_batch_size=4",
            "--config.trainer.max_training_steps=2",
            "--config.trainer.micro_train_batch_size_per_gpu=1",
            "--config.trainer.eval_interval=-1",
            "--config.trainer.hf_save_interval=2",
            f"--config.trainer.log_path={folder}",
            f"--config.trainer.ckpt_path={folder / 'checkpoints'}",
            f"--config.trainer.export_path={folder / 'exports'}",
        ]
        for ended in run(argv, count, devices=4 // count):
            assert ended.status == 0, ended.error[-3000:]
        (weights,) = Path(folder).glob("exports/*/policy/model.safetensors")
        found[count] = load_file(weights)
    assert_close(found[2], found[1])


def test_a_second_job_is_refused_by_all_its_processes(tmp_path):
    """Process 0 alone asks for the folders that they share; nothing is made for the others."""
    lock = FolderLock(tmp_path / "checkpoints", "runs/first")
    for ended in run(arguments(tmp_path), 2, devices=1):
        assert ended.status == 2
        assert f"another run goes on in {tmp_path}/checkpoints: the run runs/first" in ended.error
    assert not (tmp_path / "quickstart").exists()
    lock.close()


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("reward", 70, "RuntimeError: the judge of process 1 is away"),
        ("bits", 2, "process 1 has other bits than process 0 in batch.advantages and"),
        ("config", 2, "trainer.train_batch_size=0"),
    ],
)
def test_a_fault_of_one_process_ends_all(tmp_path, fault, status, message):
    """At once, with its text, and with a status that says whether to start again."""
    batch = 0 if fault == "config" else 4
    argv = arguments(
        tmp_path,
        module="tests.faulty_job",
        **{"trainer.run_name": fault, "trainer.train_batch_size": batch},
    )
    ended = run(argv, 2, devices=1)
    assert status in [process.status for process in ended]
    assert all(process.status != 0 for process in ended)
    assert any(message in process.error for process in ended)


@pytest.fixture
def server():
    path = hf.local_folder("configs/tiny_char_model")
    config = hf.load_config(path)
    params = jax.device_put(init_params(config, 5), jax.devices()[0])
    server = FakeServer("native", config, params, 0)
    yield server
    server.kill()


@pytest.mark.parametrize("ahead", [0, 1])
def test_process_0_samples_on_servers(runs, server, tmp_path, ahead):
    """The first process alone talks to them, and says to the others what came; asynchronously
    too."""
    lockstep = {
        "trainer.fully_async.enabled": True,
        "trainer.fully_async.schedule": "lockstep",
        "trainer.fully_async.max_staleness_steps": ahead,
        "trainer.policy_mini_batch_size": 4,
        "trainer.algorithm.policy_loss_type": "rollout_is",
    }
    settings = {
        "generator.inference_engine.run_engines_locally": False,
        "generator.inference_engine.remote_urls": f"['{server.url}']",
        **(lockstep if ahead else {}),
    }
    found = trained(tmp_path / "two", 2, **settings)
    wanted = trained(tmp_path / "one", 1, **settings) if ahead else exported(runs[1])
    assert server.served
    assert_close(found, wanted)


@pytest.mark.parametrize("lora", [0, 4])
def test_servers_pull_from_every_process(tmp_path, monkeypatch, lora):
    """Each of two offers its half, cast and merged where it is; nobody gathers a copy.

    A second server pulls what the first has. One process samples the same, within rounding.
    """
    folder = model_folder(tmp_path / "models" / "first", 5)
    settings = {"serve.receive_weights": True, "serve.max_num_seqs": 16}
    servers = [make_server(serve_config(folder, **settings), jax.devices()[:1]) for _ in range(2)]
    for server in servers:
        server.start()
    receive, places = Incoming.receive, []

    def noting(self, notice):
        places.append([place.pieces for place in notice.places])
        return receive(self, notice)

    monkeypatch.setattr(Incoming, "receive", noting)
    overrides = {
        "trainer.policy.mesh.fsdp": -1,
        "trainer.policy.mesh.data": 1,
        "trainer.policy.model.lora.rank": lora,
        "generator.inference_engine.run_engines_locally": False,
        "generator.inference_engine.remote_urls": str([s.url[: -len("/v1")] for s in servers]),
        "generator.inference_engine.weight_transport": "transfer",
        "generator.inference_engine.weight_delta": True,
    }
    found = trained(tmp_path / "two", 2, **overrides)
    both = [of for of in places if len(of) == 2]
    assert both and all(each > 0 for of in both for each in of)
    assert any(len(of) == 1 for of in places)  # of the other server
    del places[:]
    wanted = trained(tmp_path / "one", 1, **overrides)
    assert {len(of) for of in places} == {1}
    assert_close(found, wanted)
    for server in servers:
        server.stop()
