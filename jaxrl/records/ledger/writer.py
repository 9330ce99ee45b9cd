"""Write the ledger of a run: what a trainer says of its trajectories, in the order of a step."""

import json
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jaxrl.config.trainer import LedgerConfig
from jaxrl.data.columns import ROUTES_PROCESS
from jaxrl.data.recorded import (
    own_routes,
    rollouts_path,
    routes_digest,
    to_arrays,
    write_rollouts,
    write_routes,
)
from jaxrl.data.routes import OwnRoutes
from jaxrl.parallel import ProcessError, agree, allgather, is_first, record_folder
from jaxrl.parallel.checksums import start_checksums
from jaxrl.records.ledger.database import FILE, Ledger
from jaxrl.types import GeneratorOutput, Prompt, TrainBatch

_FAILED = ("env_error", "abort")  # stop reasons of trajectories from which nothing is learnt


class Taken(NamedTuple):
    """Hold the trajectories of the step that goes on.

    Attributes:
        arrays: as they came from `rollouts`; None if they are not recorded.
        uids: prompt of each.
        stopped: stop reason of each, by its number.
        rows: number of the trajectory of each row that becomes a row of the batch.
        routes_digests: of a job, of what each process writes of the experts of tokens.
    """

    arrays: dict[str, np.ndarray] | None
    uids: Sequence[str]
    stopped: dict[int, str]
    rows: np.ndarray
    routes_digests: Sequence[str] = ()


class LedgerWriter:
    """Write what happens to the trajectories of one run; thread-safe, silent before `begin`.

    Of the processes of a job the first alone has a ledger; the others write the experts of the
    tokens that they sampled, which it does not have.

    Args:
        folder: of the run.
        settings: what is recorded.
    """

    def __init__(self, folder: Path, settings: LedgerConfig) -> None:
        self.folder, self.settings = folder, settings
        self.database: Ledger | None = None
        self._taken: Taken | None = None
        self._routes: dict[str, np.ndarray] | None = None  # of a process that is not the first
        self._skipped: np.ndarray | None = None
        self._writing: Future[Any] | None = None
        self._thread: ThreadPoolExecutor | None = None  # of a process that is not the first

    def begin(self, step: int, saved: Mapping[str, Any] | None = None, **attempt: Any) -> None:
        """Open the ledger for an attempt; take back what its checkpoint lacks.

        Args:
            step: finished steps.
            saved: what `commit` gave for the checkpoint; None without one.
            attempt: see `Ledger.begin`.

        Raises:
            LedgerError: see `Ledger`.
        """
        if is_first():
            timeout = self.settings.lock_timeout_seconds
            self.database = Ledger(self.folder / FILE, lock_timeout=timeout)
            self.database.begin(step, saved if step else None, **attempt)
        else:
            self._thread = ThreadPoolExecutor(1, "jaxrl-ledger")
        for path in (record_folder(self.folder) / "rollouts").glob("step_*.npz"):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > step:  # of what is superseded
                path.unlink()

    def knows(self, saved_meta: dict[str, Any] | None) -> bool:
        """Return whether the rows that a checkpoint speaks of are in this ledger."""
        saved = (saved_meta or {}).get("ledger")
        return self.database is None or (saved or {}).get("run_id") == self.database.run_id

    # ---------------------------------------------------------------- the way of a trajectory

    def hand_out(self, step: int, first_ordinal: int, prompts: Sequence[Prompt]) -> list[int]:
        """Record that prompts go to the samplers, after `step` finished steps.

        Returns a number for each.

        Args:
            first_ordinal: place of the first one in the order of the data over all epochs.
        """
        if self.database is None:
            return []
        rows = [(first_ordinal + i, p.uid, step) for i, p in enumerate(prompts)]
        return self.database.add("groups", rows)

    def sampled(
        self, groups: Sequence[int], output: GeneratorOutput, samples: int
    ) -> GeneratorOutput:
        """Record sampled and judged trajectories; return them with the column `ledger_ids`.

        Args:
            groups: of `hand_out`, one for every `samples` trajectories.
        """
        if self.database is None:
            return output
        last = output.get("is_last_step", [True] * len(output["response_ids"]))
        ends = np.flatnonzero(last)
        starts = [0, *(ends[:-1] + 1).tolist()]
        rows = [
            (groups[number // samples], number % samples, *_judged(output, start, end))
            for number, (start, end) in enumerate(zip(starts, ends.tolist(), strict=True))
        ]
        ids = np.array(self.database.add("trajectories", rows))
        trajectory_of_row = np.cumsum(last) - np.asarray(last, int)
        return cast(GeneratorOutput, {**output, "ledger_ids": ids[trajectory_of_row].tolist()})

    def drop(self, ledger_ids: Collection[int], step: int, reason: str) -> None:
        """Record trajectories that no update will see."""
        if self.database is not None:
            self.database.add("ends", [(i, step, reason) for i in sorted(ledger_ids)])

    def take(self, output: GeneratorOutput, uids: Sequence[str]) -> None:
        """Take the trajectories of the step that begins.

        What is recorded is copied here: whoever shapes them may do so in place. In a job it is a
        collective.
        """
        if self.database is None and self._thread is None:
            return
        recorded, digests, self._routes = self.settings.record_rollouts, (), None
        if recorded and ROUTES_PROCESS in output:
            own = own_routes(output, jax.process_index())
            digests = allgather(routes_digest(own))
            self._routes = None if is_first() else own
        if self.database is None:
            return
        ids = output.get("ledger_ids", [])
        self._taken = Taken(
            to_arrays(output) if recorded else None,
            list(uids),
            dict(zip(ids, output["stop_reasons"], strict=False)),
            np.array(ids, int),
            digests,
        )
        self._skipped = None

    def keep(self, output: GeneratorOutput) -> None:
        """Note which rows of the trajectories taken become the batch, in this order."""
        if self._taken is not None and "ledger_ids" in output:
            self._taken = self._taken._replace(rows=np.array(output["ledger_ids"], int))

    def skip(self, rows: np.ndarray) -> None:
        """Note rows [B] bool of a step from which nothing was learnt: their update was skipped."""
        self._skipped = rows

    def end_step(
        self,
        step: int,
        batch: TrainBatch | None,
        state: Any,
        kept: Mapping[str, Mapping[str, np.ndarray]] = MappingProxyType({}),
    ) -> None:
        """Record a finished step: where its trajectories ended, their file, the checksums.

        Args:
            batch: what was trained; its row_ids say which rows of `keep` these are.
            state: after the step.
            kept: see `write_rollouts`.

        Raises:
            ValueError: it has rows that are none of these.
        """
        if batch is None:
            return
        numbers: Callable[[], dict[str, int]] = dict
        if self.settings.record_checksums and (self.database or not is_first()):
            numbers = start_step_checksums(batch, state)
            if jax.process_count() > 1:
                _compare(numbers())
        if self._routes is not None:
            routes, self._routes = self._routes, None
            self._write_beside(rollouts_path(record_folder(self.folder), step), routes)
        if self.database is None or self._taken is None:
            return
        taken, self._taken = self._taken, None
        reasons = _reasons(taken, batch, self._skipped)
        self.database.add("ends", [(number, step, reason) for number, reason in reasons.items()])

        def make() -> tuple[Any, ...]:
            if taken.arrays is None:
                return step, None, None, json.dumps(numbers())
            path = rollouts_path(self.folder, step)
            given = taken.arrays, taken.uids, kept, taken.routes_digests
            digest = write_rollouts(path, *given)
            return step, str(path.relative_to(self.folder)), digest, json.dumps(numbers())

        if self._writing is not None:  # a slow disk may be one step behind, not more
            self._writing.result()
        self._writing = self.database.add_made("steps", make)

    def commit(self) -> dict[str, Any] | None:
        """Return what the checkpoint that is saved now has to know; all of it is on disk.

        So is what this process has to write, if it is not the first; it has nothing to tell.

        Raises:
            LedgerError: it cannot be written.
        """
        if self._thread is not None and self._writing is not None:
            self._writing.result()
        return None if self.database is None else self.database.position()

    def close(self) -> None:
        """Write what is left; an error is not said, see `commit`."""
        if self.database is not None:
            self.database.close()
            self.database = None
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _write_beside(self, path: Path, routes: dict[str, np.ndarray]) -> None:
        """Write what this process has of a step, while it goes on."""
        assert self._thread is not None
        if self._writing is not None:  # a slow disk may be one step behind, not more
            self._writing.result()
        self._writing = self._thread.submit(write_routes, path, routes)


def step_checksums(batch: TrainBatch, state: Any) -> dict[str, int]:
    """Return a number for the bits of each array of a step.

    The names are "batch.<field>", then "state<path>".
    """
    return start_step_checksums(batch, state)()


def start_step_checksums(batch: TrainBatch, state: Any) -> Callable[[], dict[str, int]]:
    """Dispatch `step_checksums`; what is returned waits for the devices, in any thread."""
    width = batch.tokens.shape[1]
    batch_checksums = {
        f"batch.{name}": array.checksum(width)
        if isinstance(array, OwnRoutes)
        else zlib.crc32(np.asarray(jax.device_get(array)).tobytes())
        for name, array in vars(batch).items()
        if array is not None
    }
    state_checksums = start_checksums(state)
    return lambda: (
        batch_checksums | {f"state{name}": number for name, number in state_checksums().items()}
    )


def _compare(found: dict[str, int]) -> None:
    """Check that the processes of the job have computed the same; a collective.

    Raises:
        ProcessError: they have not.
    """
    first = agree(found)
    others = allgather([name for name in first if found.get(name) != first[name]])
    for process, different in enumerate(others):
        if different:
            raise ProcessError(
                f"process {process} has other bits than process 0 in {different[0]} and "
                f"{len(different) - 1} more arrays: one of them computes wrongly, or user code "
                "depends on the process. Nothing of this step is saved: mend that, and resume with "
                "trainer.resume_mode=latest"
            )


def machine_of(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Return where bits come from beside the state and the batch."""
    processes = {"processes": jax.process_count()} if jax.process_count() > 1 else {}
    return processes | {
        "platform": jax.default_backend(),
        "device": mesh.devices.flat[0].device_kind,
        "devices": len(jax.devices()),
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "jax": jax.__version__,
    }


def _judged(output: GeneratorOutput, start: int, end: int) -> tuple[Any, ...]:
    """Return what the rows of a trajectory say of it.

    That is its reward, sampled tokens, stop reason, first and last version.
    """
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


def _reasons(taken: Taken, batch: TrainBatch, skipped: np.ndarray | None) -> dict[int, str | None]:
    """Return why nothing was learnt from each trajectory, by its number.

    None if an update saw a token.
    """
    if not taken.stopped:  # rollouts of one's own, which were not handed out
        return {}
    rows, learnt = np.asarray(batch.row_ids), np.asarray(batch.loss_mask).any(-1)
    if len(rows) and rows.max() >= len(taken.rows):
        raise ValueError(
            f"the batch has row_ids up to {rows.max()}, the trajectories are {len(taken.rows)}: "
            "an override of Trainer.collate makes rows, call super().collate(output) with all that "
            "it is to have"
        )
    reasons: dict[int, str | None] = {
        number: stopped if stopped in _FAILED else "filtered"
        for number, stopped in taken.stopped.items()
    }
    if skipped is None:
        skipped = np.zeros(len(rows), bool)
    else:  # it is in the order of row_ids, the batch perhaps in another
        skipped = skipped[np.argsort(np.argsort(rows))]
    for trained, reason in ((learnt & skipped, "skipped_update"), (learnt & ~skipped, None)):
        reasons |= dict.fromkeys(taken.rows[rows[trained]].tolist(), reason)
    return reasons
