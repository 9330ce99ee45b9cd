"""A conversation of 65,536 tokens is sampled, packed, learnt from on split rows, and audited."""

import json
import shutil

import numpy as np
import pytest

from jaxrl.audit import audit
from jaxrl.envs import Env, StepOutput
from jaxrl.records.batch_file import batch_path, load_batch
from jaxrl.train import train
from tests.test_train import ROOT, metric_lines, small

ROW = 65_536
PAGE = 16_300  # tokens of the prompt, and of what each of three turns is told


class Reader(Env):
    """Tells a page after each answer; the reward is the share of digits in the answers."""

    def __init__(self, env_config=None, extras=None):
        super().__init__(env_config, extras)
        self.page = self.extras["page"]

    def step(self, action):
        self.turns += 1
        done = self.turns == 4
        told = [] if done else [{"role": "user", "content": "8" * self.page}]
        reward = sum(c.isdigit() for c in action) / max(len(action), 1)
        return StepOutput(observations=told, reward=reward, done=done)


def prompts():
    """One long conversation, and a short one beside it in a packed row."""
    for page in (PAGE, 40):
        yield {
            "prompt": [{"role": "user", "content": "7" * page}],
            "page": page,
            "env_class": "tests.test_long_rollout:Reader",
        }


def model_folder(folder):
    """One layer of one head, 32 wide."""
    shutil.copytree(ROOT / "configs" / "tiny_char_model", folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    settings |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    settings["max_position_embeddings"] = 2 * ROW
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.slow
def test_a_conversation_of_65k_tokens(tmp_path):
    """About 8 minutes of a core, most for the 2e9 pairs of tokens of two gradients; 1.7 GB."""
    config = small(
        tmp_path,
        **{
            "data.train_data": [f"{__name__}:prompts()"],
            "data.val_data": [],
            "environment.env_class": f"{__name__}:Reader",
            "trainer.policy.model.path": model_folder(tmp_path / "model"),
            "trainer.policy.mesh.context": 8,
            "trainer.policy.mesh.data": 1,
            "trainer.context_strategy": "ring",  # leaves out what no query of a part sees
            "trainer.use_sample_packing": True,
            "trainer.few_shapes": True,  # else rows of every length are compiled and run
            "trainer.max_training_steps": 1,
            "trainer.train_batch_size": 2,
            "trainer.policy_mini_batch_size": 2,
            "trainer.algorithm.use_kl_loss": False,
            "trainer.algorithm.advantage_estimator": "reinforce++",
            "trainer.algorithm.gamma": 1.0,
            "trainer.max_prompt_length": PAGE + 1,
            "trainer.eval_interval": -1,
            "trainer.ckpt_interval": 1,
            "trainer.hf_save_interval": -1,
            "trainer.print_example_interval": -1,
            "generator.n_samples_per_prompt": 1,
            "generator.max_turns": 4,
            "generator.max_input_length": ROW - 4,
            "generator.sampling_params.max_generate_length": 4,
        },
    )
    train(config)
    batch = load_batch(batch_path(config.trainer.export_path, 1))
    lengths = sorted(batch.lengths)
    # four pages, and after each ">" and an answer of 1 to 4 tokens, and perhaps its end
    assert 4 * PAGE + 4 * 2 <= lengths[-1] <= ROW
    assert lengths[-2] <= 4 * (40 + 6)
    assert np.all(batch.loss_mask.sum(axis=1) >= 4)
    (line,) = metric_lines(tmp_path)
    assert line["generate/avg_turns"] == 4
    # the sampler, in chunks on one device, and the update, on rows over eight, are one model
    assert line["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
    assert line["policy/grad_norm"] > 0
    checks = audit(tmp_path / "quickstart")
    assert not [failure for check in checks for failure in check.failures]
