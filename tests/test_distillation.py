"""Whole runs that learn a teacher's distributions: those of another model, or their own later."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.envs.toys import sort_digits
from jaxrl.train import exit_status, train
from tests.test_resume import InterruptedExp
from tests.test_train import assert_bitwise_equal, metric_lines, small

ALONE = {
    "trainer.algorithm.distillation.coef": 1.0,
    "trainer.algorithm.distillation.policy_loss_coef": 0.0,
    "trainer.algorithm.use_kl_loss": False,
    "trainer.algorithm.use_entropy_loss": False,
}
HINDSIGHT = ALONE | {
    "trainer.algorithm.distillation.teacher": "hindsight",
    "trainer.algorithm.distillation.solution_hint": "{solution}",
    "trainer.algorithm.distillation.feedback_hint": "{feedback}",
    "trainer.algorithm.distillation.right_reward": 0.4,
    "trainer.algorithm.distillation.max_hint_tokens": 6,
    "trainer.algorithm.distillation.policy_loss_coef": 1.0,
}


def divergences(folder):
    lines = metric_lines(folder)
    return [x["policy/teacher_divergence"] for x in lines if "policy/teacher_divergence" in x]


def of_strong_opinions(folder, new):
    """Copy a model whose logits are ten times as large."""
    shutil.copytree(folder, new)
    (file,) = new.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"] * 10
    save_file(weights, file, metadata={"format": "pt"})
    return new


def test_a_policy_becomes_its_teacher(finished, tmp_path):
    """All that it learns is what the teacher would say, of 8 ids and of all others together."""
    folder = finished[0] / "exports" / "global_step_4" / "policy"
    teacher = of_strong_opinions(folder, tmp_path / "teacher")
    settings = ALONE | {
        "trainer.ref.model.path": str(teacher),
        "trainer.algorithm.distillation.top_k": 8,
        "trainer.algorithm.distillation.beta": 0.0,
        "trainer.max_training_steps": 20,
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": -1,
    }
    train(small(tmp_path, **settings))
    found = divergences(tmp_path)
    assert len(found) == 20
    assert found[-1] < 0.5 * found[0]


class Speaking(sort_digits.SortDigitsEnv):
    """Says what would have been right."""

    def step(self, action, **given):
        found = super().step(action, **given)
        return {**found, "metadata": {"feedback": "12"}}


def prompts(**given):
    return [row | {"env_class": f"{__name__}:Speaking"} for row in sort_digits.prompts(**given)]


def test_hindsight_is_resumed_to_the_bit(tmp_path):
    settings = HINDSIGHT | {"data.train_data": [f"{__name__}:prompts(size=64, seed=0)"]}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        exit_status(InterruptedExp, small(stopped, **settings))
    resumed, other = (train(small(folder, **settings)) for folder in (stopped, whole))
    assert metric_lines(stopped) == metric_lines(whole)
    assert_bitwise_equal(resumed.state, other.state)
    found = divergences(whole)
    assert len(found) == 4 and all(np.isfinite(found)) and min(found) > 0
