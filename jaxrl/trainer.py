"""The synchronous trainer: the whole step top to bottom.

One step is the nine lines of `Trainer.train_step` and `Trainer.train`; each line is one method that
calls pure functions with explicit state. Everything random is named by (seed, step, prompt,
sample), so a run that is killed and resumed equals one that was not.
"""

import dataclasses
import functools
import gc
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from jaxrl import activity, config as cfg
from jaxrl.array_ops import DTYPES
from jaxrl.config.microbatching import hindsight_microbatching, longest_trajectory
from jaxrl.config.objective_requirements import (
    demonstrations_apart,
    distills,
    distills_hindsight,
    estimator_name,
    estimator_row,
    has_critic,
    kl_in_reward,
    needs_greedy,
    needs_old_log_probs,
    needs_reference,
)
from jaxrl.data.columns import ROUTES, ROUTES_PROCESS, trajectory_numbers
from jaxrl.data.messages import messages_of
from jaxrl.data.microbatches import Microbatching
from jaxrl.data.order import order_of_run
from jaxrl.data.packing import collate, empty_batch, minibatches
from jaxrl.data.prefix_trees import UNSHARED
from jaxrl.data.tokenizer import encode_prompt, known_ids
from jaxrl.files import as_path, writable_folder
from jaxrl.models import hf
from jaxrl.models.adapter import AdaptedModel, check_packing
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.parallel import is_first, put, replicated
from jaxrl.parallel.checksums import checksums
from jaxrl.parallel.compilation import compile_together, lowering
from jaxrl.parallel.jit_once import jit_once
from jaxrl.parallel.offload import on_device
from jaxrl.parallel.rules import batch_devices
from jaxrl.records.batch_file import batch_path, dump_batch
from jaxrl.records.callbacks import CallbackInput, TrainingCallback, TrainingControl
from jaxrl.records.checkpoint import (
    Checkpointer,
    resume,
    sources_of_rewards,
)
from jaxrl.records.checkpoint_folders import PREFIX
from jaxrl.records.flops import speed_metrics
from jaxrl.records.ledger.writer import LedgerWriter, machine_of
from jaxrl.records.progress import timed
from jaxrl.records.recorder import Recorder
from jaxrl.records.resume_identity import fingerprint
from jaxrl.records.roofline import Limits, least_seconds, limits, shares
from jaxrl.registry import AdvantageEstimatorRegistry, source_hashes
from jaxrl.registry.contracts import ContractError
from jaxrl.registry.memory import (
    ESTIMATOR,
    described,
    first_algorithm_state,
    initial_state_of,
    renewed,
)
from jaxrl.rollout.conversations.across_processes import exchanged, sample_across_processes
from jaxrl.rollout.conversations.carried import NO_ROWS, going_on, unfinished, with_samples
from jaxrl.rollout.conversations.concat_outputs import concat_batch
from jaxrl.rollout.conversations.conversation import sampling_of
from jaxrl.rollout.conversations.dynamic_sampling import collect, distinct_uids
from jaxrl.rollout.conversations.history import AnswerHistory
from jaxrl.rollout.conversations.stream import Unit, units_from_bytes, units_to_bytes
from jaxrl.rollout.generator import GeneratorInterface, run_now, sample_prompts
from jaxrl.rollout.native.followed import phase_of
from jaxrl.rollout.protocol import Engine, Request
from jaxrl.rollout.warm_up import engine_batches, prompt_buckets
from jaxrl.rollout.weights.groups import local_copy
from jaxrl.training.build import (
    assemble_policy,
    assemble_reference,
    assemble_update,
    sampler_dtype,
)
from jaxrl.training.critic import Critic
from jaxrl.training.diagnostics import advantages_by_correctness
from jaxrl.training.evaluation import dump_evaluation, evals_folder, evaluate
from jaxrl.training.forward_pass import ForwardPass
from jaxrl.training.metrics import advantage_metrics, rollout_metrics
from jaxrl.training.objective import step_metrics
from jaxrl.training.old_log_probs import with_old_log_probs
from jaxrl.training.optim import init_state
from jaxrl.training.rewards import (
    EntropyControl,
    advantages_of,
    make_estimate,
    nan_advantages,
    next_kl_coef,
    of_evidence,
    penalize_kl,
    shape_rewards,
)
from jaxrl.training.routes import routes_of_any_token, routes_of_model
from jaxrl.training.staleness import with_staleness
from jaxrl.training.teacher import Hindsight, asks_for, head_of, with_teacher
from jaxrl.training.update import every_way, minibatches_of_step, rows_without_update
from jaxrl.types import FloatBT, GeneratorOutput, Message, Prompt, TrainBatch, TrainState

# Arrays of a checkpoint's buffer: groups that are carried, what prompts were answered.
UNDER_WAY, ANSWERS = "under_way", "answers"


class NothingLearnt(ValueError):
    """Say that every update of a run was skipped."""


class Trainer:
    """Run the synchronous loop.

    Subclass it and override a line; `BasePPOExp.get_trainer` returns it.

    Args:
        config: resolved and validated.
        tokenizer, model: of the policy; model is its architecture.
        mesh: devices.
        engine: gets the weights after every step.
        generator: makes the trajectories.
        train_prompts, eval_prompts: tokenised prompts; no evaluation without the latter.
        callbacks: are told of the events of the run.
    """

    initial_state: Mapping[str, Any] = {}  # what a subclass keeps between steps; see `remember`
    held_groups: Sequence[int] = ()  # numbers in the ledger of groups that wait to be trained
    ledger_facts: Mapping[str, Any] = {}  # that the audit must know of a subclass
    saved = 0  # the last step with a checkpoint of this process
    updates, skipped = 0, 0  # of the policy by this process, and how many were not finite
    next_ordinal: int | None = None  # of the first prompt never handed out; None: none waits
    wait_for = staticmethod(run_now)  # for a coroutine
    sampling = staticmethod(nullcontext)  # around the steps, where rollouts go on beside them

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
        callbacks: Sequence[TrainingCallback] = (),
    ) -> None:
        self.config, self.tokenizer, self.model, self.mesh = config, tokenizer, model, mesh
        self.engine, self.generator = engine, generator
        self.train_prompts, self.eval_prompts = train_prompts, eval_prompts
        trainer = config.trainer
        self.samples = config.generator.n_samples_per_prompt
        self.order = order_of_run(config, train_prompts)
        self.steps_per_epoch = self.order.batches_per_epoch
        self.total_steps = trainer.epochs * self.steps_per_epoch
        if trainer.max_training_steps is not None:
            self.total_steps = min(self.total_steps, trainer.max_training_steps)
        path = trainer.policy.model.path or ""  # validated
        self.eos_token_ids = sorted({tokenizer.eos_token_id, *hf.eos_token_ids(path)})
        self.known_ids = known_ids(tokenizer)
        self.metrics: dict[str, float] = {}
        self.seconds: dict[str, float] = {}  # between steps, since the last line of the log
        self.ref_params: Any = None
        self.state: TrainState
        self.batch: TrainBatch | None = None  # of the last step
        self.under_way: list[Unit] = []  # groups handed out and not trained, ascending
        self.groups: dict[int, list[int]] = {}  # their numbers in the ledger, by ordinal
        self.history = answer_history(config)
        self.batch_of = functools.lru_cache(maxsize=16)(self.prompts_of)
        self.callbacks = callbacks
        self.recorder = Recorder(
            config,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
            seconds=self.seconds,
            notify=self.notify if callbacks else None,
        )
        self.ledger = LedgerWriter(cfg.run_folder(trainer), trainer.ledger)
        self.watch = self.recorder.watch  # counts compilations
        self._build()

    def _build(self) -> None:
        """Make everything that is compiled or placed once."""
        trainer = self.config.trainer
        self.policy, self.forward_pass = assemble_policy(self.config, self.model, self.mesh)
        self.reference, self.ref_forward_pass = assemble_reference(
            self.config, self.policy, self.forward_pass
        )
        placement = self.policy.placement
        estimator = AdvantageEstimatorRegistry.resolve(trainer.algorithm.advantage_estimator)
        self.entropy_control = EntropyControl(trainer.algorithm)
        keepers = [self.entropy_control, self, *self.callbacks]
        self.first_memory = first_algorithm_state(estimator, keepers)
        self.optimizer, abstract_state, self.updater = assemble_update(
            self.config,
            self.forward_pass,
            placement,
            self.total_steps,
            self.policy.trained,
            algorithm_state=self.first_memory,
        )
        self.critic = None
        if has_critic(trainer):
            self.critic = Critic(self.config, placement, len(self.tokenizer), self.total_steps)
        self.abstract_state = abstract_state.replace(
            ref_params=self.reference.abstract_moved(),
            critic=self.critic and self.critic.abstract_state,
        )
        self.minibatch_rows = trainer.policy_mini_batch_size * self.samples
        self.estimate = jit_once(make_estimate(trainer.algorithm))
        writable_folder("trainer.log_path", cfg.run_folder(trainer))
        writable_folder("trainer.export_path", trainer.export_path)
        self.checkpointer = Checkpointer(trainer.ckpt_path, max_to_keep=trainer.max_ckpts_to_keep)
        if cfg.carries(self.config):
            self.ledger_facts = {**self.ledger_facts, "carries": True}
        if cfg.carries(self.config) and (
            type(self).next_prompts is not Trainer.next_prompts or self._chooses_prompts()
        ):
            raise ValueError(
                f"generator.partial_rollouts: {type(self).__name__} chooses its prompts by "
                "next_prompts or by what it remembers, and a prompt that is carried must be found "
                "again by its place in the data; leave max_tokens_per_step unset"
            )
        self.checkpoint_meta = {
            "config": cfg.get_config_as_dict(self.config),
            "mesh": dict(self.mesh.shape),
            "total_steps": self.total_steps,
            "data": fingerprint(self.train_prompts),
            "functions": source_hashes(trainer.algorithm)
            | sources_of_rewards(
                self.config.environment.reward_functions,
                (prompt.env_class for prompt in self.train_prompts),
            ),
        }
        if self.first_memory:
            self.checkpoint_meta["algorithm_state"] = described(self.first_memory)

    @property
    def params(self) -> Params:
        """Return all parameters of the policy, on its devices; adapters are on their base."""
        return on_device(self.policy.whole(self.state.params))

    @property
    def vocabulary(self) -> int:
        """Return the number of ids that the policy has."""
        model = self.model
        return model.vocab_size if isinstance(model, TransformerConfig) else len(self.tokenizer)

    @property
    def hindsight(self) -> Hindsight | None:
        """Return how the policy is told what became of its answers; None: it is not."""
        algorithm, template = self.config.trainer.algorithm, self.config.generator
        if not distills_hindsight(algorithm):
            return None
        variables = template.chat_template_kwargs
        return Hindsight(self.tokenizer, algorithm.distillation, variables, self.vocabulary)

    @property
    def hindsight_cut(self) -> Microbatching:
        """Return how batches with hints are cut."""
        cut, mesh = self.forward_pass.microbatching, self.policy.placement.mesh
        groups = batch_devices(mesh, self.policy.placement.rules)
        found = hindsight_microbatching(self.config, groups, cut.context)
        return dataclasses.replace(found, sharing=cut.sharing)

    @property
    def memory(self) -> dict[str, Any]:
        """Return what is kept between steps, by name, on the host: `TrainState.algorithm_state`."""
        return jax.device_get(self.state.algorithm_state or {})

    def remember(self, **entries: Any) -> None:
        """Keep other values of entries that a trainer's or callback's `initial_state` declares.

        They are in the next checkpoint. In a job of several processes all must give the same.

        Raises:
            ValueError: nobody declares the entry, or its value is of another shape or kind.
        """
        if entries:
            memory = renewed(self.memory, entries)
            kept = put(memory, replicated(self.policy.placement.mesh))
            self.state = self.state.replace(algorithm_state=kept)

    # ---------------------------------------------------------------- the loop

    def train(self) -> TrainState:
        """Train from the newest checkpoint, or from the start, to the last step.

        Raises:
            NothingLearnt: at the end, where every update was skipped.
            signals.Ended: SIGTERM or Ctrl-C has ended it after a step.
        """
        trainer = self.config.trainer
        self.recorder.start_clock()
        with timed(self.seconds, "load_checkpoints"):
            self.state = self.restore_or_init()
            if trainer.use_sample_packing is True and isinstance(self.model, AdaptedModel):
                check_packing(self.model, self.params)
            first, self.batches_drawn = int(self.state.step), int(self.state.batches_drawn)
            self.load_reference(self.state.ref_params)
        recorder = self.recorder.open(first)
        if recorder.folders:
            self.checkpointer.on_commit = recorder.folders.saved
        with timed(self.seconds, "init_weight_sync_state"):
            self.sync_weights(first)
        # the rollouts end before the ledger does; closing the checkpointer waits for the last save
        with (
            recorder,
            closing(self.ledger),
            closing(self.checkpointer),
            out_of_collections(self.seconds),
            self.sampling(),
        ):
            self.begin_ledger(first)
            if first < self.total_steps:
                with timed(self.seconds, "warm_up"):
                    self.warm_up()
            if first == 0 and trainer.eval_before_train and trainer.eval_interval > 0:
                recorder.record(0, recorder.evaluate(0, self.evaluate))
            recorder.begin_steps()
            for step in range(first + 1, self.total_steps + 1):
                with recorder.step(step):
                    before = self.memory_of_callbacks()
                    metrics = self.train_step(step)
                recorder.end_step(step, metrics, self.batch)
                if recorder.take("should_evaluate") or self._due(step, trainer.eval_interval):
                    metrics |= recorder.evaluate(step, self.evaluate)
                with timed(self.seconds, "ledger"):
                    kept = {"before": before, "after": self.memory_of_callbacks()}
                    self.ledger.end_step(step, self.batch, self.state, kept)
                recorder.record(step, metrics)  # 9
                self.save(step)
                if recorder.stops():
                    if recorder.ended_by and trainer.ckpt_interval > 0 and self.saved < step:
                        self._write(step, exports=False, saves=True)
                    break
            with activity.doing("the last save"), timed(self.seconds, "save_checkpoints"):
                self.checkpointer.wait()
                self.ledger.commit()  # raises what the last write met
        recorder.ending.leave(recorder.finished_steps, recorder.ended_by)
        if (
            self.updates
            and self.skipped == self.updates
            and not (first or recorder.stopped_by_alarm)
        ):
            raise NothingLearnt(
                f"nothing was learnt: all {self.updates} updates of this run were skipped, because "
                "no gradient was finite. Look for NaN in the rewards, a log or a quotient of 0 in "
                "a loss of yours, weights that overflow (trainer.bf16), a learning rate that is "
                "too large"
            )
        return self.state

    def train_step(self, step: int) -> dict[str, float]:
        """Do one step on one batch of prompts; return its metrics."""
        started = time.perf_counter()
        self.metrics = {}
        with timed(self.metrics, "generate"):
            output, uids = self.rollouts(step)  # 1, 2, 3
            self.ledger.take(output, uids)
        with timed(self.metrics, "postprocess_generator_output"):
            output = self.postprocess_generator_output(output, uids)
        with timed(self.metrics, "convert_to_training_input"):
            batch = self.collate(output)  # 4
        with timed(self.metrics, "fwd_logprobs_values_reward"):
            batch = self.add_log_probs(batch)  # 5
        with timed(self.metrics, "compute_advantages_and_returns"):
            self.batch = batch = self.add_advantages(batch)  # 6
        if self.config.trainer.dump_data_batch and is_first():
            with timed(self.metrics, "dump_data_batch"):
                # of a job's batch this process has the experts of its own rows alone
                dumped = batch.replace(routes=None) if jax.process_count() > 1 else batch
                dump_batch(batch_path(self.config.trainer.export_path, step), dumped, step)
        self.update_critic(batch, step)  # 7
        with timed(self.metrics, "policy_train"):
            self.update(batch, step)
        with timed(self.metrics, "sync_weights"):
            self.sync_weights(step)  # 8
        due = self._due(step, self.config.trainer.print_example_interval)
        if due or self.recorder.display.takes_every_sample:
            self.recorder.print_example(step, batch, output, self.tokenizer)
        self.metrics["timing/step"] = time.perf_counter() - started
        return self.metrics | {
            **self.speed_metrics(batch),
            "trainer/global_step": step,
            "trainer/epoch": (self.batches_drawn - 1) // self.steps_per_epoch,
            **self.order.metrics(self.batches_drawn),
        }

    def speed_metrics(self, batch: TrainBatch) -> dict[str, float]:
        """Return tokens/s of the step and of its sampling, and how hard its phases worked."""
        trainer, devices = self.config.trainer, list(self.mesh.devices.flat)
        # with frozen weights the backward pass has no gradients of them to make
        passes = 2 if trainer.policy.model.lora.rank else 3
        passes *= trainer.update_epochs_per_batch
        found = speed_metrics(
            batch,
            self.metrics,
            self.model,
            devices,
            passes=passes,
            sampled_beside=cfg.overlaps(self.config),
            shared=self.updater.shared,
        )
        if able := limits(devices):
            found |= shares(self._least_seconds(batch, able, passes), self.metrics)
        return found

    def _least_seconds(self, batch: TrainBatch, able: Limits, passes: int) -> dict[str, float]:
        config, settings = self.config, self.config.generator.inference_engine
        blind = config.generator.sampling_params.logprobs is None
        scored = (needs_old_log_probs(config.trainer) or blind) + (self.ref_params is not None)
        together = config.trainer.placement.colocate_all and not cfg.overlaps(config)
        copies = self.mesh.size // cfg.engine_tensor(settings)
        return least_seconds(
            batch,
            self.model,
            able,
            passes=passes,
            scored=scored,
            copies=copies if together and cfg.in_process(config) else 0,
            element=np.dtype(DTYPES[cfg.engine_dtype(settings)]).itemsize,
            shared=self.updater.shared,
        )

    # ---------------------------------------------------------------- 1 to 6: the batch

    def rollouts(self, step: int) -> tuple[GeneratorOutput, list[str]]:
        """Return judged trajectories and their uids; dynamic sampling draws as often as it must."""
        ledger, size, drawn = self.ledger, self.config.trainer.train_batch_size, set[int]()
        carries, calls = cfg.carries(self.config), itertools.count(1)

        def draw(attempt: int) -> tuple[GeneratorOutput, list[str]]:
            self.metrics["generate/sampled_batches"] = attempt
            if carries:
                output, uids = self.draw_ended(step, calls)
                drawn.update(output.get("ledger_ids", ()))
                return output, uids
            prompts = self.next_prompts(step)  # 1
            groups = ledger.hand_out(step - 1, self.batches_drawn * size, prompts)
            self.batches_drawn += 1
            uids = [p.uid for p in prompts for _ in range(self.samples)]
            output = self.generate(prompts, step, attempt)  # 2, 3
            output = ledger.sampled(groups, output, self.samples)
            drawn.update(output.get("ledger_ids", ()))
            return output, uids

        output, uids = collect(draw, self.config, step)
        ledger.drop(drawn.difference(output.get("ledger_ids", ())), step, "dynamic_sampling")
        if self.history:
            self.history.add(output, uids)
        self.engine.sleep()  # its copy of the weights is of no more use
        return output, uids

    def draw_ended(self, step: int, calls: Iterator[int]) -> tuple[GeneratorOutput, list[str]]:
        """Return the oldest groups that are at their end, as many as a batch has, and their uids.

        All that are under way draw as many tokens as they may in a step; then, as often as it
        takes, the oldest of those that are still missing draw as many again. So what is trained
        when follows from the tokens, not from the time.

        Args:
            calls: numbers of the calls of the generator in this step.
        """
        size, samples = self.config.trainer.train_batch_size, self.samples
        begin = self.batches_drawn * size + len(self.under_way)
        end = (self.batches_drawn + 1) * size + self.config.generator.partial_rollouts.extra_prompts
        if self.config.trainer.algorithm.dynamic_sampling.type is None:
            end = min(end, self.total_steps * size)  # nothing is sampled for later steps
        new = [Unit(ordinal, NO_ROWS) for ordinal in range(begin, end)]
        self.hand_out(step - 1, new)
        self.under_way += new
        ended, most = list[Unit](), len(self.under_way)
        while len(ended) < size:
            going = [unit for unit in self.under_way if unfinished(unit, samples)][:most]
            if going:
                prompts = [self.prompt_at(unit.ordinal) for unit in going]
                uids = distinct_uids([p.uid for p in prompts], 1)  # an epoch may end among them
                asked = [
                    going_on(prompt, unit, samples, uid)
                    for prompt, unit, uid in zip(prompts, going, uids, strict=True)
                ]
                self.metrics["generate/calls"] = call = next(calls)
                output = self.generate(asked, step, call)  # 2, 3
                sampled = {u.ordinal: u for u in with_samples(going, output, samples)}
                self.under_way = [sampled.get(u.ordinal, u) for u in self.under_way]
            ended = [unit for unit in self.under_way if not unfinished(unit, samples)]
            most = size - len(ended)
        taken = ended[:size]
        trained = {unit.ordinal for unit in taken}
        self.under_way = [unit for unit in self.under_way if unit.ordinal not in trained]
        self.metrics["generate/carried_groups"] = len(self.under_way)
        self.batches_drawn += 1
        output = concat_batch([unit.output for unit in taken])
        versions, now = output.get("token_versions", []), int(self.state.step)
        drawn = [version for row in versions for version in row if version >= 0]
        old = sum(version < now for version in drawn)
        self.metrics["generate/carried_tokens"] = old / max(len(drawn), 1)
        groups = [number for unit in taken for number in self.groups.pop(unit.ordinal)]
        uids = [self.prompt_at(u.ordinal).uid for u in taken for _ in range(samples)]
        return self.ledger.sampled(groups, output, samples), distinct_uids(uids, samples)

    def hand_out(self, finished: int, units: Sequence[Unit]) -> None:
        """Record that groups go to the samplers, after `finished` steps."""
        for unit in units:
            prompts = [self.prompt_at(unit.ordinal)]
            self.groups[unit.ordinal] = self.ledger.hand_out(finished, unit.ordinal, prompts)

    def prompt_at(self, ordinal: int) -> Prompt:
        """Return the prompt at a place in the order of the data, over all epochs."""
        batch, place = divmod(ordinal, self.config.trainer.train_batch_size)
        return self.batch_of(batch)[place]

    def next_prompts(self, step: int) -> list[Prompt]:
        """Return the next batch of prompts.

        It is a function of the seed and the number of batches drawn.
        """
        return self.prompts_of(self.batches_drawn)

    def prompts_of(self, batch: int) -> list[Prompt]:
        """Return the prompts of a batch, counted from 0 over all epochs."""
        return [self.train_prompts[i] for i in self.order.batch(batch)]

    def generate(self, prompts: Sequence[Prompt], step: int, attempt: int = 1) -> GeneratorOutput:
        """Return `n_samples_per_prompt` judged trajectories for each prompt.

        Args:
            attempt: number of the batch within the step.
        """
        if self.history:
            prompts = self.history.told(prompts, step)
        phase = "train" if attempt == 1 else f"train, batch {attempt}"
        params = self.config.generator.sampling_params
        return self.sample_now(phase, prompts, step, self.samples, params)

    def sample_now(
        self,
        phase: str,
        prompts: Sequence[Prompt],
        step: int,
        samples: int,
        params: cfg.SamplingParams,
    ) -> GeneratorOutput:
        """Run `sample` to its end; each process of the job takes a share of prompts, if it can."""

        def sample(mine: Sequence[Prompt], part: bool) -> GeneratorOutput:
            return self.wait_for(self.sample(phase, mine, step, samples, params, part=part))

        return sample_across_processes(
            sample,
            prompts,
            each_samples=cfg.in_process(self.config),
            hosts=cfg.engine_hosts(self.config.generator.inference_engine),
            phase=phase_of(self.engine),
            part=any(prompt.begun is not None for prompt in prompts),
        )

    async def sample(
        self,
        phase: str,
        prompts: Sequence[Prompt],
        step: int,
        samples: int,
        params: cfg.SamplingParams,
        *,
        part: bool = False,
    ) -> GeneratorOutput:
        """Return `samples` trajectories of each prompt, in training and evaluation.

        See `sample_prompts`.
        """
        return await sample_prompts(
            self.config,
            self.generator,
            self.eos_token_ids,
            phase,
            prompts,
            step,
            samples,
            params,
            part=part,
            greedy=phase.startswith("train") and needs_greedy(self.config.trainer.algorithm),
            demonstrations=phase.startswith("train") and self.config.generator.demonstrations,
        )

    def postprocess_generator_output(
        self, generator_output: GeneratorOutput, uids: Sequence[str]
    ) -> GeneratorOutput:
        """Record reward metrics; make rewards per token, and filter or punish responses."""
        known = self.known_ids
        self.metrics |= rollout_metrics(generator_output, uids, self.samples, known)
        output, metrics = shape_rewards(
            generator_output, uids, self.config.generator, self.config.trainer.algorithm
        )
        self.metrics |= metrics
        return output

    def collate(self, output: GeneratorOutput) -> TrainBatch:
        """Return rows [B, T]; the samples of a prompt are a group."""
        self.ledger.keep(output)
        algorithm = self.config.trainer.algorithm
        row = estimator_row(algorithm)
        if row and row.needs_terms and "reward_terms" not in output:
            raise ContractError(
                f"trainer.algorithm.advantage_estimator={row.fn.__name__!r} normalises rewards by "
                "name, and the environment gives one number; return {name: reward, ...}, or add "
                "environment.reward_functions"
            )
        if needs_greedy(algorithm) and "greedy_rewards" not in output:
            raise ContractError(
                f"trainer.algorithm.advantage_estimator={estimator_name(algorithm)!r} needs what "
                "greedy answers earn, and the rollouts have no column 'greedy_rewards'; give it"
            )
        replay = self.config.trainer.policy.router_replay
        if replay == "off":
            without = ROUTES, ROUTES_PROCESS
            output = cast(GeneratorOutput, {k: x for k, x in output.items() if k not in without})
        elif ROUTES not in output:
            raise ValueError(
                f"trainer.policy.router_replay={replay!r}: the generator gives no {ROUTES!r} in "
                "its output; give them, or set 'off'"
            )
        else:
            assert isinstance(self.model, TransformerConfig)  # has experts
            routes = routes_of_model(cast(dict, output)[ROUTES], self.model)
            output = cast(GeneratorOutput, output | {ROUTES: routes})
        if (
            self.config.generator.demonstrations and "demonstrated" not in output
        ):  # of no prompt of the batch
            output = GeneratorOutput(
                {**output, "demonstrated": [False] * len(output["response_ids"])}
            )
        last = output.get("is_last_step", [True] * len(output["response_ids"]))
        width_of = self.updater.microbatching.batch_width
        batch = collate(output, trajectory_numbers(last) // self.samples, width_of)
        hindsight = self.hindsight
        return batch.replace(hints=hindsight.hints(output, batch.index)) if hindsight else batch

    def add_log_probs(self, batch: TrainBatch) -> TrainBatch:
        """Add log-probs that the loss needs, of policy and reference, and the critic's values."""
        if "staleness" in self.updater.objective.reads:
            # finished steps: the policy is this version
            batch = with_staleness(batch, int(self.state.step))
        batch, metrics = with_old_log_probs(
            batch,
            lambda rows, entropy: self.forward_pass(self.params, rows, with_entropy=entropy),
            settings=self.config.trainer,
            sampling=self.config.generator.sampling_params,
        )
        self.metrics |= metrics
        if self.ref_params is not None:
            own = batch.replace(routes=None)  # it is a policy of its own, and not the sampler
            algorithm, params = self.config.trainer.algorithm, on_device(self.ref_params)
            teaches = distills(algorithm) and not distills_hindsight(algorithm)
            options = asks_for(algorithm.distillation) if teaches else {}
            ref, _, *said = self.ref_forward_pass(params, own, **options)
            batch = batch.replace(ref_log_probs=ref)
            if teaches:
                batch = with_teacher(batch, said, self.vocabulary)
                self.learn_from(self.reference.weights.model, params)
        if hindsight := self.hindsight:
            ask, width_of = self.ask_in_hindsight, self.hindsight_cut.batch_width
            batch = hindsight.ask(batch, ask, width_of, self.nothing_said)
            self.learn_from(self.model, self.params)
        if batch.taught is not None:
            told, sampled = np.sum(batch.taught), np.sum(batch.loss_mask)
            self.metrics["policy/taught_tokens"] = float(told / max(sampled, 1))
        if self.critic:
            batch = batch.replace(values=self.critic.values(self.state.critic, batch))
        return batch

    def ask_in_hindsight(
        self, rows: TrainBatch, cut: Microbatching | None = None
    ) -> Sequence[np.ndarray]:
        """Return what the policy says of rows with hints, see `with_teacher`."""
        options = asks_for(self.config.trainer.algorithm.distillation)
        cut = cut or self.hindsight_cut
        return self.forward_pass(self.params, rows, microbatching=cut, **options)[2:]

    @property
    def nothing_said(self) -> list[np.ndarray]:
        """Return what the policy says in hindsight of a token that it is told nothing about."""
        top_k = self.config.trainer.algorithm.distillation.top_k
        if top_k is None:
            assert isinstance(self.model, TransformerConfig)  # `teacher_model` has looked
            dtype = DTYPES[cfg.compute_dtype(self.config.trainer, "policy")]
            return [np.zeros(self.model.hidden_size, dtype)]
        events = min(top_k, self.vocabulary)
        return [np.full(events, -1, np.int32), np.zeros(events + 1, np.float32)]

    def learn_from(self, model: TransformerConfig | AdaptedModel, params: Params) -> None:
        """Give the update the head of a teacher whose states the batch has, until it is done."""
        if self.config.trainer.algorithm.distillation.top_k is None:
            assert isinstance(model, TransformerConfig)  # `teacher_model` has looked
            head = head_of(model, params, self.policy.placement)
            self.updater.forward_pass.teacher_head = head

    def add_advantages(self, batch: TrainBatch) -> TrainBatch:
        """Add advantages and returns of the whole batch; before them the KL in the rewards."""
        algorithm = self.config.trainer.algorithm
        scores = np.asarray(batch.rewards).sum(-1)
        if batch.greedy_rewards is not None:
            self.metrics["reward/greedy"] = float(np.mean(batch.greedy_rewards))
        if kl_in_reward(algorithm):
            batch, metrics = penalize_kl(batch, self.state.kl_coef, algorithm)
            self.metrics |= metrics
        kept = self.memory.get(ESTIMATOR)
        kept, advantages, returns = self.estimated(batch, kept)
        if kept is not None:
            self.remember(**{ESTIMATOR: kept})
        batch = batch.replace(advantages=advantages, returns=returns)
        if wrong := nan_advantages(batch, algorithm.advantage_estimator):
            if int(self.state.step) == 0:
                raise ContractError(wrong)
            activity.warn(f"{wrong}. Their minibatches are skipped")
        seen = of_evidence(batch, apart=demonstrations_apart(algorithm))
        self.metrics |= advantage_metrics(batch) | advantages_by_correctness(seen, scores)
        return batch.replace(
            is_last_step=None,
            valid_mask=None,
            reward_terms=None,
            turn_rewards=None,
            greedy_rewards=None,
        )

    def estimated(self, batch: TrainBatch, kept: Any) -> tuple[Any, FloatBT, FloatBT]:
        """Return what the estimator keeps after the batch, advantages and returns [B, T]."""
        row = estimator_row(self.config.trainer.algorithm)
        weights = self.config.environment.reward_weights
        per_turn = row is not None and row.per_turn
        apart = demonstrations_apart(self.config.trainer.algorithm)
        return advantages_of(self.estimate, batch, kept, weights, per_turn=per_turn, apart=apart)

    # ---------------------------------------------------------------- 7 to 9: the update

    def update_critic(self, batch: TrainBatch, step: int) -> None:
        """Let the critic learn the returns, if there is one; none of what is no evidence."""
        if self.critic:
            apart = demonstrations_apart(self.config.trainer.algorithm)
            batch = of_evidence(batch, apart=apart).replace(valid_mask=None)
            with timed(self.metrics, "critic_train"):
                critic, metrics = self.critic.update(self.state.critic, batch, step)
            self.state, self.metrics = self.state.replace(critic=critic), self.metrics | metrics

    def update(self, batch: TrainBatch, step: int) -> None:
        """Make one optimizer update of the policy per minibatch of whole prompt groups.

        While the critic warms up the policy stays as it is.
        """
        trainer, prompts = self.config.trainer, self.config.trainer.policy_mini_batch_size
        if step <= trainer.critic_warmup_steps:
            self.finish(step, rows=len(batch.index))
            return
        rng_path, pending = (trainer.seed, step), []
        critic, ref_params = self.state.critic, self.state.ref_params
        state = self.state.replace(critic=None, ref_params=None)  # the rest of it is donated
        passes = trainer.update_epochs_per_batch
        parts = minibatches_of_step(batch, prompts=prompts, passes=passes, rng_path=rng_path)
        known = self.entropy_control.known(self.memory)
        for minibatch, key, weights, fixed in self.updater.weighted(parts, **known):
            params = on_device(self.policy.whole(state.params))
            grads, metrics = self.updater.gradients(params, minibatch, weights, key)
            state, applied = self.updater.step(state, grads)
            del params, grads  # the next update needs their room
            pending.append((metrics, applied | fixed))  # device values: fetched after the last
        self.state = state.replace(critic=critic, ref_params=ref_params)
        self.updater.forward_pass.teacher_head = None  # its memory is needed elsewhere
        metrics = step_metrics(pending)
        self.updates += len(pending)
        self.skipped += int(metrics["policy/skipped_updates"])
        if skipped := metrics["policy/skipped_updates"]:
            activity.warn(f"step {step}: {skipped} updates skipped, their gradient was not finite")
            rows = rows_without_update(batch, pending, prompts=prompts, rng_path=rng_path)
            self.ledger.skip(rows)
        self.metrics |= metrics | self.updater.cut_metrics(minibatches(batch, prompts))
        self.finish(step, rows=len(batch.index))

    def finish(self, step: int, rows: int) -> None:
        """Put into the state what a step leaves there beside the optimizers' work.

        These are counts, the KL controller, and a reference that moves: an epoch ends with the step
        that draws the last of its batches.
        """
        state, per_epoch = self.state, self.steps_per_epoch
        kl_ctrl = self.config.trainer.algorithm.kl_ctrl
        coef = next_kl_coef(float(state.kl_coef), self.metrics, kl_ctrl, rows)
        epoch_ended = int(state.batches_drawn) // per_epoch < self.batches_drawn // per_epoch
        if self.reference.moves and epoch_ended:
            state = state.replace(ref_params=self.reference.moved(state.params))
        numbers = {
            "step": np.int32(step),
            "batches_drawn": np.int32(self.batches_drawn),
            "kl_coef": np.float32(coef),
        }
        self.state = state.replace(**put(numbers, replicated(self.policy.placement.mesh)))
        if kept := self.entropy_control.after(self.memory, self.metrics):
            self.remember(**kept)
            self.metrics["policy/entropy_coef"] = float(kept["entropy_coef_used"])
        if self.state.ref_params is not None:  # it may have moved
            self.load_reference(self.state.ref_params)

    def sync_weights(self, step: int) -> None:
        """Hand the parameters to the engine; they are version `step`."""
        params, engine = self.params, self.config.generator.inference_engine
        if cfg.engine_hosts(engine) == 1 and not cfg.by_transfer(self.config):
            params = local_copy(params, sampler_dtype(self.config), cfg.group_bytes(self.config))
        self.engine.update_weights(params, step)

    def save(self, step: int) -> None:
        """Checkpoint and export when due: by interval, at epoch ends, after the last step."""
        trainer = self.config.trainer
        epoch_end = step % self.steps_per_epoch == 0
        due = self._due(step, trainer.ckpt_interval) or (epoch_end and trainer.ckpt_interval > 0)
        exports = self._due(step, trainer.hf_save_interval)
        saves = self.recorder.take("should_save") or due
        if exports or saves:
            self._write(step, exports=exports, saves=saves)

    def _write(self, step: int, *, exports: bool, saves: bool) -> None:
        with timed(self.seconds, "save_checkpoints"):
            self.recorder.check_folders()
        with activity.doing(f"saving step {step}"):
            if exports:
                folder = Path(self.config.trainer.export_path) / f"global_step_{step}"
                with timed(self.seconds, "save_hf_model"):
                    self.export(folder / "policy")
                    if self.critic:
                        params = self.state.critic.params
                        self.critic.weights.export(folder / "critic", params, self.tokenizer)
            if saves:
                self.recorder.flush()
                with timed(self.seconds, "save_checkpoints"):  # last: a resumed run is after it
                    path = self.commit(step)
                self.saved = step
                self.recorder.fire("on_save", step, ckpt_path=path)

    def commit(self, step: int) -> str:
        """Save the state, groups under way, and where the ledger stands; return the path."""
        meta = {**self.checkpoint_meta, "ledger": self.ledger.commit()}
        buffer = {UNDER_WAY: units_to_bytes(self.under_way)} if self.under_way else {}
        if self.history:
            buffer[ANSWERS] = self.history.to_bytes()
        return self.checkpointer.save(step, self.state, meta, buffer or None)

    # ---------------------------------------------------------------- around the steps

    def evaluate(self, step: int) -> dict[str, float]:
        """Score the evaluation prompts, per data source and over all; write the answers down."""
        params = self.config.generator.eval_sampling_params
        if not self.eval_prompts or params is None:
            return {}

        def generate(prompts: Sequence[Prompt], step: int, samples: int) -> GeneratorOutput:
            return self.sample_now("eval", prompts, step, samples, params)

        with timed(self.metrics, "eval"):
            metrics, rows = evaluate(
                generate, self.eval_prompts, step, self.config, tokenizer=self.tokenizer
            )
            if self.config.trainer.dump_eval_results and is_first():
                folder = evals_folder(self.config.trainer.export_path, step)
                dump_evaluation(folder, rows, metrics)
        return metrics | {"timing/eval": self.metrics["timing/eval"]}

    def answer(self, prompt: str | Sequence[Message]) -> str:
        """Return what the policy answers to a prompt, greedily.

        In a job whose processes have no engine each it is a collective: the first one's answers.

        Args:
            prompt: text of the user, or chat messages.
        """
        generator = self.config.generator
        messages, template = messages_of(prompt, "prompt"), generator.chat_template_kwargs
        tokens = encode_prompt(self.tokenizer, messages, **template)
        params = dataclasses.replace(generator.sampling_params, temperature=0.0)
        sampling = sampling_of(params, self.eos_token_ids)
        asked = Request(tuple(tokens), keys=((0, 0),), sampling=sampling)
        each = cfg.engine_hosts(generator.inference_engine) == 1 and cfg.in_process(self.config)
        found, error = None, None
        with phase_of(self.engine) as samples:
            try:
                if each or (samples and is_first()):
                    [[found]] = self.engine.generate([asked])
            except Exception as raised:  # the others wait
                error = raised
        if not each:
            _, (found, *_) = exchanged(None, error, found)
        elif error:
            raise error
        assert found is not None
        return self.tokenizer.decode(found.tokens, skip_special_tokens=True)

    def notify(self, event: str, about: CallbackInput, control: TrainingControl) -> None:
        """Tell the callbacks of an event, in their order."""
        saved = self.state.algorithm_state
        for callback in self.callbacks:
            getattr(callback, event)(self, about, control)
        if event == "on_save" and self.state.algorithm_state is not saved:
            raise ContractError(
                f"on_save of {' or '.join(type(x).__name__ for x in self.callbacks)} calls "
                "remember: the checkpoint is being written without it; call it in on_step_end"
            )

    def memory_of_callbacks(self) -> dict[str, Any]:
        """Return what callbacks keep: a replay, which calls none, takes it from the ledger."""
        names = [name for callback in self.callbacks for name in initial_state_of(callback)]
        memory = self.memory if names else {}
        return {name: memory[name] for name in names}

    def restore_or_init(self) -> TrainState:
        """Return the state of the checkpoint that the config points to, else of the model folders.

        What waits in host memory between updates is there.

        Raises:
            CheckpointError, FileNotFoundError: see `checkpoint.resume`.
        """
        settings, policy, critic = self.config.trainer, self.policy, self.critic
        policy.load_base()
        model = policy.describe()
        if critic:
            critic.weights.load_base()
            model |= {"critic": critic.weights.describe()}
        self.checkpoint_meta["model"] = model
        state = resume(
            self.checkpointer,
            settings.resume_mode,
            settings.resume_path,
            self.abstract_state,
            self.checkpoint_meta,
        )
        if state is None:
            state = init_state(
                self.optimizer,
                policy.initial(),
                jax.tree.map(lambda x: x.sharding, self.abstract_state.params),
                replicated(policy.placement.mesh),
                kl_coef=settings.algorithm.kl_loss_coef,  # SkyRL starts the one in the reward so
                algorithm_state=self.first_memory,
            )
            state = state.replace(
                critic=critic and critic.initial(),
                ref_params=self.reference.first_moved(state.params),
            )
        else:
            activity.say(f"resuming after step {int(state.step)}")
            if int(state.step) >= self.total_steps:
                activity.say(cfg.nothing_to_do(settings, int(state.step), self.total_steps))
            if state.ref_params is not None:
                state = state.replace(ref_params=self.reference.moved(state.ref_params))
            self.restore_waiting()
        if critic:
            state = state.replace(critic=critic.updater.offload(state.critic))
        return self.updater.offload(state)

    def restore_waiting(self) -> None:
        """Take what the checkpoint has beside the state: groups under way, earlier answers."""
        buffer = self.checkpointer.restored_buffer or {}
        if UNDER_WAY in buffer:
            self.under_way = units_from_bytes(buffer[UNDER_WAY])
            self.next_ordinal = self.under_way[-1].ordinal + 1
        if self.history and ANSWERS in buffer:
            self.history.from_bytes(buffer[ANSWERS])

    def warm_up(self) -> None:
        """Compile what the steps and evaluations will run; print the shapes.

        Rows of zeros, masked everywhere, take the way of real ones. Only the optimizer's own update
        is left to the first step: it would change the state.
        """
        started = time.perf_counter()
        lengths = [len(prompt.tokens) for prompt in self.train_prompts]
        generator, updater = self.config.generator, self.updater
        cut = updater.microbatching
        longest = max(lengths) + generator.sampling_params.max_generate_length
        if generator.max_turns > 1:
            longest = longest_trajectory(self.config)
        widths = cut.batch_widths(min(lengths) + 1, longest)
        shapes = [
            f"{rows} x {cut.length(width)}"
            for width in map(cut.width, widths)
            for rows in cut.row_counts(width)
        ]
        if cut.sharing is not None:
            wide = [cut.width(width) for width in widths if width >= cut.sharing.shortest]
            shapes += [
                f"{cut.groups} x {n} of trees" for width in wide for n in cut.tree_lengths(width)
            ]
        activity.detail(
            f"shapes: prompts of {prompt_buckets(self.train_prompts)} tokens; rows of {widths} "
            f"tokens; microbatches of {', '.join(dict.fromkeys(shapes))}"
        )
        sleeps = cfg.in_process(self.config) and not cfg.overlaps(self.config)
        if sleeps:  # as in a step: its copy of the weights is not there during the passes
            self.engine.sleep()
        if self.config.trainer.few_shapes is True:  # because each takes long
            updaters = [updater, self.critic.updater] if self.critic else [updater]
            with_model = [  # the jitted functions that hold a model
                *((forward_pass, "forward") for forward_pass in self._forward_passes()),
                *((u, name) for u in updaters for name in ("accumulate", "pull_back")),
            ]
            with lowering(with_model) as programs:
                for width in widths:
                    self.warm_up_update(width)
            with activity.doing(f"compiling {len(programs)} programs together"):
                compile_together(programs.values())
        batches = engine_batches(
            self.config.trainer,
            generator,
            self.train_prompts,
            self.eval_prompts,
            self.eos_token_ids,
        )
        with activity.doing("compiling", len(widths) + len(batches)) as compiling:
            if self.hindsight:
                self.warm_up_hindsight(min(lengths) + 1, longest)
            for width in widths:
                rows, length = cut.row_counts(cut.width(width))[-1], cut.length(cut.width(width))
                compiling.next(f"update {rows} x {length}")
                self.warm_up_update(width)
            if sleeps:
                self.sync_weights(int(self.state.step))
            for requests in batches:
                prompts, length = len(requests), len(requests[0].prompt_tokens)
                compiling.next(f"sampling {prompts} x {length}")
                self.engine.warm_up(requests)
        activity.detail(f"engine: {self.engine.describe()}")
        checksums(self.state)  # as a save does
        if self.reference.moves:
            self.reference.moved(self.state.params)  # as an epoch's end does
        activity.say(f"compiled in {time.perf_counter() - started:.1f} s")

    def warm_up_update(self, width: int) -> None:
        """Run log-probs, values, advantages and gradients on empty rows of `width` tokens."""
        users = [*self._forward_passes(), self.updater]
        users += [self.critic.updater] if self.critic else []
        with every_way(users, width) as ways:
            for _ in ways:
                self._warm_up_rows(width)

    def warm_up_hindsight(self, shortest: int, longest: int) -> None:
        """Run the pass over rows with hints, for trajectories of `shortest` to `longest` tokens."""
        cut = self.hindsight_cut
        longest += self.config.trainer.algorithm.distillation.max_hint_tokens
        for width in cut.batch_widths(shortest, longest):
            length = min(width, cut.packed_length or width)
            trees = cut.sharing is not None and width >= cut.sharing.shortest
            for sharing in (None, UNSHARED) if trees else (None,):
                way = dataclasses.replace(cut, sharing=sharing)
                for size in way.batch_sizes(length):
                    self.ask_in_hindsight(empty_batch(size, width, length), way)

    def _warm_up_rows(self, width: int) -> None:
        """Do what `warm_up_update` does, for rows as they are cut now."""
        settings, updater, critic = self.config.trainer, self.updater, self.critic
        length = min(width, settings.packed_length or width)
        sampling = self.config.generator.sampling_params
        kept = sampling.top_k if sampling.keep_sampling_mask else 0
        log_probs = sampling.logprobs is not None
        routes = routes_of_any_token(self.model, settings.policy.router_replay)
        cuts = {forward_pass.microbatching for forward_pass in self._forward_passes()}
        most = min(cut.total for cut in cuts)  # of a batch; each rounds it up to its own devices
        batch = None
        for rows in sorted({min(size, most) for cut in cuts for size in cut.batch_sizes(length)}):
            batch = empty_batch(rows, width, length, kept=kept, log_probs=log_probs, routes=routes)
            if self.config.generator.demonstrations:
                batch = batch.replace(demonstrated=np.zeros(rows, bool))
            batch = self.add_log_probs(batch)
        assert batch is not None  # there is a size
        batch = _resized(batch, settings.train_batch_size * self.samples)
        valid = np.ones(len(batch.lengths), bool)  # as `token_level` says of a batch of a step
        state, row = self.state, estimator_row(settings.algorithm)
        if needs_greedy(settings.algorithm):
            batch = batch.replace(greedy_rewards=np.zeros(len(batch.lengths), np.float32))
        if row and (row.needs_terms or row.per_turn):  # how many there are rollouts say
            batch = batch.replace(advantages=batch.rewards, returns=batch.rewards)
        else:
            batch = self.add_advantages(batch.replace(valid_mask=valid))
        self.state = state  # rows of zeros are not remembered
        updater.warm_up(self.params, _resized(batch, self.minibatch_rows))
        if critic:
            critic.warm_up(self.state.critic, _resized(batch, critic.minibatch_rows))

    def _forward_passes(self) -> list[ForwardPass]:
        """Return those of policy, reference and critic, each once."""
        critics = [self.critic.forward_pass] if self.critic else []
        return list(dict.fromkeys([self.forward_pass, self.ref_forward_pass, *critics]))

    def begin_ledger(self, first: int) -> None:
        """Open the ledger for an attempt after `first` finished steps."""
        settings, size = self.config.trainer, self.config.trainer.train_batch_size
        drawn = int(self.state.batches_drawn) * size
        path = self.checkpointer.folder / f"{PREFIX}_{first}"
        if settings.resume_mode == "from_path":
            path = as_path("trainer.resume_path", settings.resume_path or "")  # validated
        self.ledger.begin(
            first,
            (self.checkpointer.restored_meta or {}).get("ledger"),
            path=str(path),
            first_ordinal=drawn if self.next_ordinal is None else self.next_ordinal,
            facts={
                "seed": settings.seed,
                "train_batch_size": size,
                "num_prompts": len(self.train_prompts),
                "samples": self.samples,
                "policy_mini_batch_size": settings.policy_mini_batch_size,
                "dynamic_sampling": settings.algorithm.dynamic_sampling.type,
                **({"own_order": True} if self._chooses_prompts() else {}),
                **self.ledger_facts,
            },
            machine=machine_of(self.mesh),
            uids=[prompt.uid for prompt in self.train_prompts],
            held=self.held_groups,
        )
        self.hand_out(first, self.under_way)  # again: the ledger takes back what had no end

    def load_reference(self, moved: Params | None = None) -> None:
        """Load the reference, if a KL counts or the loss asks for its log-probs.

        Args:
            moved: of one that moves, `TrainState.ref_params`; None = that of the config.
        """
        needed = needs_reference(self.config.trainer.algorithm)
        self.ref_params = self.reference.params(moved) if needed else None

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder, or its adapters as a PEFT folder."""
        self.policy.export(folder, self.state.params, self.tokenizer)
        activity.say(f"exported the policy to {folder}")

    def _chooses_prompts(self) -> bool:
        """Return whether a subclass with memory has another order of prompts than the data's."""
        kind = type(self)
        own = kind.next_prompts is not Trainer.next_prompts
        return bool(self.initial_state) and (own or kind.prompts_of is not Trainer.prompts_of)

    def _due(self, step: int, interval: int) -> bool:
        """Return whether what comes every `interval` steps and at the end is due; -1 = never."""
        return interval > 0 and (step % interval == 0 or step == self.total_steps)


def answer_history(config: cfg.TrainConfig) -> AnswerHistory | None:
    """Return what keeps the answers of earlier epochs; None where nobody asks for them."""
    generator, engine = config.generator, config.generator.inference_engine
    if generator.longest_first or engine.speculative_history or engine.speculative_least:
        return AnswerHistory(engine.speculative_history, engine.speculative_least)
    return None


@contextmanager
def out_of_collections(seconds: dict[str, float]) -> Iterator[None]:
    """Keep Python's garbage collector from what is there now: a walk of half a million objects.

    A step makes enough new ones for such a walk every third step, and it takes 0.3 s.

    Args:
        seconds: by phase; the last walk is a part of the warm-up.
    """
    if gc.get_freeze_count():  # whoever did it before knows why
        yield
        return
    with timed(seconds, "warm_up"):
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _resized(batch: TrainBatch, rows: int) -> TrainBatch:
    """Return a batch of host arrays with its rows repeated or cut to `rows`."""
    return jax.tree.map(lambda x: np.resize(x, (rows, *x.shape[1:])), batch)
