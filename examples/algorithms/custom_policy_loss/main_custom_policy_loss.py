r"""Trains with a policy loss of this file: REINFORCE, with a coefficient of its own.

    python examples/algorithms/custom_policy_loss/main_custom_policy_loss.py \
        --config=configs/quickstart.py --config.trainer.max_training_steps=100

A user of `python -m jaxrl.train` would name the function in the config instead, as
"my_module:reinforce". docs/custom_algorithms.md explains what a loss gets and returns.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl.config import apply_overrides, load_config_file, parse_command_line
from jaxrl.registry import register_policy_loss
from jaxrl.train import train
from jaxrl.trainer import Trainer

SETTINGS = {
    "trainer.run_name": "custom_policy_loss",
    "trainer.algorithm.policy_loss_type": "reinforce",
    "trainer.algorithm.policy_loss_kwargs.scale": 0.5,
}


@register_policy_loss("reinforce")
def reinforce(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    config: Any,
    loss_mask: jax.Array | None = None,
    rollout_log_probs: jax.Array | None = None,
    *,
    scale: float = 1.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """-scale A log pi of each token [B, T]; the trainer masks and reduces it."""
    return -scale * advantages * log_probs, {"advantage_max": advantages}


def main(arguments: Sequence[str]) -> Trainer:
    path, overrides = parse_command_line(list(arguments))
    return train(apply_overrides(load_config_file(path), {**SETTINGS, **overrides}))


if __name__ == "__main__":
    main(sys.argv[1:])
