"""Run by pytest, in this folder: the reward by hand, then a run of two steps."""

import pytest
from recipe import get_config
from rewards import backwards

from jaxrl.train import train


@pytest.mark.parametrize(
    ("response", "reward"),
    [("24", 1.0), ("2", 0.25), ("42", 0.0), ("", 0.0), ("241", 0.5)],
)
def test_backwards(response, reward):
    assert backwards(response, {"prompt": "42", "answer": "24"}) == reward


def test_two_steps(tmp_path):
    config = get_config()
    config.trainer.max_training_steps = 2
    config.trainer.train_batch_size = config.trainer.policy_mini_batch_size = 4
    config.generator.n_samples_per_prompt = 4
    config.trainer.log_path = str(tmp_path)
    assert int(train(config).state.step) == 2
