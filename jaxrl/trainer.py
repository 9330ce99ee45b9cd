"""The synchronous trainer: the whole step top to bottom.

One step is the nine lines of `Trainer.train_step` and `Trainer.train`; each line is one method that
calls pure functions with explicit state. Everything random is named by (seed, step, prompt,
sample), so a run that is killed and resumed equals one that was not.
"""

import contextlib
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxrl import config as cfg
from jaxrl.assemble import assemble_policy, assemble_update
from jaxrl.checkpoint import Checkpointer, resume
from jaxrl.compilation import CompilationWatch
from jaxrl.config.needs import kl_in_reward, needs_old_log_probs
from jaxrl.data.packing import collate, minibatches
from jaxrl.data.prompts import batch_indices
from jaxrl.evaluate import dump_rows, evaluate
from jaxrl.files import writable_folder
from jaxrl.metrics import (
    RunLogger,
    advantage_metrics,
    check_surprise,
    mismatch_metrics,
    progress_line,
    rollout_metrics,
    timed,
)
from jaxrl.models import hf
from jaxrl.models.adapter import AdaptedModel, check_packing
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.objective import step_metrics
from jaxrl.offload import on_device
from jaxrl.optim import init_state
from jaxrl.parallel import replicated
from jaxrl.registry import source_hashes
from jaxrl.rewards import advantages_of, make_estimate, next_kl_coef, penalize_kl, shape_rewards
from jaxrl.rollout.conversation import generator_input, sampling_of
from jaxrl.rollout.dynamic_sampling import dynamic_sampling
from jaxrl.rollout.generator import GeneratorInterface, generate_now
from jaxrl.rollout.protocol import Engine
from jaxrl.rollout.step_wise import merge_steps, trajectory_numbers
from jaxrl.types import GeneratorOutput, Prompt, TrainBatch, TrainState
from jaxrl.warm_up import warm_up


class Trainer:
    """The synchronous loop. Subclass it and override a line; `BasePPOExp.get_trainer` returns it.

    Args:
        config: resolved and validated.
        tokenizer: of the policy.
        model: architecture of the policy.
        mesh: devices.
        engine: gets the weights after every step.
        generator: makes the trajectories.
        train_prompts, eval_prompts: tokenised prompts; no evaluation without the latter.
    """

    def __init__(
        self,
        config: cfg.TrainConfig,
        *,
        tokenizer: Any,
        model: TransformerConfig | AdaptedModel,
        mesh: jax.sharding.Mesh,
        engine: Engine,
        generator: GeneratorInterface,
        train_prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt],
    ) -> None:
        self.config, self.tokenizer, self.model, self.mesh = config, tokenizer, model, mesh
        self.engine, self.generator = engine, generator
        self.train_prompts, self.eval_prompts = train_prompts, eval_prompts
        trainer = config.trainer
        self.samples = config.generator.n_samples_per_prompt
        self.steps_per_epoch = len(train_prompts) // trainer.train_batch_size
        batch_indices(0, trainer.train_batch_size, len(train_prompts), seed=trainer.seed)  # checks
        self.total_steps = trainer.epochs * self.steps_per_epoch
        if trainer.max_training_steps is not None:
            self.total_steps = min(self.total_steps, trainer.max_training_steps)
        path = trainer.policy.model.path or ""  # validated
        self.eos_token_ids = sorted({tokenizer.eos_token_id, *hf.eos_token_ids(path)})
        self.generation_config = hf.load_generation_config(path)
        self.metrics: dict[str, float] = {}
        self.ref_params: Any = None
        self.state: TrainState
        self.logger: RunLogger
        self._build()

    def _build(self) -> None:
        """Everything that is compiled or placed once."""
        trainer = self.config.trainer
        self.policy, self.scorer, self.ref_scorer = assemble_policy(
            self.config, self.model, self.mesh
        )
        placement = self.policy.placement
        self.optimizer, self.like, self.updater = assemble_update(
            self.config, self.scorer, placement, self.total_steps, self.policy.trained
        )
        self.minibatch_rows = trainer.policy_mini_batch_size * self.samples
        self.estimate = jax.jit(make_estimate(trainer.algorithm))
        writable_folder("trainer.log_path", cfg.run_folder(trainer))
        writable_folder("trainer.export_path", trainer.export_path)
        self.checkpointer = Checkpointer(trainer.ckpt_path, max_to_keep=trainer.max_ckpts_to_keep)
        self.checkpoint_meta = {
            "config": cfg.get_config_as_dict(self.config),
            "functions": source_hashes(trainer.algorithm),
        }

    @property
    def params(self) -> Params:
        """All parameters of the policy, on its devices: with adapters these on their base."""
        return on_device(self.policy.whole(self.state.params))

    # ---------------------------------------------------------------- the loop

    def train(self) -> TrainState:
        """Train from the newest checkpoint, or from the start, to the last step."""
        trainer = self.config.trainer
        self.state = self.updater.rest(self.restore_or_init())
        if trainer.use_sample_packing and isinstance(self.model, AdaptedModel):
            check_packing(self.model, self.params)
        first, self.batches_drawn = int(self.state.step), int(self.state.batches_drawn)
        self.load_reference()
        self.logger = RunLogger(cfg.run_folder(trainer), cfg.logger_names(trainer.logger), first)
        self.logger.write_config(cfg.get_config_as_dict(self.config))
        self.sync_weights(first)
        if first >= self.total_steps:
            print(
                f"nothing to do: {trainer.ckpt_path} holds step {first} of {self.total_steps}. "
                "Raise trainer.epochs, or choose another trainer.ckpt_path to start again"
            )
        with (
            CompilationWatch(warm_after=first + 1) as self.watch,
            contextlib.closing(self.logger),
            contextlib.closing(self.checkpointer),  # waits for the save under way, come what may
            tqdm(total=self.total_steps, initial=first, desc=trainer.run_name) as bar,
        ):
            if first < self.total_steps:
                warm_up(self)
            if first == 0 and trainer.eval_before_train and trainer.eval_interval > 0:
                self.record(0, self.evaluate(0))
            for step in range(first + 1, self.total_steps + 1):
                metrics = self.train_step(step)
                if self._due(step, trainer.eval_interval):
                    metrics |= self.evaluate(step)
                self.record(step, metrics)  # 9
                self.save(step)
                bar.set_postfix(progress_line(metrics))
                bar.update()
            self.logger.plot()
        return self.state

    def train_step(self, step: int) -> dict[str, float]:
        """One step on one batch of prompts; returns its metrics."""
        started = time.perf_counter()
        self.metrics = {}
        with timed(self.metrics, "generate"):
            output, uids = self.rollouts(step)  # 1, 2, 3
            self.engine.sleep()  # its copy of the weights is of no more use
        output = self.postprocess_generator_output(output, uids)
        batch = self.collate(output)  # 4
        with timed(self.metrics, "fwd_logprobs_values_reward"):
            batch = self.add_log_probs(batch)  # 5
        batch = self.add_advantages(batch)  # 6
        with timed(self.metrics, "policy_train"):
            self.update(batch, step)  # 7
        with timed(self.metrics, "sync_weights"):
            self.sync_weights(step)  # 8
        self.print_example(step, batch, output)
        seconds = time.perf_counter() - started
        tokens = float(batch.lengths.sum())
        return self.metrics | {
            "timing/step": seconds,
            "trainer/tokens_per_second_per_gpu": tokens / seconds / self.mesh.size,
            "trainer/global_step": step,
            "trainer/epoch": (self.batches_drawn - 1) // self.steps_per_epoch,
        }

    # ---------------------------------------------------------------- 1 to 6: the batch

    def rollouts(self, step: int) -> tuple[GeneratorOutput, list[str]]:
        """Judged trajectories and their uids; dynamic sampling draws as often as it must."""
        trainer = self.config.trainer

        def draw(attempt: int) -> tuple[GeneratorOutput, list[str]]:
            self.metrics["generate/sampled_batches"] = attempt
            prompts = self.next_prompts(step)  # 1
            self.batches_drawn += 1
            uids = [p.uid for p in prompts for _ in range(self.samples)]
            return self.generate(prompts, step, attempt), uids  # 2, 3

        settings, tol = (
            trainer.algorithm.dynamic_sampling,
            trainer.algorithm.zero_variance_filter_tol,
        )
        if settings.type is None:
            return draw(1)
        size, seed = trainer.train_batch_size, (trainer.seed, step)
        return dynamic_sampling(draw, settings, prompts=size, tol=tol, seed=seed)

    def next_prompts(self, step: int) -> list[Prompt]:
        """The next batch of prompts: a function of the seed and the number of batches drawn."""
        trainer = self.config.trainer
        size, total = trainer.train_batch_size, len(self.train_prompts)
        rows = batch_indices(self.batches_drawn, size, total, seed=trainer.seed)
        return [self.train_prompts[i] for i in rows]

    def generate(self, prompts: Sequence[Prompt], step: int, attempt: int = 1) -> GeneratorOutput:
        """`n_samples_per_prompt` judged trajectories for each prompt.

        Args:
            attempt: number of the batch within the step.
        """
        phase = "train" if attempt == 1 else f"train, batch {attempt}"
        return self._generate(
            phase, prompts, step, self.samples, params=self.config.generator.sampling_params
        )

    def postprocess_generator_output(
        self, generator_output: GeneratorOutput, uids: Sequence[str]
    ) -> GeneratorOutput:
        """Reward metrics; rewards per token, and what is filtered or punished."""
        self.metrics |= rollout_metrics(generator_output, uids, self.samples)
        output, metrics = shape_rewards(
            generator_output, uids, self.config.generator, self.config.trainer.algorithm
        )
        self.metrics |= metrics
        return output

    def collate(self, output: GeneratorOutput) -> TrainBatch:
        """Rows [B, T]; the samples of a prompt are a group."""
        last = output.get("is_last_step", [True] * len(output["response_ids"]))
        return collate(output, index=trajectory_numbers(last) // self.samples)

    def add_log_probs(self, batch: TrainBatch) -> TrainBatch:
        """Log-probs that the loss needs: of the policy as it is now, and of the reference."""
        blind = batch.rollout_log_probs is None  # the sampler has none
        if needs_old_log_probs(self.config.trainer) or blind:
            old, entropy = self.scorer(self.params, batch, with_entropy=blind)
            batch = batch.replace(old_log_probs=old)
            self.metrics |= mismatch_metrics(batch, entropy)
            check_surprise(self.metrics, self.config.generator.sampling_params)
        if self.ref_params is not None:
            ref, _ = self.ref_scorer(on_device(self.ref_params), batch)
            batch = batch.replace(ref_log_probs=ref)
        return batch

    def add_advantages(self, batch: TrainBatch) -> TrainBatch:
        """Advantages and returns of the whole batch; before them the KL in the rewards."""
        algorithm = self.config.trainer.algorithm
        if kl_in_reward(algorithm):
            batch, metrics = penalize_kl(batch, self.state.kl_coef, algorithm)
            self.metrics |= metrics
        advantages, returns = advantages_of(self.estimate, batch)
        batch = batch.replace(advantages=advantages, returns=returns)
        self.metrics |= advantage_metrics(batch)
        return batch.replace(is_last_step=None)

    # ---------------------------------------------------------------- 7 to 9: the update

    def update(self, batch: TrainBatch, step: int) -> None:
        """One optimizer update per minibatch of whole prompt groups."""
        trainer = self.config.trainer
        key = jax.random.fold_in(jax.random.key(trainer.seed), step)
        prompts = trainer.policy_mini_batch_size
        weighed = [(m, *self.updater.weights(m)) for m in minibatches(batch, prompts)]
        pending = []  # device values: nothing is fetched before the last update is dispatched
        for number, (minibatch, weights, correction) in enumerate(
            weighed * trainer.update_epochs_per_batch
        ):
            params = self.policy.whole(self.state.params)
            self.state, parts, applied = self.updater.update(
                self.state, minibatch, weights, jax.random.fold_in(key, number), params
            )
            pending.append((parts, applied | correction))
        metrics = step_metrics(pending)
        if skipped := metrics["policy/skipped_updates"]:
            tqdm.write(f"step {step}: {skipped} updates skipped, their gradient was not finite")
        efficiency = self.updater.packing_efficiency([m for m, *_ in weighed])
        self.metrics |= metrics | {"trainer/packing_efficiency": efficiency}
        self.finish(step, rows=len(batch.index))

    def finish(self, step: int, rows: int) -> None:
        """What a step leaves in the state beside the optimizer's work."""
        control = self.config.trainer.algorithm.kl_ctrl
        coef = next_kl_coef(float(self.state.kl_coef), self.metrics, control, rows)
        numbers = {
            "step": np.int32(step),
            "batches_drawn": np.int32(self.batches_drawn),
            "kl_coef": np.float32(coef),
        }
        self.state = self.state.replace(**jax.device_put(numbers, self.like.step.sharding))

    def sync_weights(self, step: int) -> None:
        """Hand the parameters to the engine; they are version `step`."""
        self.engine.update_weights(self.params, step)

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Write the numbers of a step, and what was compiled since the last."""
        self.logger.log(step, metrics | self.watch.metrics(step))

    def save(self, step: int) -> None:
        """Checkpoint and export when they are due.

        By interval, at epoch ends, after the last step.
        """
        trainer = self.config.trainer
        if self._due(step, trainer.hf_save_interval):
            self.export(Path(trainer.export_path) / f"global_step_{step}" / "policy")
        epoch_end = step % self.steps_per_epoch == 0
        if self._due(step, trainer.ckpt_interval) or (epoch_end and trainer.ckpt_interval > 0):
            self.logger.plot()
            self.logger.flush()
            # Last: a resumed run goes on after it.
            self.checkpointer.save(step, self.state, self.checkpoint_meta)

    # ---------------------------------------------------------------- around the steps

    def evaluate(self, step: int) -> dict[str, float]:
        """Score the evaluation prompts, per data source and over all."""
        trainer, generator = self.config.trainer, self.config.generator
        if not self.eval_prompts or generator.eval_sampling_params is None:
            return {}
        with timed(self.metrics, "eval"):
            metrics, rows = evaluate(
                functools.partial(self._generate, "eval", params=generator.eval_sampling_params),
                self.eval_prompts,
                step,
                samples=generator.eval_n_samples_per_prompt,
                batch_size=trainer.eval_batch_size,
                tokenizer=self.tokenizer,
            )
        if trainer.dump_eval_results:
            dump_rows(Path(trainer.export_path) / "dumped_evals", step, rows)
        return metrics | {"timing/eval": self.metrics["timing/eval"]}

    def restore_or_init(self) -> TrainState:
        """The state of the checkpoint that the config points to, else that of the model folder."""
        trainer = self.config.trainer
        self.checkpoint_meta["model"] = self.policy.describe()
        mode, path = trainer.resume_mode, trainer.resume_path
        state = resume(self.checkpointer, mode, path, self.like, self.checkpoint_meta)
        if state is not None:
            print(f"resuming after step {int(state.step)}")
            return state
        params = self.policy.initial()
        shardings = jax.tree.map(lambda x: x.sharding, self.like.params)
        whole, coef = replicated(self.mesh), trainer.algorithm.kl_loss_coef
        return init_state(self.optimizer, params, shardings, whole, kl_coef=coef)

    def load_reference(self) -> None:
        """The frozen reference, if a KL counts or the loss asks for its log-probs."""
        self.ref_params = self.policy.reference()

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder, or its adapters as a PEFT folder."""
        self.policy.export(folder, self.state.params, self.tokenizer, self.generation_config)
        tqdm.write(f"exported the policy to {folder}")

    def print_example(self, step: int, batch: TrainBatch, output: GeneratorOutput) -> None:
        """Show the step's first trajectory."""
        if self._due(step, self.config.trainer.print_example_interval):
            prompt = self.tokenizer.decode(output["prompt_token_ids"][0])
            response = self.tokenizer.decode(output["response_ids"][0])
            tqdm.write(
                f"--- step {step}, reward {float(batch.rewards[0].sum()):.3f}\n{prompt}{response}"
            )

    def _generate(
        self,
        phase: str,
        prompts: Sequence[Prompt],
        step: int,
        samples: int,
        *,
        params: cfg.SamplingParams,
    ) -> GeneratorOutput:
        names = (self.config.trainer.seed, phase, step)
        sampling = sampling_of(params, self.eos_token_ids)
        batch = generator_input(prompts, samples, names, sampling)
        output = generate_now(self.generator, batch)
        return merge_steps(output) if self.config.generator.merge_stepwise_output else output

    def _due(self, step: int, interval: int) -> bool:
        """Whether something done every `interval` steps, and after the last, is due; -1 = never."""
        return interval > 0 and (step % interval == 0 or step == self.total_steps)
