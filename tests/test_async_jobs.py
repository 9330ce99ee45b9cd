"""Asynchronous jobs with engines in their processes: the run of one process; killed, exactly once;
and what the policy answers in each."""

import os
import signal

import jax
import pytest

from jaxrl.audit import audit, report
from jaxrl.models import hf
from jaxrl.models.transformer import init_params
from jaxrl.train_async import Schedule
from tests.answers import ASKS
from tests.cluster.test_job import LOCAL, Launched, assert_same, job_text
from tests.jobs import run
from tests.rollout.http_servers import FakeServer
from tests.test_processes import arguments, assert_close, exported, trained
from tests.test_train_async import trained_ordinals

LOCKSTEP = {
    "trainer.fully_async.enabled": True,
    "trainer.fully_async.schedule": "lockstep",
    "trainer.fully_async.max_staleness_steps": 1,
    "trainer.policy_mini_batch_size": 4,
    "trainer.algorithm.old_log_probs": "rollout",
}
FREE = {**LOCKSTEP, "trainer.fully_async.schedule": "free"}
SPANNING = {
    "generator.inference_engine.hosts_per_engine": 2,
    "generator.inference_engine.tensor_parallel_size": 4,
}


def test_a_group_has_a_number_in_its_share():
    """Batches of 5, of which the engines have the places 0, 1 and 2, 3, 4."""
    schedule = Schedule([range(2), range(2, 5)], 1, False, 4, False, True)
    places = [schedule.ordinal(1, number) for number in range(6)]
    assert places == [2, 3, 4, 7, 8, 9]
    assert [schedule.number(place) for place in places] == [0, 1, 2, 3, 4, 5]
    assert [schedule.share_of(place) for place in range(5, 10)] == [0, 0, 1, 1, 1]
    assert [schedule.unit(share) for share in (0, 1)] == [1, 1]
    whole = schedule._replace(whole=True)
    assert [whole.unit(share) for share in (0, 1)] == [2, 3]


def passed(folder):
    """The audit of the run in a folder."""
    results = audit(folder / "quickstart")
    assert not any(result.failures for result in results), report(results)
    return True


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of one process."""
    folder = tmp_path_factory.mktemp("alone")
    trained(folder, 1, **LOCKSTEP)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of two processes that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    Launched(folder, LOCAL.format(2), **LOCKSTEP).finish()
    return folder


@pytest.mark.slow
def test_lockstep_in_two_processes_is_that_of_one(alone, whole):
    assert_close(exported(whole), exported(alone))
    assert trained_ordinals(whole) == trained_ordinals(alone)
    assert passed(whole)


@pytest.mark.slow
def test_an_engine_over_two_processes_is_that_of_one(alone, tmp_path):
    """It samples while the trainer waits; every process gets the answers of the first."""
    environment = {"ANSWERS": str(tmp_path)}
    settings = LOCKSTEP | SPANNING | ASKS
    for ended in run(arguments(tmp_path, **settings), 2, devices=2, environment=environment):
        assert ended.status == 0, ended.error[-3000:]
    assert_close(exported(tmp_path), exported(alone))
    assert passed(tmp_path)
    answers = [(tmp_path / str(index)).read_text() for index in range(2)]
    assert answers[0] == answers[1]
    assert answers[0].count("\n") == 5  # steps


@pytest.mark.slow
@pytest.mark.parametrize("index", ["0", "1"])
def test_a_killed_process_costs_lockstep_no_step(whole, tmp_path, index):
    job = Launched(tmp_path, LOCAL.format(2), **LOCKSTEP)
    job.wait_for(2)
    os.kill(job.pids()[index], signal.SIGKILL)
    assert_same(job.finish(), exported(whole))
    assert "restart 1 of 3 in a row, after step" in job_text(tmp_path)
    assert passed(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("index", ["0", "1"])
def test_a_killed_free_job_trains_every_group_once(tmp_path, index):
    job = Launched(tmp_path, LOCAL.format(2), **FREE)
    job.wait_for(2)
    os.kill(job.pids()[index], signal.SIGKILL)
    job.finish()
    assert passed(tmp_path)
    trained_groups = {ordinal for _, ordinal in trained_ordinals(tmp_path)}
    assert trained_groups == set(range(20))  # 5 steps of 4: at the end nothing is ahead


@pytest.mark.slow
def test_the_policy_on_servers_answers_in_every_process(tmp_path):
    config = hf.load_config(hf.local_folder("configs/tiny_char_model"))
    server = FakeServer("native", config, jax.device_put(init_params(config, 5), jax.devices()[0]))
    settings = {
        "generator.inference_engine.run_engines_locally": False,
        "generator.inference_engine.remote_urls": f"['{server.url}']",
        **ASKS,
    }
    environment = {"ANSWERS": str(tmp_path)}
    try:
        for ended in run(arguments(tmp_path, **settings), 2, devices=2, environment=environment):
            assert ended.status == 0, ended.error[-3000:]
    finally:
        server.kill()
    answers = [(tmp_path / str(index)).read_text() for index in range(2)]
    assert answers[0] == answers[1] != ""
