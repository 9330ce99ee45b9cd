"""Replay of the sampler's experts in jobs of two processes: each keeps what it sampled, and all
train as one process does."""

import json
import time

import numpy as np
import pytest

from jaxrl.data.columns import ROUTES
from jaxrl.records.batch_file import batch_path, load_batch
from jaxrl.records.ledger import read_rollouts, rollouts_path
from jaxrl.tools.audit.audit import audit
from tests.jobs import finish, run, start
from tests.test_processes import arguments, checksums
from tests.test_train import metric_lines

pytestmark = pytest.mark.slow

STEPS = 3
MIXTURE = {
    "trainer.policy.model.path": "configs/tiny_mixture_model",
    "trainer.policy.router_replay": "forward",
    "trainer.use_sample_packing": True,  # what one process sampled is in the rows of the other
    "trainer.algorithm.use_kl_loss": False,
    "trainer.eval_interval": -1,
    "trainer.ckpt_interval": 1,
    "trainer.hf_save_interval": -1,
    "trainer.dump_data_batch": True,
}


def argv(folder):
    return arguments(folder, module="tests.routes_job", steps=STEPS, **MIXTURE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of whole runs on two devices, by number of processes."""
    found = {count: tmp_path_factory.mktemp(f"of_{count}") for count in (1, 2)}
    for count, folder in found.items():
        for ended in run(argv(folder), count, devices=2 // count):
            assert ended.status == 0, ended.error[-3000:]
    return found


def recorded(folder, step):
    return read_rollouts(rollouts_path(folder / "quickstart", step))[0]


def test_two_processes_train_as_one_to_the_bit(folders):
    """The sum of two gradients has one order. The engine's log-probs alone, of fewer samples on
    each of its devices, differ by a rounding."""
    alone, job = (checksums(folders[count]) for count in (1, 2))
    assert sorted(job) == [1, 2, 3]
    for step, numbers in alone.items():
        different = {name for name, x in numbers.items() if job[step][name] != x}
        assert different <= {"batch.rollout_log_probs"}
        assert "batch.routes" in numbers
    for mine, theirs in zip(*map(metric_lines, folders.values()), strict=True):
        assert mine["policy/router_differs"] == theirs["policy/router_differs"] < 1e-3
        assert mine["policy/final_loss"] == theirs["policy/final_loss"]


def test_no_process_is_told_what_others_know(folders):
    """What is told is looked at in the job; the experts of 16 trajectories of each batch came to
    the devices that compute with them."""
    for process in (0, 1):
        told = json.loads((folders[2] / f"told_{process}.json").read_text())
        assert len(told["bytes"]) == STEPS
        assert told["arrays"] >= STEPS * 2  # minibatches


def test_what_each_has_recorded_is_what_one_has(folders):
    for step in range(1, STEPS + 1):
        alone, job = (recorded(folders[count], step) for count in (1, 2))
        assert job.keys() == alone.keys()
        for mine, theirs in zip(alone[ROUTES], job[ROUTES], strict=True):
            np.testing.assert_array_equal(mine, theirs)
        dumped = [load_batch(batch_path(folders[n] / "exports", step)) for n in (1, 2)]
        assert [batch.routes is None for batch in dumped] == [False, True]
        np.testing.assert_array_equal(dumped[0].tokens, dumped[1].tokens)
    checks = {check.name: check for check in audit(folders[2] / "quickstart")}
    assert not checks["recorded rollouts"].failures


def test_a_job_that_is_killed_goes_on_with_the_same_bits(folders, tmp_path):
    processes = start(argv(tmp_path), 2, devices=1)
    deadline = time.monotonic() + 400
    try:
        while not (tmp_path / "checkpoints/global_step_1").exists():
            assert all(process.poll() is None for process in processes)
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()  # SIGKILL
    finish(processes)
    assert not (tmp_path / f"checkpoints/global_step_{STEPS}").exists()
    for ended in run(argv(tmp_path), 2, devices=1):
        assert ended.status == 0, ended.error[-3000:]
    assert checksums(tmp_path) == checksums(folders[2])
    for step in range(1, STEPS + 1):
        mine, theirs = recorded(tmp_path, step), recorded(folders[2], step)
        assert mine["response_ids"] == theirs["response_ids"]
        for found, wanted in zip(mine[ROUTES], theirs[ROUTES], strict=True):
            np.testing.assert_array_equal(found, wanted)
