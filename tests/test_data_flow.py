"""What the sampled trajectories become, in whole runs of the trainer."""

import json

import jax
import numpy as np
import pytest

from jaxrl import config as cfg
from jaxrl.envs import Env
from jaxrl.train import BasePPOExp, train
from jaxrl.trainer import Trainer
from tests.test_train import QUICKSTART, assert_trained_alike, metric_lines, small

HERE = __name__
EPOCH = 16  # steps: each of the 64 prompts once


class HalfDullEnv(Env):
    """Every second prompt earns 1 whatever is said, the others a number for each answer."""

    def step(self, action):
        dull = self.extras["number"] % 2 == 0
        reward = 1.0 if dull else (sum(map(ord, action)) % 97) / 97
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


class CountingTrainer(Trainer):
    """Keeps, of every step, the fraction of its groups that have an advantage other than 0."""

    def add_advantages(self, batch):
        batch = super().add_advantages(batch)
        moved = np.abs(np.asarray(batch.advantages) * batch.loss_mask).sum(1) > 0
        groups = [moved[batch.index == g].any() for g in np.unique(batch.index)]
        self.__dict__.setdefault("informative", []).append(float(np.mean(groups)))
        return batch


class CountingExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return CountingTrainer(*args, **kwargs)


@pytest.fixture
def half_dull(tmp_path):
    """64 prompts, half of which teach nothing."""
    path = tmp_path / "prompts.jsonl"
    env = f"{HERE}:HalfDullEnv"
    rows = (
        {"prompt": [{"role": "user", "content": f"{n:02d}"}], "number": n, "env_class": env}
        for n in range(64)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def counted(folder, data, **overrides):
    """Informative fractions of the steps of a run, and the batches that each step drew."""
    settings = {
        "data.train_data": [data],
        "data.val_data": [],
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.eval_interval": -1,
        "trainer.hf_save_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.max_training_steps": EPOCH,
    }
    trainer = CountingExp(small(folder, **{**settings, **overrides})).run()
    drawn = [line["generate/sampled_batches"] for line in metric_lines(folder)]
    return trainer.informative[-EPOCH:], drawn  # before them those of compiling


@pytest.mark.slow  # three runs
def test_dynamic_sampling_doubles_the_informative_groups(tmp_path, half_dull):
    plain, drawn = counted(tmp_path / "plain", half_dull)
    assert drawn == [1] * EPOCH
    assert 0.45 <= np.mean(plain) <= 0.5  # half of the prompts, less answers that earn the same
    for kind in ("filter", "replace"):
        informative, drawn = counted(
            tmp_path / kind,
            half_dull,
            **{"trainer.algorithm.dynamic_sampling.type": kind},
        )
        assert informative == [1.0] * EPOCH
        assert np.mean(informative) >= 2 * np.mean(plain)
        assert np.mean(drawn) > 1.5 if kind == "filter" else np.mean(drawn) < 1.5


PLACES = {
    "trainer.policy.mesh.fsdp": 2,
    "trainer.policy.mesh.data": -1,
    "trainer.placement.policy_num_gpus_per_node": 4,
    "trainer.placement.ref_num_gpus_per_node": 2,
    "trainer.algorithm.kl_loss_coef": 0.1,
    "trainer.update_ref_every_epoch": True,
}


@pytest.mark.slow  # two runs on new meshes
def test_parts_on_devices_of_their_own_sample_and_train_the_same(tmp_path):
    together = train(small(tmp_path / "together", **PLACES))
    apart = BasePPOExp(
        small(
            tmp_path / "apart",
            **PLACES,
            **{"trainer.placement.colocate_all": False},
            **{"trainer.placement.colocate_policy_ref": False},
        )
    ).build()
    apart.train()
    weights = apart.state.params, apart.ref_params, apart.engine.programs.params
    places = [sorted(d.id for d in jax.tree.leaves(w)[0].sharding.device_set) for w in weights]
    assert places == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert_trained_alike(apart.state, together.state)
    lines = metric_lines(tmp_path / "together"), metric_lines(tmp_path / "apart")
    for name in ("generate/tokens_crc32", "policy/grad_norm", "policy/policy_kl"):
        ours, expected = ([line[name] for line in of[1:]] for of in lines)
        assert ours == pytest.approx(expected, rel=1e-4)


CONTROLLED = {
    "data.train_data": ["jaxrl.envs.toys.sort_digits:prompts(size=96, length=2)"],
    "data.val_data": [],
    "trainer.epochs": 100,
    "trainer.max_training_steps": 240,
    "trainer.train_batch_size": 16,
    "trainer.algorithm.advantage_estimator": "rloo",  # no deviation divides the KL away
    "trainer.algorithm.gamma": 1.0,
    "trainer.algorithm.use_entropy_loss": False,
    "trainer.algorithm.use_kl_in_reward": True,
    "trainer.algorithm.kl_estimator_type": "k1",
    "trainer.algorithm.kl_loss_coef": 0.1,
    "trainer.algorithm.kl_ctrl.type": "adaptive",
    "trainer.algorithm.kl_ctrl.kl_target": 1.0,
    "trainer.algorithm.kl_ctrl.horizon": 5120,
    "trainer.policy.optimizer_config.scheduler": "constant_with_warmup",
    **{f"trainer.{name}": -1 for name in ("ckpt_interval", "hf_save_interval", "eval_interval")},
}


@pytest.mark.slow  # a run of 240 steps
def test_the_adaptive_coefficient_holds_the_kl_at_its_target(tmp_path):
    folders = {f"trainer.{name}_path": str(tmp_path / name) for name in ("log", "ckpt", "export")}
    train(cfg.apply_overrides(cfg.load_config_file(QUICKSTART), {**CONTROLLED, **folders}))
    lines = [line for line in metric_lines(tmp_path / "log") if line["step"] > 160]
    kl = np.reshape([line["loss/avg_kl"] for line in lines], (4, 20)).mean(1)
    assert (abs(kl - 1.0) <= 0.2).all()
    # where the free run ends is beyond 0.9: the KL is what holds it back, and it has learnt
    assert 0.3 < np.mean([line["reward/avg_raw_reward"] for line in lines]) < 0.6
