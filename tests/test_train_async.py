"""Asynchronous runs of the real trainer and engine, on a tiny model and eight host devices."""

import sqlite3
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl.audit import audit
from jaxrl.data.microbatches import Microbatching
from jaxrl.records.callbacks import TrainingCallback
from jaxrl.train import BasePPOExp, train
from jaxrl.train_async import AsyncTrainer
from tests.data.test_packing import columns
from tests.test_train import ROOT, assert_bitwise_equal, metric_lines, small

QUICK = {  # one update a step, of rows that are one shape; nothing that the tests do not look at
    "data.train_data": ["jaxrl.envs.toys.sort_digits:prompts(size=12, seed=0)"],
    "trainer.epochs": 3,  # three steps each
    "trainer.max_training_steps": 6,
    "trainer.policy_mini_batch_size": 4,
    "trainer.algorithm.use_kl_loss": False,
    "trainer.algorithm.policy_loss_type": "rollout_is",
    "generator.sampling_params.max_generate_length": 3,
    "trainer.eval_interval": 3,
    "trainer.ckpt_interval": 3,
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


def audited(folder):
    """Every check of the ledger's that can be made passes."""
    return {check.name: check.failures for check in audit(folder / "quickstart") if check.failures}


def rollout_threads():
    return [t for t in threading.enumerate() if t.name.startswith("jaxrl-rollouts")]


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synchronous")
    run = Watched(quick(folder))
    return folder, run.run(), run.watcher


@pytest.mark.some(1)
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


@pytest.mark.parametrize(
    ("unused", "instead"), [("generate", "sample"), ("next_prompts", "prompts_of")]
)
def test_an_override_that_is_never_called_is_refused(tmp_path, unused, instead):
    kind = type("Mine", (AsyncTrainer,), {unused: lambda self, *args: []})
    trainer = object.__new__(kind)
    trainer.config = quick(tmp_path, "free")
    message = f"Mine overrides '{unused}', which .* never calls; override '{instead}'"
    with pytest.raises(ValueError, match=message):
        trainer._build()


def lockstep_whole_and_resumed(tmp_path, ahead, **overrides):
    whole = Watched(quick(tmp_path / "whole", "lockstep", ahead, **overrides))
    state = whole.run().state
    with pytest.raises(KeyboardInterrupt):
        Watched(quick(tmp_path / "cut", "lockstep", ahead, **overrides), stop_in=6).run()
    assert not rollout_threads()
    assert len(lines_of(tmp_path / "cut")) == 6
    again = Watched(quick(tmp_path / "cut", "lockstep", ahead, **overrides))
    assert_bitwise_equal(again.run().state, state)  # from the checkpoint of step 3
    assert lines_of(tmp_path / "cut") == lines_of(tmp_path / "whole")
    for step in (4, 5, 6):
        assert again.watcher.rows[step] == whole.watcher.rows[step]
    for step, versions in (whole.watcher.versions | again.watcher.versions).items():
        assert set(versions) == {max(0, step - 1 - ahead)}
    assert not audited(tmp_path / "cut")
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


class Broken(Watched):
    """The generator fails on the fourth prompt of the fifth batch."""

    def get_generator(self, engine, tokenizer):
        generator, calls = super().get_generator(engine, tokenizer), []
        generate = generator.generate

        async def failing(batch):
            calls.append(batch)
            if len(calls) == 4 * 4 + 4:
                raise ZeroDivisionError("of the generator")
            return await generate(batch)

        generator.generate = failing
        return generator


def test_a_free_run_that_a_worker_ends_trains_every_group_once_when_resumed(tmp_path):
    with pytest.raises(ZeroDivisionError, match="of the generator") as caught:
        Broken(quick(tmp_path, "free", 1)).run()
    assert "failing" in [entry.name for entry in caught.traceback]
    assert not rollout_threads()
    first = metric_lines(tmp_path)
    assert 2 <= len(first) - 1 <= 5  # steps 3 to 6 can be admitted when it fails
    train(quick(tmp_path, "free", 1))
    lines = metric_lines(tmp_path)
    assert [line["step"] for line in lines] == list(range(7))
    trained = trained_ordinals(tmp_path)
    assert sorted(ordinal for _, ordinal in trained) == [o for o in range(24) for _ in range(4)]
    assert [step for step, _ in trained] == [step for step in range(1, 7) for _ in range(16)]
    assert all(line["async/keep_rate"] == 1 for line in lines[1:])
    assert not audited(tmp_path)


# ------------------------------------------------------------------ weights that change in flight


def test_the_age_of_a_token_is_that_of_its_context(tmp_path):
    trainer = object.__new__(AsyncTrainer)
    trainer.config = quick(tmp_path, "free")
    trainer.ledger, trainer.samples, trainer.metrics = SimpleNamespace(keep=id), 1, {}
    trainer.updater = SimpleNamespace(microbatching=Microbatching(rows=2, total=2))
    trainer.state, trainer.ahead = SimpleNamespace(step=np.int32(5)), 2
    row = columns(token_versions=[[3, 3, 5], [-1, 5]], context_versions=[[3, 3, 2], [-1, 5]])
    trainer.collate(row)
    # 5 - (3, 3, 2, 5): the third token was drawn by 5, over keys and values of 2
    assert trainer.metrics["async/staleness_max"] == 3
    assert trainer.metrics["async/staleness_mean"] == (2 + 2 + 3 + 0) / 4
    assert trainer.metrics["async/staleness_violation_count"] == 1
    del row["context_versions"]  # as in files that were written before there was such a column
    trainer.collate(row)
    assert trainer.metrics["async/staleness_max"] == 2


class Versions(Watcher):
    """Keeps the weights of every version, and every batch."""

    def __init__(self):
        super().__init__()
        self.weights, self.batches = {}, {}

    def on_train_start(self, trainer, given, control):
        self.weights[0] = jax.device_get(trainer.params)

    def on_step_end(self, trainer, given, control):
        self.weights[given.global_step] = jax.device_get(trainer.params)
        self.batches[given.global_step] = given.batch


class Slow(Watched):
    """An engine that needs a while for each block of tokens; one token a block."""

    def __init__(self, config):
        super().__init__(config)
        self.watcher = Versions()

    def get_engine(self, model, mesh):
        engine = super().get_engine(model, mesh)
        turn = engine._turn

        def slow_turn():
            time.sleep(0.02)
            turn()

        engine._turn = slow_turn
        return engine


SLOW = {
    "trainer.fully_async.num_parallel_generation_workers": 4,
    "generator.inference_engine.engine_init_kwargs": {"steps_per_dispatch": 1},
    "generator.inference_engine.recompute_kv_on_update": True,
    "generator.sampling_params.max_generate_length": 40,
    "trainer.eval_interval": -1,
    "trainer.ckpt_interval": -1,
}


@pytest.mark.slow
def test_each_token_is_of_the_version_that_is_recorded_with_it(tmp_path):
    """Whatever weights drew a token: their log-prob of it is the one in the batch."""
    run = Slow(quick(tmp_path, "free", 8, **SLOW))
    trainer, watcher = run.run(), run.watcher
    mixed, seen = 0, set()
    for step, batch in watcher.batches.items():
        sampled = batch.loss_mask > 0
        versions = np.where(sampled, batch.token_versions, -1)
        contexts = np.where(sampled, batch.context_versions, -1)
        np.testing.assert_array_equal(contexts, versions)  # they are recomputed
        mixed += sum(len(set(row[row >= 0])) > 1 for row in versions)
        for version in set(versions[sampled].tolist()):
            assert version < step
            params = jax.device_put(
                watcher.weights[version], jax.tree.map(lambda x: x.sharding, trainer.params)
            )
            ours = trainer.forward_pass(params, batch)[0]
            chosen = versions == version
            np.testing.assert_allclose(ours[chosen], batch.rollout_log_probs[chosen], atol=1e-4)
            other = trainer.forward_pass(trainer.params, batch)[0]  # of the last version
            seen.add((version, bool(np.abs(other - ours)[chosen].max() > 1e-2)))
    assert mixed > 0
    assert (0, True) in seen  # the bound above tells one version from another


TURNS = {
    "data.train_data": ["jaxrl.envs.toys.guess_number:prompts(size=12, seed=0)"],
    "data.val_data": ["jaxrl.envs.toys.guess_number:prompts(size=4, seed=1)"],
    "environment.env_class": "guess_number",
    "generator.max_turns": 2,
    "generator.max_input_length": 26,
    "generator.sampling_params.max_generate_length": 2,
    "trainer.algorithm.max_seq_len": 28,
    "trainer.algorithm.advantage_estimator": "grpo",
    "environment.skyrl_gym.max_env_workers": 4,
}


@pytest.mark.slow
@pytest.mark.parametrize("step_wise", [False, True])
def test_conversations_of_several_turns_run_free(tmp_path, step_wise):
    settings = {**TURNS, "generator.step_wise_trajectories": step_wise}
    train(quick(tmp_path, "free", 1, **settings))
    for line in metric_lines(tmp_path)[1:]:
        assert line["generate/max_turns"] == 2
        turns = line["generate/avg_turns"] * 16
        assert turns > 24
        assert line["generate/batch_num_seq"] == (turns if step_wise else 16)
        assert line["environment/guesses"] == line["generate/avg_turns"]
    trained = trained_ordinals(tmp_path)
    assert sorted(ordinal for _, ordinal in trained) == [o for o in range(24) for _ in range(4)]


@pytest.mark.slow
def test_conversations_of_several_turns_at_staleness_0(tmp_path):
    whole = train(quick(tmp_path / "whole", **TURNS))
    assert_bitwise_equal(train(quick(tmp_path, "free", 0, **TURNS)).state, whole.state)
    assert lines_of(tmp_path) == lines_of(tmp_path / "whole")


ACTOR_CRITIC = {  # with GAE, two passes and a reference that moves
    "trainer.critic.model.path": str(ROOT / "configs" / "tiny_char_model"),
    "trainer.critic.model.random_init": True,
    "trainer.critic_mini_batch_size": 4,
    "trainer.algorithm.advantage_estimator": "gae",
    "trainer.algorithm.use_kl_loss": True,
    "trainer.update_epochs_per_batch": 2,
    "trainer.update_ref_every_epoch": True,
}
ADAPTERS = {"trainer.policy.model.lora.rank": 4, "trainer.policy.model.lora.alpha": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [TURNS, ACTOR_CRITIC, ADAPTERS], ids=["several turns", "critic", "adapters"]
)
def test_other_parts_are_resumed_in_lockstep(tmp_path, settings):
    lockstep_whole_and_resumed(tmp_path, 1, **settings)


@pytest.mark.slow
def test_a_free_engine_on_devices_of_its_own(tmp_path):
    """Split over two of them, with the HTTP endpoint beside the run."""
    devices = {"colocate_all": False, "policy_num_gpus_per_node": 4}
    engine = {"tensor_parallel_size": 2, "num_engines": 2, "enable_http_endpoint": True}
    settings = {f"trainer.placement.{name}": value for name, value in devices.items()}
    settings |= {f"generator.inference_engine.{name}": value for name, value in engine.items()}
    settings["generator.inference_engine.http_endpoint_port"] = 0
    train(quick(tmp_path, "free", 2, **settings))
    trained = trained_ordinals(tmp_path)
    assert sorted(ordinal for _, ordinal in trained) == [o for o in range(24) for _ in range(4)]


@pytest.mark.slow
def test_a_buffer_goes_on_in_the_ledger_of_another_run(tmp_path):
    """As when run.db was deleted: what waited in the checkpoint is entered anew."""
    with pytest.raises(KeyboardInterrupt):
        Watched(quick(tmp_path, "lockstep", 2), stop_in=6).run()
    for path in (tmp_path / "quickstart").glob("run.db*"):
        path.unlink()
    train(quick(tmp_path, "lockstep", 2))
    expected = [(1 + o // 4, o) for o in range(12, 24) for _ in range(4)]
    assert trained_ordinals(tmp_path) == expected  # of steps 4 to 6
    assert set(audited(tmp_path)) == {"history"}  # that of steps 1 to 3 is lost, and is missed
