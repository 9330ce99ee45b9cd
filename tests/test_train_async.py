"""Asynchronous runs of the real trainer and engine, on a tiny model and eight host devices."""

import sqlite3
import threading
from contextlib import closing

import numpy as np
import pytest

from jaxrl.train import BasePPOExp, train
from jaxrl.train_async import AsyncTrainer
from jaxrl.watching.callbacks import TrainingCallback
from tests.test_train import assert_bitwise_equal, metric_lines, small

QUICK = {  # one update a step, of rows that are one shape; nothing that the tests do not look at
    "data.train_data": ["jaxrl.envs.sort_digits:prompts(size=12, seed=0)"],
    "trainer.epochs": 3,  # three steps each
    "trainer.max_training_steps": 6,
    "trainer.policy_mini_batch_size": 4,
    "trainer.algorithm.use_kl_loss": False,
    "trainer.algorithm.policy_loss_type": "rollout_is",
    "trainer.eval_interval": 3,
    "trainer.hf_save_interval": -1,
    "trainer.dump_data_batch": False,
    "trainer.print_example_interval": -1,
    "trainer.logger": "jsonl",
}
ADAPTIVE = {
    "trainer.algorithm.use_kl_in_reward": True,
    "trainer.algorithm.kl_estimator_type": "k1",
    "trainer.algorithm.kl_loss_coef": 0.1,
    "trainer.algorithm.kl_ctrl.type": "adaptive",
    "trainer.algorithm.kl_ctrl.kl_target": 0.01,
    "trainer.algorithm.kl_ctrl.horizon": 100,
}


def quick(folder, schedule=None, ahead=1, **overrides):
    """A synchronous run without a schedule."""
    settings = {"enabled": schedule is not None, "max_staleness_steps": ahead}
    if schedule is not None:
        settings["schedule"] = schedule
    settings = {f"trainer.fully_async.{name}": value for name, value in settings.items()}
    return small(folder, **{**QUICK, **settings, **overrides})


def lines_of(folder):
    """metrics.jsonl without what only asynchronous runs have, or the clock says."""
    return [
        {k: v for k, v in line.items() if not k.startswith("async/")}
        for line in metric_lines(folder)
    ]


class Watcher(TrainingCallback):
    """Keeps of every step the versions that drew its trajectories, and its prompts."""

    def __init__(self, stop_in=None):
        self.versions, self.rows, self.stop_in = {}, {}, stop_in

    def on_step_start(self, trainer, given, control):
        if given.global_step == self.stop_in:
            raise KeyboardInterrupt

    def on_step_end(self, trainer, given, control):
        self.versions[given.global_step] = np.asarray(given.batch.policy_versions).tolist()
        self.rows[given.global_step] = np.asarray(given.batch.tokens)[:, :4].tolist()  # the digits


class Watched(BasePPOExp):
    """A run with a watcher."""

    def __init__(self, config, stop_in=None):
        super().__init__(config)
        self.watcher = Watcher(stop_in)

    def get_callbacks(self):
        return [self.watcher]


def rollout_threads():
    return [t for t in threading.enumerate() if t.name.startswith("jaxrl-rollouts")]


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synchronous")
    run = Watched(quick(folder))
    return folder, run.run(), run.watcher


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_staleness_0_is_the_synchronous_trainer(synchronous, tmp_path, schedule):
    folder, whole, _ = synchronous
    ours = train(quick(tmp_path, schedule, 0))
    assert isinstance(ours, AsyncTrainer)
    assert_bitwise_equal(ours.state, whole.state)
    assert lines_of(tmp_path) == lines_of(folder)
    for line in metric_lines(tmp_path)[1:]:
        assert line["async/staleness_max"] == line["async/staleness_min"] == 0
    assert not rollout_threads()


def lockstep_whole_and_resumed(tmp_path, ahead, **overrides):
    whole = Watched(quick(tmp_path / "whole", "lockstep", ahead, **overrides))
    state = whole.run().state
    with pytest.raises(KeyboardInterrupt):
        Watched(quick(tmp_path / "cut", "lockstep", ahead, **overrides), stop_in=6).run()
    assert not rollout_threads()
    assert len(lines_of(tmp_path / "cut")) == 6
    again = Watched(quick(tmp_path / "cut", "lockstep", ahead, **overrides))
    assert_bitwise_equal(again.run().state, state)  # from the checkpoint of step 4
    assert lines_of(tmp_path / "cut") == lines_of(tmp_path / "whole")
    for step in (5, 6):
        assert again.watcher.rows[step] == whole.watcher.rows[step]
    for step, versions in (whole.watcher.versions | again.watcher.versions).items():
        assert set(versions) == {max(0, step - 1 - ahead)}
    return whole


def test_lockstep_is_resumed_bit_for_bit(synchronous, tmp_path):
    whole = lockstep_whole_and_resumed(tmp_path, 1)
    assert whole.watcher.rows == synchronous[2].rows  # the prompts, and their order
    assert metric_lines(tmp_path / "whole")[-1]["async/staleness_mean"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [2, 8])
def test_lockstep_with_a_controller_is_resumed_bit_for_bit(tmp_path, ahead):
    lockstep_whole_and_resumed(tmp_path, ahead, **ADAPTIVE)
    coefficients = [line["loss/kl_loss_coef"] for line in lines_of(tmp_path / "whole")[1:]]
    assert len(set(coefficients)) == 6


def trained_ordinals(folder):
    """Ordinals of the groups of which a trajectory was trained, by step, as the ledger has them."""
    query = """SELECT ends.step, groups.ordinal FROM ends
        JOIN trajectories ON trajectories.id = ends.trajectory_id
        JOIN groups ON groups.id = trajectories.group_id
        WHERE ends.superseded IS NULL AND ends.reason IS NULL
        AND trajectories.superseded IS NULL AND groups.superseded IS NULL"""
    with closing(sqlite3.connect(folder / "quickstart" / "run.db")) as db:
        return sorted(db.execute(query).fetchall())


def test_a_free_run_that_was_cut_trains_every_group_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Watched(quick(tmp_path, "free", 2), stop_in=6).run()
    assert not rollout_threads()
    first = metric_lines(tmp_path)
    Watched(quick(tmp_path, "free", 2)).run()
    lines = metric_lines(tmp_path)
    assert [line["step"] for line in lines] == list(range(7))
    assert lines[:5] == first[:5]
    trained = trained_ordinals(tmp_path)
    assert sorted(ordinal for _, ordinal in trained) == [o for o in range(24) for _ in range(4)]
    assert [step for step, _ in trained] == [step for step in range(1, 7) for _ in range(16)]
    for line in lines[1:]:
        assert line["async/staleness_max"] <= 2
        assert line["async/keep_rate"] == 1


class Broken(Watched):
    """The generator fails on the third batch."""

    def get_generator(self, engine, tokenizer):
        generator, generate, calls = super().get_generator(engine, tokenizer), None, []
        generate = generator.generate

        async def failing(batch):
            calls.append(batch)
            if len(calls) == 12:
                raise ZeroDivisionError("of the generator")
            return await generate(batch)

        generator.generate = failing
        return generator


def test_an_error_of_a_worker_ends_the_run(tmp_path):
    with pytest.raises(ZeroDivisionError, match="of the generator") as caught:
        Broken(quick(tmp_path, "free", 1)).run()
    assert "failing" in [entry.name for entry in caught.traceback]
    assert not rollout_threads()
