r"""Trains with a generator of this file, which samples and judges without any environment.

    python examples/custom_generator/main_custom_generator.py

`BasePPOExp.get_generator` returns it; the trainer asks it for trajectories, and checks what it
gives. The quickstart's task: a share of the reward for each digit in its place, and for stopping
there. In 50 steps (28 s on one core) it goes from 0.03 to 0.88. docs/rollouts.md has the contract.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.config import apply_overrides, load_config_file, parse_command_line
from jaxrl.rollout.generator import GeneratorInterface
from jaxrl.rollout.protocol import Completion, Engine, Request
from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer
from jaxrl.types import GeneratorInput, GeneratorOutput

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.py"
SETTINGS = {
    "trainer.run_name": "custom_generator",
    "trainer.max_training_steps": 50,
    "trainer.policy.optimizer_config.scheduler": "constant",
    "trainer.policy.optimizer_config.lr": 3e-3,
}


class DirectGenerator(GeneratorInterface):
    """A sample of each entry of the batch, with a reward per token."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self.engine, self.tokenizer = engine, tokenizer

    async def generate(self, batch: GeneratorInput) -> GeneratorOutput:
        """Token ids in, token ids out: what was sampled is never tokenised again."""
        prompts, keys, sampling = batch["prompts"], batch["keys"], batch["sampling"]
        requests = [Request(p.tokens, (k,), sampling) for p, k in zip(prompts, keys, strict=True)]
        futures = [future for (future,) in self.engine.submit(requests)]
        samples = await asyncio.gather(*map(asyncio.wrap_future, futures))
        rewards = [self.judge(p.messages, s) for p, s in zip(prompts, samples, strict=True)]
        right = sum(sum(row) > 0.99 for row in rewards) / len(rewards)
        return GeneratorOutput(
            prompt_token_ids=[list(prompt.tokens) for prompt in prompts],
            response_ids=[sample.tokens for sample in samples],
            rewards=rewards,
            loss_masks=[[1] * len(sample.tokens) for sample in samples],
            stop_reasons=[sample.stop_reason for sample in samples],
            rollout_logprobs=[sample.log_probs for sample in samples],
            policy_versions=[sample.versions[0] for sample in samples],
            rollout_metrics={"environment/all_right": right},  # logged under this name
        )

    def judge(self, messages: list[dict[str, Any]], sample: Completion) -> list[float]:
        """A reward for each token: whether it is the digit that belongs there, or the end."""
        wanted = [*sorted(messages[-1]["content"]), self.tokenizer.eos_token]
        said = [self.tokenizer.decode([token]) for token in sample.tokens]
        pairs = zip(said, wanted + [None] * len(said), strict=False)
        return [float(one == other) / len(wanted) for one, other in pairs]


class DirectExp(BasePPOExp):
    def get_generator(self, engine: Engine, tokenizer: Any) -> DirectGenerator:
        return DirectGenerator(engine, tokenizer)


def main(arguments: Sequence[str]) -> Trainer:
    path, overrides = parse_command_line([f"--config={QUICKSTART}", *arguments])
    return DirectExp(apply_overrides(load_config_file(path), {**SETTINGS, **overrides})).run()


if __name__ == "__main__":
    main(sys.argv[1:])
