r"""Trains with an advantage estimator of this file: the reward minus the batch's mean.

    python examples/algorithms/custom_advantage_estimator/main_custom_advantage_estimator.py \
        --config=configs/quickstart.py --config.trainer.max_training_steps=100

docs/custom_algorithms.md explains what an estimator gets and returns.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl.config import apply_overrides, load_config_file, parse_command_line
from jaxrl.registry import register_advantage_estimator
from jaxrl.train import train
from jaxrl.trainer import Trainer

SETTINGS = {
    "trainer.run_name": "custom_advantage_estimator",
    "trainer.algorithm.advantage_estimator": "simple_baseline",
}


@register_advantage_estimator("simple_baseline")
def simple_baseline(
    token_level_rewards: jax.Array, response_mask: jax.Array, index: jax.Array, **kwargs: Any
) -> tuple[jax.Array, jax.Array]:
    """Advantages and returns [B, T]: a row's reward minus the mean over all rows."""
    rewards = (token_level_rewards * response_mask).sum(axis=-1, keepdims=True)
    advantages = (rewards - rewards.mean()) * response_mask
    return advantages, advantages


def main(arguments: Sequence[str]) -> Trainer:
    path, overrides = parse_command_line(list(arguments))
    return train(apply_overrides(load_config_file(path), {**SETTINGS, **overrides}))


if __name__ == "__main__":
    main(sys.argv[1:])
