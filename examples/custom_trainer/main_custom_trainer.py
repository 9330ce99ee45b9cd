r"""Trains with a trainer of this file: one line of the step is another one.

    python examples/custom_trainer/main_custom_trainer.py --negative=0.25
    python examples/custom_trainer/main_custom_trainer.py --negative=1.0   # the trainer as it is

A step is nine lines, each a method of `Trainer` (docs/data_flow.md). Here the sixth, the
advantages, is overridden: negative ones are multiplied, so that the policy learns more from what
went well than from what went wrong. It also logs a metric of its own. `BasePPOExp.get_trainer`
returns the class. At the end of 45 steps of the quickstart's task (31 s on one core) it prints the
effect: the reward is as high, 0.78 and 0.80 without, and the entropy higher, 0.77 and 0.48.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config import apply_overrides, load_config_file, parse_command_line
from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer
from jaxrl.types import TrainBatch

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.py"


class SuccessFirstTrainer(Trainer):
    """Negative advantages count `negative` times as much."""

    def __init__(self, *args: Any, negative: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.negative = negative

    def add_advantages(self, batch: TrainBatch) -> TrainBatch:
        batch = super().add_advantages(batch)
        advantages = np.asarray(batch.advantages)  # [B, T], on the host, 0 outside the response
        sampled = np.asarray(batch.loss_mask) > 0
        share = (advantages < 0).sum() / max(sampled.sum(), 1)  # the warm-up samples nothing
        self.metrics["advantage/share_negative"] = float(share)
        scale = np.where(advantages < 0, self.negative, 1.0).astype(np.float32)
        return batch.replace(advantages=advantages * scale)

    def train_step(self, step: int) -> dict[str, float]:
        metrics = super().train_step(step)
        if step == self.total_steps:
            names = ("reward/avg_raw_reward", "policy/policy_entropy", "advantage/share_negative")
            print(f"negative {self.negative}:", {name: round(metrics[name], 3) for name in names})
        return metrics


class SuccessFirstExp(BasePPOExp):
    """The run with that trainer."""

    def __init__(self, config: Any, negative: float) -> None:
        super().__init__(config)
        self.negative = negative

    def get_trainer(self, *args: Any, **kwargs: Any) -> SuccessFirstTrainer:
        return SuccessFirstTrainer(*args, negative=self.negative, **kwargs)


def main(arguments: Sequence[str]) -> Trainer:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--negative", type=float, default=0.25)
    given, rest = parser.parse_known_args(arguments)
    path, overrides = parse_command_line([f"--config={QUICKSTART}", *rest])
    run = f"custom_trainer_{given.negative:g}"  # another trainer is another run
    settings = {"run_name": run, "max_training_steps": 45}
    settings = {f"trainer.{name}": value for name, value in settings.items()}
    settings["trainer.policy.optimizer_config.scheduler"] = "constant"
    config = apply_overrides(load_config_file(path), {**settings, **overrides})
    return SuccessFirstExp(config, given.negative).run()


if __name__ == "__main__":
    main(sys.argv[1:])
