"""GRPO steps of jaxrl's own trainer, for `grpo_step.py`."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import roofline
from benchmarks.systems.worker import Clock, Workload, answer, reward, wait_for_step
from jaxrl.array_ops import DTYPES
from jaxrl.config import default_config
from jaxrl.data.packing import length_bucket
from jaxrl.envs.protocol import Env, StepOutput
from jaxrl.models.transformer import TransformerConfig
from jaxrl.rollout.conversations.conversation import ConversationGenerator
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.slots import Sample
from jaxrl.rollout.protocol import Completion, Engine, Request
from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer
from jaxrl.types import GeneratorInput, GeneratorOutput


class ShareOfEven(Env):
    """Rewards a response by `worker.reward`."""

    def step(self, action: str) -> StepOutput:
        """One turn, whatever the answer."""
        return StepOutput(observations=[], reward=reward(action), done=True, metadata={})


class FixedLengthEngine(NativeEngine):
    """The native engine with a limit of its own for every sample of the step."""

    lengths: Sequence[int] = ()
    limits: Iterator[int] = iter(())

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """Queue the step's requests, with the lengths of the workload."""
        self.limits = iter(self.lengths)
        return super().submit(requests)

    def _samples(self, request: Request) -> list[Sample]:
        samples = super()._samples(request)
        for sample in samples:
            sample.max_tokens = next(self.limits, 1)  # a warm-up has no lengths
        return samples


class FixedLengthGenerator(ConversationGenerator):
    """Nothing stops a response but its limit; checks that the engine kept to the limits."""

    async def generate(self, batch: GeneratorInput) -> GeneratorOutput:
        """Trajectories of the lengths of the workload."""
        sampling = dataclasses.replace(batch["sampling"], stop_token_ids=())
        output = await super().generate({**batch, "sampling": sampling})
        lengths = [len(tokens) for tokens in output["response_ids"]]
        wanted = list(self.engine.lengths)  # type: ignore[attr-defined]
        if lengths != wanted:
            raise RuntimeError(f"responses of {lengths} tokens instead of {wanted}")
        return output


class StepExp(BasePPOExp):
    """A run with fixed response lengths."""

    def get_engine(self, model: TransformerConfig, mesh: jax.sharding.Mesh) -> Engine:
        """The native engine."""
        settings = self.config.generator.inference_engine
        rows = self.config.trainer.train_batch_size * self.config.generator.n_samples_per_prompt
        dtype = DTYPES[settings.model_dtype]
        return FixedLengthEngine(model, mesh, dtype=dtype, max_num_seqs=rows)

    def get_generator(self, engine: Engine, tokenizer: Any) -> FixedLengthGenerator:
        """Judges inline: the reward costs microseconds."""
        return FixedLengthGenerator(engine, tokenizer, max_env_workers=0)


def make_config(work: Workload) -> Any:
    """The run's config."""
    folder = Path(work.folder)
    config: Any = default_config()
    config.data.train_data = [str(folder / "prompts.jsonl")]
    config.environment.env_class = "benchmarks.systems.jaxrl_step:ShareOfEven"
    config.generator.n_samples_per_prompt = work.samples
    config.generator.sampling_params.max_generate_length = work.max_tokens
    config.generator.inference_engine.model_dtype = "bfloat16" if work.bf16 else "float32"

    trainer = config.trainer
    trainer.policy.model.path, trainer.policy.model.random_init = work.folder, True
    trainer.policy.optimizer_config.lr = work.learning_rate
    trainer.algorithm.kl_estimator_type = "k1"
    trainer.algorithm.kl_loss_coef = work.kl_coef
    trainer.gradient_checkpointing = work.bf16  # activations of the large shapes would not fit
    trainer.bf16 = work.bf16
    trainer.epochs = 1000
    trainer.train_batch_size = trainer.policy_mini_batch_size = work.prompts
    # as many tokens at a time as the rows of the others hold
    trainer.use_sample_packing = True
    longest = work.prompt_length + work.max_tokens
    trainer.max_tokens_per_microbatch = work.micro_batch_rows * length_bucket(longest)
    trainer.micro_train_batch_size_per_gpu = work.micro_batch_rows
    trainer.micro_forward_batch_size_per_gpu = work.micro_batch_rows
    trainer.max_prompt_length = work.prompt_length
    trainer.eval_interval = trainer.ckpt_interval = trainer.print_example_interval = -1
    trainer.resume_mode = "none"
    trainer.log_path = trainer.ckpt_path = trainer.export_path = str(folder / "run")
    return config


class Steps:
    """The trainer, ready for `train_step`, and the clock that splits its log-prob phase."""

    def __init__(self, work: Workload) -> None:
        self.work, self.clock, self.number = work, Clock(), 0
        self.trainer: Trainer = StepExp(make_config(work)).build()
        self.trainer.state = self.trainer.restore_or_init()
        self.trainer.batches_drawn = 0
        self.trainer.load_reference()
        self.trainer.sync_weights(0)
        forward_pass, done = self.trainer.forward_pass, lambda _: None  # it returns host arrays
        self.trainer.forward_pass = self.clock.timed(forward_pass, lambda *_: "old", ready=done)
        self.trainer.ref_forward_pass = self.clock.timed(
            forward_pass, lambda *_: "reference", ready=done
        )

    def run(self, workload: str) -> Mapping[str, float]:
        """One step; seconds by phase."""
        trainer = self.trainer
        trainer.engine.lengths = self.work.lengths[workload]  # type: ignore[attr-defined]
        self.number += 1
        self.clock.start()
        metrics = trainer.train_step(self.number)
        jax.block_until_ready(trainer.state)
        return {
            "generation": metrics["timing/generate"],
            **self.clock.seconds,  # the log-prob passes that the step needed
            "update": metrics["timing/policy_train"],
        } | self.clock.total()


def main() -> None:
    """Measure the machine, then answer the parent."""
    work = Workload.from_argv()
    dtype = jnp.bfloat16 if work.bf16 else jnp.float32
    rates = roofline.measure_rates(dtype, smoke=work.max_tokens < 16)
    steps = Steps(work)
    answer({"rates": dataclasses.asdict(rates), "device": jax.devices()[0].device_kind})
    while True:
        answer(dict(steps.run(wait_for_step())))


if __name__ == "__main__":
    main()
