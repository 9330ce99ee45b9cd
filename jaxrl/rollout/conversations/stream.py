"""Rollouts sampled ahead of the trainer: admission, buffer, and what is in flight.

A group, the samples of a prompt, is known by its ordinal: its place in the order of the data over
all epochs. As in SkyRL the pace is set at the entrance, and nothing that was sampled is thrown
away: at training step t, with batches of P groups and a staleness of s steps, a group is admitted
while accepted + running < (s + t) P, where accepted ones are finished, trained or not. When step t
takes its batch, (t - 1) P groups are trained, so at most (s + 1) P are in flight or wait.
"""

import asyncio
import io
import json
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from jaxrl.data.recorded import from_arrays, to_arrays
from jaxrl.rollout.conversations.concat_outputs import concat_outputs
from jaxrl.rollout.conversations.loop_thread import LoopThread
from jaxrl.types import GeneratorOutput


class Unit(NamedTuple):
    """Hold what is sampled in one call of the generator: one group, or those of a whole batch."""

    ordinal: int  # of its first group
    output: GeneratorOutput


@dataclass
class Held:
    """Hold what is between the data and the trainer.

    Attributes:
        next_ordinal: the first that was never handed out.
        in_flight: ordinals that were handed out and are not finished, those of units, ascending.
        finished: sampled and not yet trained, in the order in which they were finished.
    """

    next_ordinal: int
    in_flight: list[int] = field(default_factory=list)
    finished: list[Unit] = field(default_factory=list)


class RolloutStream:
    """Keep samplers busy, and hand the trainer a batch at a time.

    Args:
        sample: (ordinal of a unit, the training step now) -> its trajectories; runs in the loop
            of `thread`.
        groups: P, of a batch.
        ahead: s.
        steps: of the whole run; nothing is sampled for later ones.
        step: training step that comes first, counted from 1.
        held: what the checkpoint held; what was in flight is handed out again, first.
        unit: groups sampled in one call, a divisor of `groups`.
        workers: units in flight, at most.
    """

    def __init__(
        self,
        sample: Callable[[int, int], Awaitable[GeneratorOutput]],
        thread: LoopThread,
        *,
        groups: int,
        ahead: int,
        steps: int,
        step: int,
        held: Held,
        unit: int = 1,
        workers: int = 1,
    ) -> None:
        self._sample, self._thread = sample, thread
        self.groups, self.ahead, self.steps, self.step = groups, ahead, steps, step
        self.unit, self.workers = unit, workers
        self._again, self._next = deque(held.in_flight), held.next_ordinal
        self._finished = deque(held.finished)
        self._accepted = (step - 1) * groups + len(held.finished) * unit
        self._running: dict[int, asyncio.Task[None] | None] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()  # guards all of this; the loop's thread adds to it
        self._idle, self._idle_since = 0.0, time.perf_counter()
        self._refill()

    # ---------------------------------------------------------------- the trainer's side

    def take(self) -> list[Unit]:
        """Return the units of a batch: those that were finished first, by ordinal.

        Raises:
            BaseException: what a sampler raised.
        """
        with self._changed:
            self._wait(lambda: len(self._finished) * self.unit >= self.groups)
            taken = [self._finished.popleft() for _ in range(self.groups // self.unit)]
        return sorted(taken, key=lambda unit: unit.ordinal)

    def drain(self) -> None:
        """Wait until all that may be sampled before the next step is finished; raises as `take`."""
        with self._changed:
            self._wait(lambda: self._accepted >= self._limit())

    def advance(self, step: int) -> None:
        """Begin training step `step`, so that more may be admitted."""
        with self._changed:
            self.step = step
        self._refill()

    def held(self) -> Held:
        """Return what a checkpoint must know to lose nothing."""
        with self._changed:
            in_flight = sorted([*self._running, *self._again])
            return Held(self._next, in_flight, list(self._finished))

    def waiting(self) -> int:
        """Return how many finished groups wait for the trainer."""
        return len(self._finished) * self.unit

    def take_idle_seconds(self) -> float:
        """Return the seconds in which nothing was in flight, since the last call."""
        with self._changed:
            now = time.perf_counter()
            idle = self._idle + (0.0 if self._running else now - self._idle_since)
            self._idle, self._idle_since = 0.0, now
        return idle

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or condition())
        if self._error is not None:
            raise self._error

    # ---------------------------------------------------------------- in the loop's thread

    def _refill(self) -> None:
        self._thread.loop.call_soon_threadsafe(self._fill)

    def _fill(self) -> None:
        with self._changed:
            while self._admits():
                if not self._running:
                    self._idle += time.perf_counter() - self._idle_since
                ordinal = self._again.popleft() if self._again else self._next
                self._next = max(self._next, ordinal + self.unit)
                self._running[ordinal] = None
                self._running[ordinal] = asyncio.get_running_loop().create_task(self._run(ordinal))

    def _limit(self) -> int:
        return min(self.step + self.ahead, self.steps) * self.groups

    def _admits(self) -> bool:
        running = len(self._running)
        room = self._accepted + (running + 1) * self.unit <= self._limit()
        return self._error is None and running < self.workers and room

    async def _run(self, ordinal: int) -> None:
        try:
            output = await self._sample(ordinal, self.step)
        except BaseException as error:  # it stays in flight, for the checkpoint
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        with self._changed:
            del self._running[ordinal]
            self._finished.append(Unit(ordinal, output))
            self._accepted += self.unit
            if not self._running:
                self._idle_since = time.perf_counter()
            self._fill()
            self._changed.notify_all()


# ---------------------------------------------------------------- in a checkpoint


def units_to_bytes(units: Sequence[Unit]) -> np.ndarray:
    """Encode units as bytes [N] uint8, without loss: an npz archive in which nothing is pickled."""
    whole = concat_outputs([unit.output for unit in units])
    about = {
        "ordinals": [unit.ordinal for unit in units],
        "rows": [len(unit.output["response_ids"]) for unit in units],
        "metrics": [unit.output["rollout_metrics"] for unit in units],
    }
    arrays: dict[str, Any] = to_arrays({**whole, "rollout_metrics": {}})
    file = io.BytesIO()
    np.savez(file, **arrays, about=_json(about))
    return np.frombuffer(file.getvalue(), np.uint8)


def units_from_bytes(data: np.ndarray) -> list[Unit]:
    """Return the units that `units_to_bytes` was given."""
    with np.load(io.BytesIO(data.tobytes()), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    about = json.loads(arrays.pop("about").tobytes())
    whole = cast(dict[str, Any], from_arrays(arrays))
    ends = np.cumsum(about["rows"]).tolist()
    units = []
    for i, (ordinal, end) in enumerate(zip(about["ordinals"], ends, strict=True)):
        output = rows_of(cast(GeneratorOutput, whole), end - about["rows"][i], end)
        output["rollout_metrics"] = about["metrics"][i]
        units.append(Unit(ordinal, output))
    return units


def rows_of(output: GeneratorOutput, begin: int, end: int) -> GeneratorOutput:
    """Return some rows of an output."""
    columns = {k: v[begin:end] if isinstance(v, list) else v for k, v in output.items()}
    return cast(GeneratorOutput, columns)


def _json(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value, default=float).encode(), np.uint8)
