"""The asynchronous trainer: sampling goes on while it trains.

It is `Trainer` with another source of rollouts: the step, its maths and its records are inherited.
`trainer.fully_async.enabled` chooses it; docs/asynchrony.md explains the schedules.
"""

import functools
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import numpy as np

from jaxrl.config import overlaps, runs_free
from jaxrl.models.adapter import AdaptedModel
from jaxrl.parallel import agree, is_first
from jaxrl.records.checkpoint import Buffer
from jaxrl.rollout.conversations.concat_outputs import concat_batch
from jaxrl.rollout.conversations.dynamic_sampling import distinct_uids
from jaxrl.rollout.conversations.loop_thread import LoopThread
from jaxrl.rollout.conversations.stream import (
    Held,
    RolloutStream,
    Unit,
    units_from_bytes,
    units_to_bytes,
)
from jaxrl.trainer import Trainer
from jaxrl.training.staleness import oldest_versions, staleness_metrics
from jaxrl.types import GeneratorOutput, Prompt, TrainBatch, TrainState


class Schedule(NamedTuple):
    """Describe what differs between the schedules.

    Attributes:
        unit: prompt groups sampled in one call.
        workers: units in flight, at most.
        drains: weights change only when all that the old ones are to sample is finished.
        overlaps: sampling goes on beside training.
    """

    unit: int
    workers: int
    drains: bool
    overlaps: bool


class AsyncTrainer(Trainer):
    """Run the loop whose rollouts are sampled ahead, by weights up to some steps old.

    It calls neither `generate` nor `next_prompts`: change how prompts become trajectories by
    overriding `sample`, and which prompts make a batch by overriding `prompts_of`.

    Raises:
        ValueError: one of the two is overridden; or a flax module, which samples a batch at a time,
            with the schedule "free".
    """

    def _build(self) -> None:
        settings, size = self.config.trainer.fully_async, self.config.trainer.train_batch_size
        self.ahead = settings.max_staleness_steps
        for unused, instead in (("generate", "sample"), ("next_prompts", "prompts_of")):
            if getattr(type(self), unused) is not getattr(Trainer, unused):
                raise ValueError(
                    f"trainer.fully_async.enabled=True: {type(self).__name__} overrides {unused!r},"
                    f" which an asynchronous trainer never calls; override {instead!r}"
                )
        free = runs_free(self.config)
        if free and isinstance(self.model, AdaptedModel):
            raise ValueError(
                f"trainer.fully_async.schedule='free': {self.model.name} is a flax module, whose "
                "sampler takes one batch at a time; set 'lockstep'"
            )
        evaluates = self.config.trainer.eval_interval > 0
        if overlaps(self.config) and isinstance(self.model, AdaptedModel) and evaluates:
            raise ValueError(
                f"trainer.eval_interval={self.config.trainer.eval_interval}: {self.model.name} is "
                "a flax module, whose sampler pads what comes together, and beside training the "
                "clock decides what does; set it to -1, and use jaxrl.evaluate on checkpoints"
            )
        workers = settings.num_parallel_generation_workers
        self.schedule = Schedule(
            unit=1 if free else size,
            workers=workers if free else 1,
            drains=not free,
            overlaps=overlaps(self.config),
        )
        self.batch_of = functools.lru_cache(maxsize=self.ahead + 2)(self.prompts_of)
        self.held: Held | None = None  # of the checkpoint that the run goes on from
        self.stream: RolloutStream | None = None  # from the first step on
        self.groups: dict[int, list[int]] = {}  # by ordinal of a unit: its numbers in the ledger
        super()._build()

    # ---------------------------------------------------------------- the lines that differ

    def rollouts(self, step: int) -> tuple[GeneratorOutput, list[str]]:
        """Return the trajectories that were finished first, in the order of their prompts.

        In a job of several processes the first samples, on servers, and the others get them.
        """
        self.metrics |= {
            "generate/sampled_batches": 1,
            "async/num_groups_dropped": 0,
            "async/keep_rate": 1.0,
        }
        output, uids = agree(self._take(step) if is_first() else None)
        self.batches_drawn += 1
        return output, uids

    def _take(self, step: int) -> tuple[GeneratorOutput, list[str]]:
        if self.stream is None:
            self.stream = self._open(step)
        elif not self.schedule.overlaps:
            self.stream.advance(step)
        waiting, started = self.stream.waiting(), time.perf_counter()
        units = self.stream.take()
        self.metrics["async/trainer_idle_seconds"] = time.perf_counter() - started
        self.metrics["async/gen_buffer_qsize_at_wait_start"] = waiting
        if not self.schedule.overlaps:
            self.engine.sleep()
        for unit in units:
            self.groups.pop(unit.ordinal, None)
        output = concat_batch([unit.output for unit in units])
        uids = [p.uid for u in units for p in self._prompts(u.ordinal) for _ in range(self.samples)]
        return output, distinct_uids(uids, self.samples)  # near an epoch's end a prompt comes twice

    def collate(self, output: GeneratorOutput) -> TrainBatch:
        """Return the rows [B, T]; record how old they are."""
        batch = super().collate(output)
        versions = batch.token_versions
        if versions is None:  # a generator of one's own that gives none
            versions = np.broadcast_to(batch.policy_versions[:, None], batch.tokens.shape)
        versions = oldest_versions(versions, batch.context_versions)
        self.metrics |= staleness_metrics(
            versions, batch.loss_mask, int(self.state.step), self.ahead
        )
        return batch

    def sync_weights(self, step: int) -> None:
        """Hand the parameters to the engine, which goes on sampling with them."""
        stream = self.stream
        if stream is not None and self.schedule.drains:
            started = time.perf_counter()
            stream.drain()
            self.metrics["async/trainer_idle_seconds"] += time.perf_counter() - started
        super().sync_weights(step)
        if stream is not None:
            self.metrics["async/engine_idle_seconds"] = stream.take_idle_seconds()
            if self.schedule.overlaps:
                stream.advance(step + 1)

    def commit(self, step: int) -> str:
        """Save the state, what was sampled and not yet trained, and where the ledger stands."""
        waiting, buffer = agree(self._held() if is_first() else None)
        meta = {**self.checkpoint_meta, "async": waiting, "ledger": self.ledger.commit()}
        return self.checkpointer.save(step, self.state, meta, buffer)

    def _held(self) -> tuple[dict[str, Any], Buffer | None]:
        """Return what a checkpoint has of the rollouts: where they stand, and those that wait."""
        if self.stream is None:
            raise ValueError(
                f"{type(self).__name__}.rollouts must call AsyncTrainer.rollouts, which begins to "
                "sample: without it there is nothing to save beside the state"
            )
        held = self.stream.held()  # before the ledger: what is finished later is sampled again
        groups = {str(unit.ordinal): self.groups[unit.ordinal] for unit in held.finished}
        waiting = {"next_ordinal": held.next_ordinal, "in_flight": held.in_flight, "groups": groups}
        return waiting, {"units": units_to_bytes(held.finished)} if held.finished else None

    def restore_or_init(self) -> TrainState:
        """Return the state; restore what waited beside it."""
        state = super().restore_or_init()
        saved = (self.checkpointer.restored_meta or {}).get("async")
        if saved is not None:
            buffer, self.checkpointer.restored_buffer = self.checkpointer.restored_buffer, None
            units = units_from_bytes(buffer["units"]) if buffer else []
            self.held = Held(saved["next_ordinal"], saved["in_flight"], units)
            self.groups = {int(ordinal): ids for ordinal, ids in saved["groups"].items()}
            self.next_ordinal = saved["next_ordinal"]
            self.held_groups = [i for ids in self.groups.values() for i in ids]
        return state

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Keep the thread of the rollouts while the block runs; evaluation runs in it too."""
        with closing(LoopThread("jaxrl-rollouts")) as self.thread:
            self.wait_for = self.thread.run
            try:
                yield
            finally:
                del self.wait_for
                self.stream = None

    # ---------------------------------------------------------------- sampling

    def _open(self, step: int) -> RolloutStream:
        """Begin to sample, for training step `step` and later ones."""
        size = self.config.trainer.train_batch_size
        held, self.held = self.held or Held(next_ordinal=(step - 1) * size), None
        if not self.ledger.knows(self.checkpointer.restored_meta):
            held.finished = [self._enter(unit, step) for unit in held.finished]
        return RolloutStream(
            self._sample,
            self.thread,
            groups=size,
            ahead=self.ahead,
            steps=self.total_steps,
            step=step,
            held=held,
            unit=self.schedule.unit,
            workers=self.schedule.workers,
        )

    def _enter(self, unit: Unit, step: int) -> Unit:
        """Enter what waits in a checkpoint of another ledger in this one."""
        groups = self.ledger.hand_out(step - 1, unit.ordinal, self._prompts(unit.ordinal))
        self.groups[unit.ordinal] = groups
        return Unit(unit.ordinal, self.ledger.sampled(groups, unit.output, self.samples))

    def _prompts(self, ordinal: int) -> list[Prompt]:
        """Return the prompts of the unit that begins with the group `ordinal`."""
        batch, place = divmod(ordinal, self.config.trainer.train_batch_size)
        return self.batch_of(batch)[place : place + self.schedule.unit]

    async def _sample(self, ordinal: int, step: int) -> GeneratorOutput:
        """Sample a unit's trajectories: random by its place in the data, not by its step."""
        size, params = self.config.trainer.train_batch_size, self.config.generator.sampling_params
        prompts = self._prompts(ordinal)
        groups = self.ledger.hand_out(step - 1, ordinal, prompts)
        output = await self.sample(
            "train", prompts, ordinal // size + 1, self.samples, params, part=len(prompts) < size
        )
        self.groups[ordinal] = groups
        return self.ledger.sampled(groups, output, self.samples)
