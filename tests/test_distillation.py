"""On-policy distillation: the student samples, the teacher is the reference model."""

import json

import pytest

from jaxrl import config as cfg
from jaxrl.config.objective_requirements import needs_old_log_probs, needs_reference
from jaxrl.envs.toys.sort_digits import prompts
from jaxrl.models import hf
from jaxrl.sft import sft
from jaxrl.train import BasePPOExp, train
from tests import test_sft
from tests.test_train import ROOT, metric_lines, small

DISTILL = {
    "trainer.algorithm.advantage_estimator": "on_policy_distillation",
    "trainer.algorithm.policy_loss_type": "importance_sampling",
    "trainer.algorithm.use_kl_loss": False,
    "trainer.algorithm.use_entropy_loss": False,
}


def test_it_needs_the_log_probs_of_teacher_and_student():
    for settings, needed in ((DISTILL, True), ({"trainer.algorithm.use_kl_loss": False}, False)):
        trainer = cfg.apply_overrides(cfg.TrainConfig(), settings).trainer
        trainer.policy_mini_batch_size = trainer.train_batch_size
        assert needs_reference(trainer.algorithm) is needed
        assert needs_old_log_probs(trainer) is needed


def test_a_row_per_turn_is_refused():
    settings = {
        **DISTILL,
        "trainer.ref.model.path": "a/teacher",
        "generator.step_wise_trajectories": True,
        "generator.max_turns": 2,
    }
    config = cfg.apply_overrides(cfg.TrainConfig(), settings)
    with pytest.raises(ValueError, match=r"'on_policy_distillation': with generator.step_wise"):
        cfg.validate(config)


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    for file in (ROOT / "configs" / "tiny_char_model").iterdir():
        text = file.read_text()
        swapped = text.replace('"a": 19', '"a": 20').replace('"b": 20', '"b": 19', 1)
        (teacher / file.name).write_text(swapped)
    config = small(tmp_path, **DISTILL, **{"trainer.ref.model.path": str(teacher)})
    with pytest.raises(ValueError, match=r"2 of 48 tokens differ, e.g. 'a' is 19 .* and 20 there"):
        BasePPOExp(config).build()


@pytest.mark.slow  # three runs
def test_the_student_approaches_a_teacher_of_another_architecture(tmp_path):
    rows = [
        {**row, "completion": row["reward_spec"]["ground_truth"]} for row in prompts(640, length=3)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def finetuned(name, steps, **settings):
        settings |= {
            "data.train_data": [str(data)],
            "data.val_data": [],
            "trainer.epochs": 6,
            "trainer.max_training_steps": steps,
            "trainer.train_batch_size": 32,
            "trainer.micro_train_batch_size_per_gpu": 4,
            "trainer.ckpt_interval": -1,
            "trainer.hf_save_interval": steps,
        }
        sft(test_sft.small(tmp_path / name, **settings))
        return str(tmp_path / name / f"exports/global_step_{steps}/policy")

    one_layer = {"trainer.policy.model_config_kwargs": {"num_hidden_layers": 1}}
    teacher, student = finetuned("teacher", 120, **one_layer), finetuned("student", 30)
    settings = {
        "data.train_data": ["jaxrl.envs.toys.sort_digits:prompts(size=640, length=3)"],
        "trainer.policy.model.path": student,
        "trainer.policy.model.random_init": False,
        "trainer.ref.model.path": teacher,
        "trainer.max_training_steps": 40,
        "trainer.train_batch_size": 32,
        "trainer.policy_mini_batch_size": 32,
        "trainer.micro_train_batch_size_per_gpu": 16,
        "trainer.micro_forward_batch_size_per_gpu": 16,
        **dict.fromkeys(("trainer.eval_interval", "trainer.ckpt_interval"), -1),
        "trainer.hf_save_interval": -1,
    }
    trainer = train(small(tmp_path / "distilled", **DISTILL, **settings))
    assert hf.load_config(teacher).num_layers == trainer.reference.weights.model.num_layers == 1
    assert trainer.policy.model.num_layers == 2
    lines = metric_lines(tmp_path / "distilled")
    # minus the reverse KL per token, by its estimate on the 128 samples of a step
    kl = [-line["loss/avg_raw_advantages"] for line in lines]
    assert sum(kl[-5:]) < sum(kl[:5]) / 2
    # no reward was given for it
    reward = [line["reward/avg_raw_reward"] for line in lines]
    assert sum(reward[-5:]) > sum(reward[:5])
