"""Environments of other libraries through the whole training loop, on a tiny model."""

import json
import shutil

import pytest

from jaxrl.audit import audit
from jaxrl.train import train
from tests.test_train import ROOT, assert_bitwise_equal, metric_lines, small

pytestmark = pytest.mark.slow
SHORT = {  # runs that are about the environment
    "data.val_data": [],
    "trainer.hf_save_interval": -1,
    "trainer.dump_data_batch": False,
    "trainer.algorithm.use_kl_loss": False,
    "trainer.micro_train_batch_size_per_gpu": 64,
    "trainer.micro_forward_batch_size_per_gpu": 64,
}


def run(folder, **settings):
    """A run's metrics, a line for each step."""
    train(small(folder, **{**SHORT, **settings}))
    return steps_of(folder)


def steps_of(folder):
    """The lines of the steps; there is one of the start before them."""
    return [line for line in metric_lines(folder) if line["step"] > 0]


def test_a_curriculum_of_reasoning_gym_is_the_order_of_the_data_and_resumes(tmp_path):
    settings = {
        "data.train_data": [
            "jaxrl.envs.adapters.reasoning_gym:curriculum(family='chain_sum', size=16, "
            "levels=[0, 1], extract='last_number')"
        ],
        "data.shuffle": False,
        "trainer.max_prompt_length": 128,
        "trainer.algorithm.max_seq_len": 136,
    }
    whole = tmp_path / "whole"
    lines = run(whole, **settings)
    # 8 rows at each level in batches of 4
    assert [line["environment/level"] for line in lines] == [0.0, 0.0, 1.0, 1.0]
    assert all("environment/solved" in line and "reward/avg_raw_reward" in line for line in lines)
    assert not any(check.failures for check in audit(whole / "quickstart"))
    cut = tmp_path / "cut"
    run(cut, **settings, **{"trainer.max_training_steps": 2})
    resumed = train(small(cut, **SHORT, **settings, **{"trainer.resume_mode": "latest"}))
    assert steps_of(cut) == lines
    again = train(small(tmp_path / "again", **SHORT, **settings))
    assert_bitwise_equal(resumed.state.params, again.state.params)


def test_a_multi_turn_environment_of_skyrl_gym(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(ROOT / "configs" / "tiny_char_model", model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for digit, letter in enumerate("ghijklmnop"):  # what this environment wants to hear
        vocabulary[f"#### {digit}"] = vocabulary.pop(letter)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    rows = [
        {
            "prompt": f"{i % 5} + {i % 4}",
            "env_class": "skyrl_gym:gsm8k_multi_turn",
            "reward_spec": {"ground_truth": str(i % 5 + i % 4)},
        }
        for i in range(16)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "data.train_data": [str(tmp_path / "rows.jsonl")],
        "trainer.policy.model.path": str(model),
        "trainer.algorithm.max_seq_len": 256,
        "generator.max_turns": 2,
        "generator.max_input_length": 250,
        "generator.sampling_params.max_generate_length": 6,
    }
    lines = run(tmp_path, **settings)
    assert len(lines) == 4
    # Its own metric; an answer in its form earns 0.1 in each of the two turns, the right one 1.
    assert all(1.0 <= line["environment/avg_steps"] <= 2.0 for line in lines)
    assert all(0.0 < line["reward/avg_raw_reward"] < 1.0 for line in lines)
    assert all(line["generate/env_errors"] == 0 for line in lines)


def test_an_environment_of_gymnasium(tmp_path):
    settings = {
        "data.train_data": [
            "jaxrl.envs.adapters.gymnasium:prompts(name='FrozenLake-v1', size=16, "
            "is_slippery=False, desc=['SG'], action_pattern='([0-3])', instruction='go', "
            f"observe='{__name__}:place')"
        ],
        "trainer.algorithm.max_seq_len": 256,
        "generator.max_turns": 3,
        "generator.max_input_length": 250,
        "generator.sampling_params.max_generate_length": 4,
    }
    lines = run(tmp_path, **settings)
    assert len(lines) == 4
    assert any(line["reward/avg_raw_reward"] > 0 for line in lines)
    for line in lines:
        assert line["environment/return"] == pytest.approx(line["reward/avg_raw_reward"])
        assert line["generate/env_errors"] == 0


def place(env, observation):
    """Where one stands, as a number."""
    return str(observation)
