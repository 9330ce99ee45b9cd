"""Whole runs that are stopped, killed or damaged, and go on."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint._src.path.atomicity import AtomicRenameTemporaryPath

from jaxrl import config as cfg
from jaxrl.audit import audit
from jaxrl.envs.toys.guess_number import GuessNumberEnv, prompts as guesses
from jaxrl.files import FolderError
from jaxrl.records.checkpoint import Checkpointer
from jaxrl.train import BasePPOExp, exit_status, main, train
from jaxrl.trainer import Trainer
from tests.test_train import QUICKSTART, ROOT, assert_bitwise_equal, metric_lines, small


class InterruptedTrainer(Trainer):
    """Stops as by Ctrl-C in the update of the fourth step, after rollouts and advantages."""

    def update(self, batch, step):
        if step == 4:
            raise KeyboardInterrupt
        super().update(batch, step)


class InterruptedExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return InterruptedTrainer(*args, **kwargs)


def stopped_as_whole(tmp_path, config_of):
    """Train twice, once with a stop in step 4; the two have the same metrics and bits.

    Args:
        config_of: folder -> config.

    Returns:
        The folder of the run that was not stopped, and its trainer.
    """
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        exit_status(InterruptedExp, config_of(stopped))
    resumed, other = (train(config_of(folder)) for folder in (stopped, whole))
    assert metric_lines(stopped) == metric_lines(whole)
    assert_bitwise_equal(resumed.state, other.state)
    return whole, other


def resumed_as_whole(tmp_path, config_of):
    """Do what `stopped_as_whole` does with a run less: the other begins with its checkpoint.

    That one which is stopped goes on in its own folder is the same for all.
    """
    whole, again = tmp_path / "whole", tmp_path / "again"
    other = train(config_of(whole))
    folders = {f"trainer.{name}_path": str(again / name) for name in ("ckpt", "export")}
    start = str(whole / "checkpoints" / "global_step_2")
    start = {"trainer.resume_mode": "from_path", "trainer.resume_path": start}
    changes = {"trainer.log_path": str(again), **folders, **start}
    resumed = train(cfg.apply_overrides(config_of(whole), changes))
    assert metric_lines(again) == metric_lines(whole)[-2:]
    assert_bitwise_equal(resumed.state, other.state)
    return whole, other


def test_interrupted_and_resumed_equals_uninterrupted(finished, tmp_path):
    folder, whole = finished
    with pytest.raises(KeyboardInterrupt, match="^the same command resumes after step 2$"):
        exit_status(InterruptedExp, small(tmp_path))
    assert metric_lines(tmp_path) == metric_lines(folder)[:4]
    resumed = train(small(tmp_path))  # from the checkpoint of step 2
    assert metric_lines(tmp_path) == metric_lines(folder)
    assert_bitwise_equal(resumed.state, whole.state)


def kill_after_step_2(folder, config):
    """SIGKILL to a run in a process of its own, once there is a checkpoint of step 2."""
    recipe = folder / "recipe.py"
    values = cfg.get_config_as_dict(config)
    recipe.write_text(f"def get_config():\n    return {values!r}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl.train", f"--config={recipe}"],
        cwd=ROOT,
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 240
    while not (folder / "checkpoints" / "global_step_2").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_killed_and_resumed_equals_uninterrupted(finished, tmp_path):
    """What was logged after the checkpoint is cut and done again."""
    folder, whole = finished
    kill_after_step_2(tmp_path, small(tmp_path))
    with (tmp_path / "quickstart" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/avg_ra')  # a line that the kill cut off
    resumed = train(small(tmp_path))
    assert metric_lines(tmp_path) == metric_lines(folder)
    assert_bitwise_equal(resumed.state, whole.state)


class SlowGuess(GuessNumberEnv):
    """Takes its time, another one in every run."""

    def step(self, action):
        time.sleep(random.Random().random() * 0.03)
        return super().step(action)


def slow_prompts(size, seed):
    for row in guesses(size, seed):
        yield {**row, "env_class": f"{__name__}:SlowGuess"}


TALKS = {  # 16 conversations of up to three turns over 6 slots
    "data.train_data": [f"{__name__}:slow_prompts(size=64, seed=0)"],
    "data.val_data": [f"{__name__}:slow_prompts(size=8, seed=1)"],
    "environment.env_class": "guess_number",
    "environment.skyrl_gym.max_env_workers": 5,
    "generator.max_turns": 3,
    "generator.max_input_length": 39,  # 13 of the prompt; a guess of 2, its end, "a number?>"
    "generator.sampling_params.max_generate_length": 2,
    "generator.inference_engine.max_num_seqs": 6,
    "trainer.algorithm.max_seq_len": 41,
    "trainer.algorithm.advantage_estimator": "grpo",
    **dict.fromkeys(("trainer.eval_interval", "trainer.hf_save_interval"), -1),
}


@pytest.mark.slow  # three runs
@pytest.mark.parametrize("step_wise", [False, True])
def test_conversations_killed_and_resumed_beside_slow_environments(tmp_path, step_wise):
    """Who waited for whom differs between the runs; no bit does."""
    settings = {**TALKS, "generator.step_wise_trajectories": step_wise}
    whole = train(small(tmp_path / "whole", **settings))
    cut = tmp_path / "cut"
    cut.mkdir()
    kill_after_step_2(cut, small(cut, **settings))
    resumed = train(small(cut, **settings))
    assert metric_lines(cut) == metric_lines(tmp_path / "whole")
    assert_bitwise_equal(resumed.state, whole.state)
    first, *_, last = metric_lines(cut)
    assert first["generate/max_turns"] == last["generate/max_turns"] == 3
    assert len({line["generate/tokens_crc32"] for line in (first, last)}) == 2
    assert step_wise or whole.watch.recompiles == 0  # a turn a row: their number varies


MIXED = {  # the second is used up in the second step, and in the fourth
    "data.train_data": [
        "jaxrl.envs.toys.sort_digits:prompts(size=40, seed=0)",
        "jaxrl.envs.toys.sort_digits:prompts(size=2, seed=1, length=3)",
    ],
    "data.train_data_weights": [3, 1],
}


@pytest.mark.slow
def test_a_run_over_weighted_sources_goes_on_from_the_middle(tmp_path):
    whole = train(small(tmp_path / "whole", **MIXED))
    with pytest.raises(KeyboardInterrupt):
        InterruptedExp(small(tmp_path / "cut", **MIXED)).run()
    resumed = train(small(tmp_path / "cut", **MIXED))
    assert metric_lines(tmp_path / "cut") == metric_lines(tmp_path / "whole")
    assert_bitwise_equal(resumed.state, whole.state)
    assert metric_lines(tmp_path / "cut")[-1]["trainer/epochs_of_source_1"] == 2.0
    checks = {check.name: check for check in audit(tmp_path / "cut" / "quickstart")}
    assert checks["order of the data"].figures == {"prompts": 16, "wrong": 0}
    card = (tmp_path / "cut" / "quickstart" / "data_card.txt").read_text()
    assert "    1 of 4 prompts of a batch (25.0%), 2.00 passes in 4 batches\n" in card


ALGORITHM = {  # everything of the algorithm that has a state
    "use_kl_loss": False,
    "use_kl_in_reward": True,
    "kl_loss_coef": 0.1,
    "kl_ctrl.type": "adaptive",
    "kl_ctrl.kl_target": 0.01,
    "kl_ctrl.horizon": 100,
    "advantage_estimator": "grpo",
    "dynamic_sampling.type": "filter",
    "zero_variance_filter": True,
    "advantage_batch_normalize": True,
    "overlong_buffer": {"len": 2, "penalty_factor": 0.1},
    "off_policy_correction.tis_ratio_type": "token",
}


STATEFUL = {
    **{f"trainer.algorithm.{name}": value for name, value in ALGORITHM.items()},
    "generator.n_samples_per_prompt": 2,
    "trainer.eval_interval": -1,
    "trainer.hf_save_interval": -1,
}


@pytest.mark.slow
def test_controller_and_dynamic_sampling_resume_where_they_were(tmp_path):
    whole = train(small(tmp_path / "whole", **STATEFUL))
    lines = metric_lines(tmp_path / "whole")
    drawn = [line["generate/sampled_batches"] for line in lines]
    assert max(drawn) > 1  # two samples of four digits often earn the same
    assert int(whole.state.batches_drawn) == sum(drawn)
    coefs = [*(line["loss/kl_loss_coef"] for line in lines), float(whole.state.kl_coef)]
    for line, (coef, after) in zip(lines, itertools.pairwise(coefs), strict=True):
        error = np.clip(line["loss/avg_kl"] / 0.01 - 1, -0.2, 0.2)
        assert after == pytest.approx(coef * (1 + error * 8 / 100), rel=1e-6)
        assert line["generate/batch_num_seq"] == 8
        assert line["policy/is_ratio_mean"] == pytest.approx(1, abs=1e-5)
        # the KL and the punishment of the longest responses are taken off
        assert line["loss/avg_final_rewards"] < line["reward/avg_raw_reward"]
    assert coefs[0] == pytest.approx(0.1)
    assert len(set(coefs)) == 5

    path = str(tmp_path / "whole" / "checkpoints" / "global_step_2")
    settings = {"trainer.resume_mode": "from_path", "trainer.resume_path": path}
    again = train(small(tmp_path / "again", **STATEFUL, **settings))
    assert metric_lines(tmp_path / "again") == lines[2:]
    assert_bitwise_equal(again.state, whole.state)


@pytest.mark.slow
def test_resume_modes(finished, tmp_path, capsys):
    folder, whole = finished
    path = str(folder / "checkpoints" / "global_step_2")
    again = train(
        small(tmp_path, **{"trainer.resume_mode": "from_path", "trainer.resume_path": path})
    )
    assert_bitwise_equal(again.state, whole.state)
    records = files(tmp_path / "quickstart")
    train(small(tmp_path, **{"trainer.max_training_steps": 3}))
    assert "holds step 4 of 3" in capsys.readouterr().out
    kept = files(tmp_path / "quickstart")
    assert all(kept[p] == records[p] for p in records if p.suffix in (".yaml", ".txt", ".jsonl"))
    config = small(tmp_path, **{"trainer.resume_mode": "none", "trainer.max_training_steps": 1})
    with pytest.raises(ValueError, match=r"ckpt_path=.*holds the steps \[4\] of another run"):
        train(config)
    assert [line["step"] for line in metric_lines(tmp_path)] == [3, 4]  # nothing was touched
    fresh = train(cfg.apply_overrides(config, {"trainer.ckpt_path": str(tmp_path / "other")}))
    assert int(fresh.state.step) == 1
    assert [line["step"] for line in metric_lines(tmp_path)] == [0, 1]


def test_a_checkpoint_of_another_model_is_refused(finished, tmp_path):
    folder, _ = finished
    other = tmp_path / "model"
    other.mkdir()
    source = ROOT / "configs" / "tiny_char_model"
    for file in source.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    settings = json.loads((other / "config.json").read_text()) | {"intermediate_size": 128}
    (other / "config.json").write_text(json.dumps(settings))
    shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    config = small(tmp_path, **{"trainer.policy.model.path": str(other)})
    with pytest.raises(ValueError, match=r"another model.*intermediate_size.*256.*128"):
        train(config)


def test_a_checkpoint_of_another_config_is_refused(finished, tmp_path):
    folder, _ = finished
    shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=r"another config.*trainer.seed': \(42, 7\)"):
        train(small(tmp_path, **{"trainer.seed": 7}))
    assert int(train(small(tmp_path, **{"trainer.max_training_steps": 5})).state.step) == 5


def files(folder):
    """What is in a folder, but for who holds it."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.read_bytes() for path in found if path.parent.name != ".leases"}


def test_a_fresh_start_does_not_write_over_the_records_of_another_config(finished, tmp_path):
    folder, _ = finished
    shutil.copytree(folder / "quickstart", tmp_path / "quickstart")
    before = files(tmp_path)
    folders = {f"trainer.{name}": str(tmp_path / name) for name in ("ckpt_path", "export_path")}
    lr = {"trainer.policy.optimizer_config.lr": 0.5}
    with pytest.raises(FolderError, match=rf"{tmp_path}/quickstart.*lr': \(0.002, 0.5\)"):
        train(small(tmp_path, **folders, **lr))
    assert files(tmp_path) == before


def test_the_command_line_names_the_difference_without_a_traceback(finished, tmp_path, capsys):
    folder, _ = finished
    shutil.copytree(folder / "checkpoints", tmp_path / "ckpt")
    folders = {"ckpt_path": tmp_path / "ckpt", "log_path": tmp_path, "export_path": tmp_path}
    arguments = [f"--config.trainer.{name}={path}" for name, path in folders.items()]
    assert main([f"--config={QUICKSTART}", *arguments]) == 2
    assert "is of another config; (saved, this run)" in capsys.readouterr().err


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(finished, tmp_path):
    folder, whole = finished
    for name in ("checkpoints", "quickstart"):
        shutil.copytree(folder / name, tmp_path / name)
    (tmp_path / "checkpoints" / "global_step_4" / "meta" / "metadata").write_text("")
    with pytest.warns(UserWarning, match=r"global_step_4 is damaged.*Falling back to step 2"):
        again = train(small(tmp_path))
    assert metric_lines(tmp_path) == metric_lines(folder)
    assert_bitwise_equal(again.state, whole.state)


@pytest.mark.slow
def test_a_save_that_fails_ends_the_run_and_the_next_one_goes_on(finished, tmp_path, monkeypatch):
    folder, whole = finished
    commit = AtomicRenameTemporaryPath.finalize

    async def full(self):
        if "global_step_4" in str(self.get_final()):
            raise OSError(28, "No space left on device")
        await commit(self)

    with monkeypatch.context() as patch:
        patch.setattr(AtomicRenameTemporaryPath, "finalize", full)
        with pytest.raises(FolderError, match=r"step 4 to trainer.ckpt_path=.*No space left"):
            train(small(tmp_path))
    assert_bitwise_equal(train(small(tmp_path)).state, whole.state)  # from step 2
    assert metric_lines(tmp_path) == metric_lines(folder)


# ------------------------------------------------------------------ killed again and again

STEPS = 30
KILLS = 20


class Run:
    """`python -m jaxrl.train` on one device, in a folder of its own."""

    def __init__(self, folder: Path, **overrides: object) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        config = small(
            folder,
            **{
                "trainer.max_training_steps": STEPS,
                "trainer.ckpt_interval": 1,
                "trainer.max_ckpts_to_keep": 2,
                "trainer.eval_interval": 5,
                "trainer.hf_save_interval": 15,
                "trainer.print_example_interval": -1,
                **overrides,
            },
        )
        folder.mkdir()
        self.recipe = folder / "recipe.py"
        values = cfg.get_config_as_dict(config)
        self.recipe.write_text(f"def get_config():\n    return {values!r}\n")

    def start(self) -> subprocess.Popen:
        with (self.folder / "output").open("a") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "jaxrl.train", f"--config={self.recipe}"],
                cwd=ROOT,
                env=os.environ | {"XLA_FLAGS": ""},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def newest(self) -> int:
        """Step of the newest checkpoint, 0 without one."""
        names = [
            p.name.removeprefix("global_step_") for p in self.checkpoints.glob("global_step_*")
        ]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def saving(self) -> bool:
        """Whether a save is under way, or was when the process died."""
        return any(self.checkpoints.glob("*orbax-checkpoint-tmp*"))

    def kill_once(self, rng: random.Random) -> bool:
        """Start, wait for some progress, kill; True if that was in the middle of a save."""
        where = rng.choice(["start", "step", "save", "save"])
        target = self.newest() + rng.choice([0, 1, 2])
        process = self.start()
        deadline = time.monotonic() + 120
        if where == "start":
            time.sleep(rng.uniform(0, 10))
        else:
            while self.newest() < target or (where == "save" and not self.saving()):
                assert process.poll() is None, (self.folder / "output").read_text()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.5 if where == "step" else 0.03))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL  # it had not ended by itself
        return self.saving()

    def finish(self) -> None:
        assert self.start().wait() == 0, (self.folder / "output").read_text()[-3000:]

    def state(self) -> dict:
        files = Checkpointer(str(self.checkpoints), read_only=True).files
        return jax.device_get(files.restore(STEPS, "state"))


@pytest.mark.slow
def test_twenty_kills_change_nothing(tmp_path):
    rng = random.Random(0)
    whole, killed = Run(tmp_path / "whole"), Run(tmp_path / "killed")
    whole.finish()
    in_a_save = [killed.kill_once(rng) for _ in range(KILLS)]
    assert sum(in_a_save) >= 3  # the least interesting place to die is between saves
    assert killed.newest() < STEPS
    killed.finish()

    expected, state = whole.state(), killed.state()
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert int(state["step"]) == STEPS
    # with the checksum of the sampled tokens of every step
    lines = metric_lines(killed.folder)
    assert lines == metric_lines(whole.folder)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert len({line["generate/tokens_crc32"] for line in lines[1:]}) == STEPS
    for name in (
        f"global_step_{STEPS}/policy/model.safetensors",
        f"dumped_evals/global_step_{STEPS}_evals/sort_digits.jsonl",
    ):
        both = [(run.folder / "exports" / name).read_bytes() for run in (whole, killed)]
        assert both[0] == both[1], name
    assert sorted(p.name for p in killed.checkpoints.glob("[!.]*")) == [
        f"global_step_{STEPS - 1}",
        f"global_step_{STEPS}",
    ]
    print(json.dumps({"kills": KILLS, "in a save": sum(in_a_save)}))


ACTOR_CRITIC = {  # with GAE, three shuffled passes and a reference that moves every three steps
    **dict.fromkeys(("trainer.eval_interval", "trainer.hf_save_interval"), -1),
    "data.train_data": ["jaxrl.envs.toys.sort_digits:prompts(size=12, seed=0)"],
    "trainer.epochs": STEPS,
    "trainer.critic.model.path": str(ROOT / "configs" / "tiny_char_model"),
    "trainer.critic.model.random_init": True,
    "trainer.critic_mini_batch_size": 4,
    "trainer.algorithm.advantage_estimator": "gae",
    "trainer.update_epochs_per_batch": 3,
    "trainer.update_ref_every_epoch": True,
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [STATEFUL, ACTOR_CRITIC], ids=["sampling", "critic"])
def test_kills_change_nothing_that_a_step_leaves(tmp_path, settings):
    """Controller and dynamic sampling; critic, passes and moving reference."""
    rng = random.Random(1)
    whole, killed = (Run(tmp_path / name, **settings) for name in ("whole", "killed"))
    whole.finish()
    for _ in range(5):
        killed.kill_once(rng)
    killed.finish()
    expected = whole.state()
    jax.tree.map(np.testing.assert_array_equal, killed.state(), expected)
    assert metric_lines(killed.folder) == metric_lines(whole.folder)
    drawn = int(expected["batches_drawn"])
    assert drawn > STEPS if settings is STATEFUL else drawn == STEPS
    assert bool(expected.get("critic")) == (settings is ACTOR_CRITIC)
    assert metric_lines(killed.folder) == metric_lines(whole.folder)
