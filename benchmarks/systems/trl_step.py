"""GRPO steps of TRL's GRPOTrainer with transformers' `generate`, for `grpo_step.py`.

Runs under a Python with trl; jaxrl is not imported. TRL takes the policy at the start of the update
as the old policy when there is one update per batch, and computes no old log-probs.
"""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from benchmarks.systems.worker import Clock, Workload, answer, reward, wait_for_step


class FixedLengths(LogitsProcessor):
    """Ends row i with its token number lengths[i], never before."""

    def __init__(self, eos_token_id: int, prompt_length: int) -> None:
        self.eos_token_id, self.prompt_length = eos_token_id, prompt_length
        self.lengths = torch.zeros(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [B, V] before the next token."""
        scores[:, self.eos_token_id] = -torch.inf
        last = self.lengths == input_ids.shape[1] - self.prompt_length + 1
        if last.any():
            scores[last] = -torch.inf
            scores[last, self.eos_token_id] = 0.0
        return scores


class Steps(TrainerCallback):
    """Waits for the parent before each step and answers after it."""

    def __init__(self, work: Workload, clock: Clock, processor: FixedLengths) -> None:
        self.work, self.clock, self.processor = work, clock, processor

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The step's data was read, nothing was sampled yet."""
        self.processor.lengths = torch.tensor(self.work.lengths[wait_for_step()])
        self.clock.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The optimizer has made its step."""
        total, seconds = self.clock.total(), self.clock.seconds
        update = total["total"] - seconds["rollout"]
        phases = {name: seconds[name] for name in ("generation", "reference")}
        answer(phases | {"update": update} | total)


def checked_rewards(
    processor: FixedLengths, completions: list[str], completion_ids: list[list[int]], **_: Any
) -> list[float]:
    """The rewards; checks that the responses have the lengths of the workload."""
    lengths, wanted = [len(ids) for ids in completion_ids], processor.lengths.tolist()
    if lengths != wanted:
        raise RuntimeError(f"responses of {lengths} tokens instead of {wanted}")
    return [reward(c) for c in completions]


def write_model(work: Workload) -> str:
    """A folder with random weights: TRL loads the reference from where the policy lies."""
    folder = str(Path(work.folder) / "trl")
    set_seed(0)
    config = AutoConfig.from_pretrained(work.folder)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(work.folder).save_pretrained(folder)
    return folder


def make_trainer(work: Workload, processor: FixedLengths) -> GRPOTrainer:
    """TRL's trainer, as near to jaxrl's config as its options allow."""
    settings = GRPOConfig(
        output_dir=str(Path(work.folder) / "trl_run"),
        per_device_train_batch_size=work.prompts * work.samples,
        num_generations=work.samples,
        max_completion_length=work.max_tokens,
        temperature=1.0,
        beta=work.kl_coef,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        loss_type="grpo",
        max_steps=10_000,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=write_model(work),
        reward_funcs=functools.partial(checked_rewards, processor),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": work.read_prompts()}),
    )
    trainer.model.generate = functools.partial(
        trainer.model.generate, logits_processor=LogitsProcessorList([processor])
    )
    return trainer


def time_phases(trainer: GRPOTrainer, clock: Clock) -> None:
    """Wrap the trainer's methods by the clock."""

    def phase(name: str, *_: Any, **__: Any) -> str:
        return name

    def whose_log_probs(model: Any, *_: Any, **__: Any) -> str:
        return "reference" if model is trainer.ref_model else "policy"

    def wrap(method: str, name: Any) -> None:
        setattr(trainer, method, clock.timed(getattr(trainer, method), name, lambda _: None))

    wrap("_generate", functools.partial(phase, "generation"))
    wrap("_calculate_rewards", functools.partial(phase, "generation"))
    wrap("_get_per_token_logps_and_entropies", whose_log_probs)
    wrap("_generate_and_score_completions", functools.partial(phase, "rollout"))


def main() -> None:
    """Train for ever, a step whenever the parent asks."""
    work = Workload.from_argv()
    settings = json.loads((Path(work.folder) / "config.json").read_text())
    processor, clock = FixedLengths(settings["eos_token_id"], work.prompt_length), Clock()
    trainer = make_trainer(work, processor)
    time_phases(trainer, clock)
    trainer.add_callback(Steps(work, clock, processor))
    answer({"threads": torch.get_num_threads(), "torch": torch.__version__})
    trainer.train()


if __name__ == "__main__":
    main()
