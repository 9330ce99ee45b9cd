"""The asynchronous trainer: sampling goes on while it trains.

It is `Trainer` with another source of rollouts: the step, its maths and its records are inherited.
`trainer.fully_async.enabled` chooses it; docs/asynchrony.md explains the schedules.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jaxrl.config import TrainConfig, engine_hosts, in_process, overlaps, runs_free
from jaxrl.models.adapter import AdaptedModel
from jaxrl.parallel import agree, allgather, is_first
from jaxrl.records.checkpoint import Buffer, CheckpointError
from jaxrl.rollout.conversations.across_processes import exchanged
from jaxrl.rollout.conversations.concat_outputs import concat_batch, concat_outputs
from jaxrl.rollout.conversations.dynamic_sampling import distinct_uids
from jaxrl.rollout.conversations.loop_thread import LoopThread
from jaxrl.rollout.conversations.stream import (
    Held,
    RolloutStream,
    Unit,
    rows_of,
    units_from_bytes,
    units_to_bytes,
)
from jaxrl.rollout.native.followed import phase_of
from jaxrl.trainer import Trainer
from jaxrl.training.staleness import oldest_versions, staleness_metrics
from jaxrl.types import GeneratorOutput, Prompt, TrainBatch, TrainState

LEDGER_IDS = "ledger_ids"  # column of the numbers of trajectories in the ledger


class Schedule(NamedTuple):
    """Describe what differs between the schedules.

    Attributes:
        shares: of each batch, by engine of the job: the places of the prompts that it samples.
        mine: the share that this process samples; None = none.
        whole: a share is sampled in one call; else each group by itself.
        workers: calls in flight, at most.
        drains: weights change only when all that the old ones are to sample is finished.
        overlaps: sampling goes on beside training; else while the trainer waits for it.
    """

    shares: list[range]
    mine: int | None
    whole: bool
    workers: int
    drains: bool
    overlaps: bool

    def share_of(self, ordinal: int) -> int:
        """Return the share in which a group of the data is."""
        place = ordinal % self.shares[-1].stop
        return next(i for i, share in enumerate(self.shares) if place in share)

    def unit(self, share: int) -> int:
        """Return how many groups of a share are sampled in one call."""
        return len(self.shares[share]) if self.whole else 1

    def ordinal(self, share: int, number: int) -> int:
        """Return the place in the data of a group, of which its share knows the number."""
        batch, place = divmod(number, len(self.shares[share]))
        return batch * self.shares[-1].stop + self.shares[share][place]

    def number(self, ordinal: int) -> int:
        """Return the number that a group of the data has in its share."""
        batch, place = divmod(ordinal, self.shares[-1].stop)
        share = self.shares[self.share_of(ordinal)]
        return batch * len(share) + share.index(place)


def schedule_of(config: TrainConfig) -> Schedule:
    """Return how the processes of this job sample for a config.

    An engine over devices of several processes, which are the trainer's, samples while the trainer
    waits: programs over several processes must begin in one order in all of them.
    """
    size, free = config.trainer.train_batch_size, runs_free(config)
    hosts, index = engine_hosts(config.generator.inference_engine), jax.process_index()
    parts = jax.process_count() // hosts if in_process(config) else 1
    leads = index % hosts == 0 if in_process(config) else is_first()
    workers = config.trainer.fully_async.num_parallel_generation_workers
    return Schedule(
        shares=[range(size * i // parts, size * (i + 1) // parts) for i in range(parts)],
        mine=min(index // hosts, parts - 1) if leads else None,
        whole=not free,
        workers=-(-workers // parts) if free else 1,
        drains=not free,
        overlaps=overlaps(config) and (hosts == 1 or jax.process_count() == 1),
    )


class AsyncTrainer(Trainer):
    """Run the loop whose rollouts are sampled ahead, by weights up to some steps old.

    It calls neither `generate` nor `next_prompts`: change how prompts become trajectories by
    overriding `sample`, and which prompts make a batch by overriding `prompts_of`.

    Raises:
        ValueError: one of the two is overridden; or a flax module, which samples a batch at a time,
            with the schedule "free".
    """

    def _build(self) -> None:
        self.ahead = self.config.trainer.fully_async.max_staleness_steps
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
        self.schedule = schedule_of(self.config)
        self.shares_held: list[Held] | None = None  # of the checkpoint that the run goes on from
        self.stream: RolloutStream | None = None  # from the first step on
        # of the first process, by ordinal of a unit that another one sampled and that waits: the
        # numbers of its trajectories in the ledger
        self.entered: dict[int, list[int]] = {}
        self.handed_out = [0 for _ in self.schedule.shares]  # groups of each in the ledger
        if len(self.schedule.shares) > 1:
            self.ledger_facts = {"shares": [share.stop for share in self.schedule.shares]}
        super()._build()

    # ---------------------------------------------------------------- the lines that differ

    def rollouts(self, step: int) -> tuple[GeneratorOutput, list[str]]:
        """Return the trajectories that were finished first, in the order of their prompts.

        In a job each process with an engine gives those of its share of the prompts; where servers
        sample, the first gives all. The ledger learns of those of others when they are taken.
        """
        self.metrics |= {
            "generate/sampled_batches": 1,
            "async/num_groups_dropped": 0,
            "async/keep_rate": 1.0,
        }
        units, error = list[Unit](), None
        with phase_of(self.engine):
            try:
                units = self._take(step) if self.schedule.mine is not None else []
            except Exception as raised:  # the others wait
                error = raised
        here = concat_outputs([unit.output for unit in units]) if units else None
        next_number = self.stream.held().next_ordinal if self.stream else 0
        about = next_number, [(u.ordinal, len(u.output["response_ids"])) for u in units]
        parts, told = exchanged(here, error, about)
        if not overlaps(self.config):
            self.engine.sleep()
        ordinals = [ordinal for _, taken in told for ordinal, _ in taken]
        if is_first():
            for process, part in parts.items():
                if process:
                    parts[process] = self._entered_part(step, part, *told[process])
        elif jax.process_count() > 1:  # the numbers are of the first process's ledger
            parts = {process: _without_numbers(part) for process, part in parts.items()}
        for ordinal in ordinals:
            self.groups.pop(ordinal, None)
        output = concat_batch(list(parts.values()))
        uids = [p.uid for x in ordinals for p in self._prompts(x) for _ in range(self.samples)]
        self.batches_drawn += 1
        return output, distinct_uids(uids, self.samples)  # near an epoch's end a prompt comes twice

    def _take(self, step: int) -> list[Unit]:
        if self.stream is None:
            self.stream = self._open(step)
        elif not self.schedule.overlaps:
            self.stream.advance(step)
        waiting, started = self.stream.waiting(), time.perf_counter()
        if not self.schedule.overlaps:
            self.stream.drain()  # nothing may be in flight while it trains
        units = self.stream.take()
        self.metrics["async/trainer_idle_seconds"] = time.perf_counter() - started
        self.metrics["async/gen_buffer_qsize_at_wait_start"] = waiting
        return [self._placed(unit) for unit in units]

    def _placed(self, unit: Unit) -> Unit:
        """Return a unit of the stream with its place in the data."""
        assert self.schedule.mine is not None
        return unit._replace(ordinal=self.schedule.ordinal(self.schedule.mine, unit.ordinal))

    def _entered_part(
        self,
        step: int,
        part: GeneratorOutput,
        next_number: int,
        taken: Sequence[tuple[int, int]],
    ) -> GeneratorOutput:
        """Enter in the ledger what another process sampled; return it with its numbers there.

        Args:
            next_number: of the first group of its share that it has not handed out.
            taken: ordinal and rows of each unit of the part.
        """
        if not taken:
            return part
        self._hand_out_share(step, self.schedule.share_of(taken[0][0]), next_number)
        numbers, begin = list[int](), 0
        for ordinal, rows in taken:
            unit = Unit(ordinal, rows_of(part, begin, begin + rows))
            numbers += self._enter_sampled(unit)
            begin += rows
            self.entered.pop(ordinal, None)
        return cast(GeneratorOutput, {**part, LEDGER_IDS: numbers} if numbers else part)

    def _hand_out_share(self, step: int, share: int, next_number: int) -> None:
        """Enter the groups that another process has handed out since it last told."""
        unit = self.schedule.unit(share)
        for number in range(self.handed_out[share], next_number, unit):
            ordinal = self.schedule.ordinal(share, number)
            self.groups[ordinal] = self.ledger.hand_out(step - 1, ordinal, self._prompts(ordinal))
        self.handed_out[share] = max(self.handed_out[share], next_number)

    def _enter_sampled(self, unit: Unit) -> list[int]:
        """Enter trajectories of another process, if they are not; return the number of each row."""
        if unit.ordinal not in self.entered:
            output = self.ledger.sampled(self.groups[unit.ordinal], unit.output, self.samples)
            self.entered[unit.ordinal] = output.get(LEDGER_IDS, [])
        return self.entered[unit.ordinal]

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
        stream, error = self.stream, None
        if stream is not None and self.schedule.drains:
            started = time.perf_counter()
            try:
                stream.drain()
            except Exception as raised:  # the others wait
                error = raised
            self.metrics["async/trainer_idle_seconds"] += time.perf_counter() - started
        exchanged(None, error)
        super().sync_weights(step)
        if stream is not None:
            self.metrics["async/engine_idle_seconds"] = stream.take_idle_seconds()
            if self.schedule.overlaps:
                stream.advance(step + 1)

    def commit(self, step: int) -> str:
        """Save the state, what was sampled and not yet trained, and where the ledger stands."""
        shares = [held for held in allgather(self._held()) if held is not None]
        waiting, buffer = agree(self._waiting(step, shares) if is_first() else None)
        meta = {**self.checkpoint_meta, "async": waiting, "ledger": self.ledger.commit()}
        return self.checkpointer.save(step, self.state, meta, buffer)

    def _held(self) -> tuple[int, Held] | None:
        """Return what this process has between the data and the trainer, and of which share.

        The number of the next group is that within the share; else they are those of the data.
        """
        share = self.schedule.mine
        if share is None:
            return None
        if self.stream is None:
            raise ValueError(
                f"{type(self).__name__}.rollouts must call AsyncTrainer.rollouts, which begins to "
                "sample: without it there is nothing to save beside the state"
            )
        held = self.stream.held()  # before the ledger: what is finished later is sampled again
        in_flight = [self.schedule.ordinal(share, number) for number in held.in_flight]
        return share, Held(held.next_ordinal, in_flight, list(map(self._placed, held.finished)))

    def _waiting(
        self, step: int, shares: Sequence[tuple[int, Held]]
    ) -> tuple[dict[str, Any], Buffer | None]:
        """Return what a checkpoint has of the rollouts: where they stand, and those that wait."""
        finished = list[Unit]()
        for share, held in shares:
            if share != self.schedule.mine:
                self._hand_out_share(step + 1, share, held.next_ordinal)
                for unit in held.finished:
                    numbers = self._enter_sampled(unit)
                    output = {**unit.output, LEDGER_IDS: numbers} if numbers else unit.output
                    finished.append(Unit(unit.ordinal, cast(GeneratorOutput, output)))
            else:
                finished += held.finished
        groups = {str(unit.ordinal): self.groups[unit.ordinal] for unit in finished}
        numbers = [held.next_ordinal for _, held in shares]
        waiting = {
            "next_ordinal": max(self.schedule.ordinal(i, n) for i, n in enumerate(numbers)),
            "in_flight": sorted(x for _, held in shares for x in held.in_flight),
            "groups": groups,
        }
        if len(numbers) > 1:
            waiting["next_numbers"] = numbers  # of each share
        return waiting, {"units": units_to_bytes(finished)} if finished else None

    def restore_or_init(self) -> TrainState:
        """Return the state; restore what waited beside it.

        Raises:
            CheckpointError: it was sampled by other shares, see `Schedule`.
        """
        state = super().restore_or_init()
        saved = (self.checkpointer.restored_meta or {}).get("async")
        if saved is not None:
            buffer, self.checkpointer.restored_buffer = self.checkpointer.restored_buffer, None
            self._restore_waiting(saved, units_from_bytes(buffer["units"]) if buffer else [])
        return state

    def _restore_waiting(self, saved: dict[str, Any], units: Sequence[Unit]) -> None:
        schedule = self.schedule
        numbers = saved.get("next_numbers", [saved["next_ordinal"]])
        if len(numbers) != len(schedule.shares):
            raise CheckpointError(
                f"the checkpoint has samples of an asynchronous job with {len(numbers)} engine(s), "
                f"this one has {len(schedule.shares)}: start it with as many processes for each "
                "engine (generator.inference_engine.hosts_per_engine) as before"
            )
        self.shares_held = [Held(number) for number in numbers]
        for ordinal in saved["in_flight"]:
            self.shares_held[schedule.share_of(ordinal)].in_flight.append(ordinal)
        for unit in units:
            self.shares_held[schedule.share_of(unit.ordinal)].finished.append(unit)
        self.groups = {int(ordinal): ids for ordinal, ids in saved["groups"].items()}
        self.next_ordinal = saved["next_ordinal"]
        self.held_groups = [i for ids in self.groups.values() for i in ids]

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
        schedule, share = self.schedule, self.schedule.mine
        assert share is not None
        groups = [len(places) for places in schedule.shares]
        shares = self.shares_held or [Held((step - 1) * count) for count in groups]
        self.shares_held = None
        self.handed_out = [held.next_ordinal for held in shares]
        known = self.ledger.knows(self.checkpointer.restored_meta)
        for other, held in enumerate(shares):
            if not known:
                held.finished = [self._enter(unit, step) for unit in held.finished]
            if other == share or not is_first():
                continue
            for ordinal in held.in_flight:  # its process hands them out again, first
                groups_of = self.ledger.hand_out(step - 1, ordinal, self._prompts(ordinal))
                self.groups[ordinal] = groups_of
            self.entered |= {u.ordinal: u.output.get(LEDGER_IDS, []) for u in held.finished}
        held = shares[share]
        if not is_first():
            held.finished = [Unit(u.ordinal, _without_numbers(u.output)) for u in held.finished]
        return RolloutStream(
            self._sample,
            self.thread,
            groups=groups[share],
            ahead=self.ahead,
            steps=self.total_steps,
            step=step,
            held=Held(
                held.next_ordinal,
                [schedule.number(ordinal) for ordinal in held.in_flight],
                [unit._replace(ordinal=schedule.number(unit.ordinal)) for unit in held.finished],
            ),
            unit=schedule.unit(share),
            workers=schedule.workers,
        )

    def _enter(self, unit: Unit, step: int) -> Unit:
        """Enter what waits in a checkpoint of another ledger in this one."""
        groups = self.ledger.hand_out(step - 1, unit.ordinal, self._prompts(unit.ordinal))
        self.groups[unit.ordinal] = groups
        return Unit(unit.ordinal, self.ledger.sampled(groups, unit.output, self.samples))

    def _prompts(self, ordinal: int) -> list[Prompt]:
        """Return the prompts of the unit that begins with the group `ordinal`."""
        batch, place = divmod(ordinal, self.config.trainer.train_batch_size)
        unit = self.schedule.unit(self.schedule.share_of(ordinal))
        return self.batch_of(batch)[place : place + unit]

    async def _sample(self, number: int, step: int) -> GeneratorOutput:
        """Sample a unit's trajectories: random by its place in the data, not by its step.

        Args:
            number: of its first group within the share of this process.
        """
        size, params = self.config.trainer.train_batch_size, self.config.generator.sampling_params
        assert self.schedule.mine is not None
        ordinal = self.schedule.ordinal(self.schedule.mine, number)
        prompts = self._prompts(ordinal)
        groups = self.ledger.hand_out(step - 1, ordinal, prompts)
        output = await self.sample(
            "train", prompts, ordinal // size + 1, self.samples, params, part=len(prompts) < size
        )
        self.groups[ordinal] = groups
        return self.ledger.sampled(groups, output, self.samples)


def _without_numbers(output: GeneratorOutput) -> GeneratorOutput:
    return cast(GeneratorOutput, {name: x for name, x in output.items() if name != LEDGER_IDS})
