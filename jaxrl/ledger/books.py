"""What a trainer tells the ledger, in the order of a step."""

import json
import zlib
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, cast

import jax
import numpy as np

from jaxrl import config as cfg
from jaxrl.checkpoint import PREFIX
from jaxrl.checksums import checksums
from jaxrl.ledger.database import FILE, Ledger
from jaxrl.ledger.rollout_file import rollouts_path, write_rollouts
from jaxrl.types import GeneratorOutput, Prompt, TrainBatch

FAILED = ("env_error", "abort")  # stop reasons of trajectories from which nothing is learnt


class Books:
    """Of one trainer, which may be called from several threads; records nothing before `begin`.

    Args:
        trainer: has config, train_prompts, samples, steps_per_epoch and the state.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.ledger = trainer, cast(Ledger | None, None)
        self.folder = cfg.run_folder(trainer.config.trainer)
        self._taken: tuple[GeneratorOutput, Sequence[str]] | None = None
        self._skipped: np.ndarray | None = None
        self._writing: Future[Any] | None = None

    def begin(self, step: int, *, held: Collection[int] = ()) -> None:
        """Open the ledger for an attempt after `step` finished steps; what the checkpoint lacks
        that it goes on from is taken back.

        Args:
            held: groups that wait in the checkpoint.

        Raises:
            LedgerError: see `Ledger`.
        """
        trainer, settings = self.trainer, self.trainer.config.trainer
        timeout = settings.ledger.lock_timeout_seconds
        saved = (trainer.checkpointer.restored_meta or {}).get("ledger")
        self.ledger = Ledger(self.folder / FILE, lock_timeout=timeout)
        size = settings.train_batch_size
        path = settings.resume_path if settings.resume_mode == "from_path" else None
        self.ledger.begin(
            step,
            saved if step else None,
            path=path or str(trainer.checkpointer.folder / f"{PREFIX}_{step}"),
            first_ordinal=int(trainer.state.batches_drawn) * size,
            facts={
                "seed": settings.seed,
                "train_batch_size": size,
                "num_prompts": len(trainer.train_prompts),
                "samples": trainer.samples,
                "policy_mini_batch_size": settings.policy_mini_batch_size,
                "dynamic_sampling": settings.algorithm.dynamic_sampling.type,
            },
            machine=machine_of(trainer.mesh),
            uids=[prompt.uid for prompt in trainer.train_prompts],
            held=held,
        )
        for path in (self.folder / "rollouts").glob("step_*.npz"):
            if int(path.stem.removeprefix("step_")) > step:  # of what is superseded
                path.unlink()

    def knows(self, saved_meta: dict[str, Any] | None) -> bool:
        """Whether the rows that a checkpoint speaks of are in this ledger."""
        saved = (saved_meta or {}).get("ledger")
        return self.ledger is None or (saved or {}).get("run_id") == self.ledger.run_id

    # ---------------------------------------------------------------- the way of a trajectory

    def hand_out(self, step: int, first_ordinal: int, prompts: Sequence[Prompt]) -> list[int]:
        """Prompts go to the samplers, after `step` finished steps; returns a number for each.

        Args:
            first_ordinal: place of the first one in the order of the data over all epochs.
        """
        if self.ledger is None:
            return []
        rows = [(first_ordinal + i, p.uid, step) for i, p in enumerate(prompts)]
        return self.ledger.add("groups", rows)

    def sampled(
        self, groups: Sequence[int], output: GeneratorOutput, samples: int
    ) -> GeneratorOutput:
        """Trajectories are sampled and judged; returns them with the column `ledger_ids`.

        Args:
            groups: of `hand_out`, one for every `samples` trajectories.
        """
        if self.ledger is None:
            return output
        last = output.get("is_last_step", [True] * len(output["response_ids"]))
        ends = np.flatnonzero(last)
        starts = [0, *(ends[:-1] + 1).tolist()]
        rows = [
            (groups[number // samples], number % samples, *_judged(output, start, end))
            for number, (start, end) in enumerate(zip(starts, ends.tolist(), strict=True))
        ]
        ids = np.array(self.ledger.add("trajectories", rows))
        of_row = np.cumsum(last) - np.asarray(last, int)
        return cast(GeneratorOutput, {**output, "ledger_ids": ids[of_row].tolist()})

    def drop(self, ledger_ids: Collection[int], step: int, reason: str) -> None:
        """Trajectories that no update will see."""
        if self.ledger is not None:
            self.ledger.add("ends", [(i, step, reason) for i in sorted(ledger_ids)])

    def take(self, output: GeneratorOutput, uids: Sequence[str]) -> None:
        """These are the trajectories of the step that begins."""
        self._taken, self._skipped = (output, uids), None

    def skip(self, rows: np.ndarray) -> None:
        """From these rows of the step, [B] bool, nothing was learnt: their update was skipped."""
        self._skipped = rows

    def end_step(self, step: int, batch: TrainBatch | None) -> None:
        """The step is finished: where its trajectories ended, their file, the checksums.

        Args:
            batch: what was trained, a row for each row of `take`.
        """
        if self.ledger is None or self._taken is None or batch is None:
            return
        (output, uids), self._taken = self._taken, None
        reasons = _reasons(output, np.asarray(batch.loss_mask), self._skipped)
        self.ledger.add("ends", [(number, step, reason) for number, reason in reasons.items()])
        settings = self.trainer.config.trainer.ledger
        numbers = self._checksums(batch) if settings.record_checksums else "{}"

        def make() -> tuple[Any, ...]:
            if not settings.record_rollouts:
                return step, None, None, numbers
            path = rollouts_path(self.folder, step)
            digest = write_rollouts(path, output, uids)
            return step, str(path.relative_to(self.folder)), digest, numbers

        if self._writing is not None:  # a slow disk may be one step behind, not more
            self._writing.result()
        self._writing = self.ledger.add_made("steps", make)

    def commit(self) -> dict[str, Any] | None:
        """What the checkpoint that is saved now has to know; all of it is on disk."""
        return None if self.ledger is None else self.ledger.position()

    def close(self) -> None:
        """Write what is left."""
        if self.ledger is not None:
            self.ledger.close()
            self.ledger = None

    def _checksums(self, batch: TrainBatch) -> str:
        return json.dumps(step_checksums(batch, self.trainer.state))


def step_checksums(batch: TrainBatch, state: Any) -> dict[str, int]:
    """A number for the bits of each array of a step: "batch.<field>", then "state<path>"."""
    found = {}
    for name, array in vars(batch).items():
        if array is not None:
            found[f"batch.{name}"] = zlib.crc32(np.asarray(jax.device_get(array)).tobytes())
    return found | {f"state{name}": number for name, number in checksums(state).items()}


def machine_of(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Where bits come from beside the state and the batch."""
    return {
        "platform": jax.default_backend(),
        "device": mesh.devices.flat[0].device_kind,
        "devices": len(jax.devices()),
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "jax": jax.__version__,
    }


def _judged(output: GeneratorOutput, start: int, end: int) -> tuple[Any, ...]:
    """Reward, sampled tokens, stop reason, first and last version of the rows of a trajectory."""
    reward = cast(Any, output["rewards"][end])
    tokens = sum(sum(output["loss_masks"][row]) for row in range(start, end + 1))
    versions = [
        v for row in output.get("token_versions", [])[start : end + 1] for v in row if v >= 0
    ]
    first = output["policy_versions"][start]
    return (
        float(sum(reward) if isinstance(reward, list) else reward),
        int(tokens),
        output["stop_reasons"][end],
        int(first),
        int(max(versions, default=first)),
    )


def _reasons(
    output: GeneratorOutput, loss_mask: np.ndarray, skipped: np.ndarray | None
) -> dict[int, str | None]:
    """Why nothing was learnt from a trajectory, by its number; None if an update saw a token."""
    reasons: dict[int, str | None] = {}
    for row, number in enumerate(output.get("ledger_ids", [])):
        reason = None
        if not loss_mask[row].any():
            stopped = output["stop_reasons"][row]
            reason = stopped if stopped in FAILED else "filtered"
        elif skipped is not None and skipped[row]:
            reason = "skipped_update"
        if reasons.get(number, "new") is not None:  # one of its rows is enough
            reasons[number] = reason
    return reasons
