"""Distillation: the student samples; the teacher is a reference, or the student that knows more."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl import config as cfg
from jaxrl.config.objective_requirements import needs_old_log_probs, needs_reference
from jaxrl.envs.toys import sort_digits
from jaxrl.envs.toys.sort_digits import prompts
from jaxrl.models import hf
from jaxrl.sft import sft
from jaxrl.train import BasePPOExp, train
from tests import test_sft
from tests.test_resume import resumed_as_whole
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


@pytest.mark.slow
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


def told_prompts(**given):
    return [row | {"env_class": f"{__name__}:Speaking"} for row in prompts(**given)]


@pytest.mark.some(1)
@pytest.mark.parametrize("top_k", [None, 8])
def test_hindsight_is_resumed_to_the_bit(tmp_path, top_k):
    settings = HINDSIGHT | {
        "trainer.algorithm.distillation.top_k": top_k,
        "data.train_data": [f"{__name__}:told_prompts(size=64, seed=0)"],
        "generator.sampling_params.max_generate_length": 3,  # with 5 of a prompt: of one width
    }
    whole, _ = resumed_as_whole(tmp_path, lambda folder: small(folder, **settings))
    found = divergences(whole)
    assert len(found) == 4 and all(np.isfinite(found)) and min(found) > 0
    taught = [x["policy/taught_tokens"] for x in metric_lines(whole) if "policy/taught_tokens" in x]
    assert taught == [1.0] * 4


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"coef": 0.0, "beta": 1.0}, r"coef=0.0.*no teacher.*set it to 1.0"),
        ({"policy_loss_coef": 0.0}, r"trainer.ref.model.path=.*the policy's own model"),
        ({"right_reward": 0.5}, r"right_reward=0.5.*no effect with teacher='ref'"),
        ({"teacher": "hindsight", "solution_hint": "so"}, r"must have \{solution\} in it"),
        ({"teacher": "hindsight", "solution_hint": "", "feedback_hint": ""}, "nothing to read"),
        ({"teacher": "hindsight", "trainer.exact": "log_probs"}, "not computed exactly"),
        (
            {"teacher": "hindsight", "trainer.max_tokens_per_microbatch": 2048},
            r"max_tokens_per_microbatch=2048: less than one row of 3072 tokens",
        ),
        (
            {
                "teacher": "hindsight",
                "generator.step_wise_trajectories": True,
                "generator.max_turns": 2,
            },
            "says whether it was right",
        ),
        (
            {"teacher": "hindsight", "feedback_hint": "", "generator.n_samples_per_prompt": 1},
            "there is no other sample",
        ),
    ],
)
def test_a_teacher_with_nothing_to_say_is_refused(settings, match):
    fields = {"coef": 1.0, **settings}
    config = cfg.apply_overrides(
        cfg.TrainConfig(),
        {k if "." in k else f"trainer.algorithm.distillation.{k}": v for k, v in fields.items()},
    )
    with pytest.raises(ValueError, match=match):
        cfg.validate(cfg.resolve(config))
