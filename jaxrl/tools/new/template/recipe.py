"""A tiny model learns to write two-digit numbers backwards, from random weights.

jaxrl train recipe.py
"""

from pathlib import Path

from jaxrl.config import load_config_file

HERE = Path(__file__).parent


def get_config():
    """Return the config of the run: the quickstart's, with data and reward of this folder."""
    config = load_config_file("quickstart")
    config.data.train_data = [str(HERE / "prompts.jsonl")]
    config.data.val_data = []
    config.environment.env_class = "single_turn"
    config.environment.reward_functions = ["rewards:backwards"]

    trainer = config.trainer
    trainer.run_name = "my_project"
    trainer.algorithm.advantage_estimator = "grpo"
    trainer.epochs = 100
    trainer.max_training_steps = 120
    trainer.eval_interval = -1  # there is no evaluation data
    trainer.hf_save_interval = 120
    return config
