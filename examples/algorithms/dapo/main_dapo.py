r"""DAPO (https://arxiv.org/abs/2503.14476), its reward penalty in a trainer of one's own.

    python examples/algorithms/dapo/main_dapo.py \
        --config=configs/quickstart.py --config.trainer.max_training_steps=100

Clip-higher, the token-mean loss and dynamic sampling are settings. Soft overlong punishment (eq.
13) is one as well, `trainer.algorithm.overlong_buffer`; here it shows how to shape rewards in
Python: `Trainer.postprocess_generator_output` sees them before anything else does.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.config import apply_overrides, load_config_file, parse_command_line
from jaxrl.data.selection import soft_overlong_punishment
from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer
from jaxrl.types import GeneratorOutput

SETTINGS = {
    "trainer.run_name": "dapo",
    "trainer.algorithm.advantage_estimator": "grpo",
    "trainer.algorithm.eps_clip_high": 0.28,  # clip-higher
    "trainer.algorithm.loss_reduction": "token_mean",
    "trainer.algorithm.use_kl_loss": False,
    "trainer.algorithm.dynamic_sampling.type": "filter",
}
BUFFER_TOKENS, PENALTY = 2, 1.0  # the paper: 4096 of 20480 tokens


class DAPOTrainer(Trainer):
    """Responses that end in the last BUFFER_TOKENS tokens before the limit lose up to PENALTY."""

    def postprocess_generator_output(
        self, generator_output: GeneratorOutput, uids: Sequence[str]
    ) -> GeneratorOutput:
        lengths = [len(response) for response in generator_output["response_ids"]]
        longest = self.config.generator.sampling_params.max_generate_length
        punishment = soft_overlong_punishment(lengths, longest, BUFFER_TOKENS, PENALTY)
        scores = [float(np.sum(reward)) for reward in generator_output["rewards"]]
        rewards = [score - lost for score, lost in zip(scores, punishment, strict=True)]
        return super().postprocess_generator_output({**generator_output, "rewards": rewards}, uids)


class DAPOExp(BasePPOExp):
    """The run with that trainer."""

    def get_trainer(self, *args: Any, **kwargs: Any) -> DAPOTrainer:
        return DAPOTrainer(*args, **kwargs)


def main(arguments: Sequence[str]) -> Trainer:
    path, overrides = parse_command_line(list(arguments))
    return DAPOExp(apply_overrides(load_config_file(path), {**SETTINGS, **overrides})).run()


if __name__ == "__main__":
    main(sys.argv[1:])
