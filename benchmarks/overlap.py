"""How much of sampling and training overlaps: wall clock per trained token, and idle time.

    python -m benchmarks.overlap                 # an engine and updates that sleep
    python -m benchmarks.overlap --smoke         # few short steps; the figures mean nothing
    python -m benchmarks.overlap --real          # the quickstart, with its engine and its updates

Claim: where sampling and training cost the same, a fully asynchronous run takes at most 15 % more
than the dearer of the two alone, and one that is one step off at most 15 % more than what follows
from the lengths that were drawn.

The trainers, the conversations, the stream and the ledger are the real ones. The engine sleeps: it
has slots, a sample holds one for as many token times as it has tokens, and these are log-normal, a
long tail, named by the sample's key, so that every run draws the same lengths. The update sleeps
too. A token time is chosen such that the engine, with all slots busy, needs for all batches what
the updates need: rollout = train. A synchronous batch needs longer than that, until its longest
sample is done.

In theory, with m_t the time of batch t from its first token to its last, by the same lengths and
slots: synchronous sum(m_t + train), one step off m_1 + sum_{t > 1} max(train, m_t) + train. The
bound of the fully asynchronous run is max(sum rollout, sum train). Idle shares are of the whole
run, from its first prompt to its last update: of the trainer, waiting for trajectories; of the
engine, slots without a sample.
"""

import argparse
import bisect
import heapq
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import roofline
from jaxrl import config as cfg
from jaxrl.rollout.conversations.conversation import generator_input, sampling_of
from jaxrl.rollout.protocol import Completion, Request
from jaxrl.train import BasePPOExp
from jaxrl.types import TrainBatch

ROOT = Path(__file__).parent.parent
BOUND = 1.15
MODES = {
    "synchronous": {"enabled": False},
    "one step off": {"enabled": True, "schedule": "lockstep", "max_staleness_steps": 1},
    "fully asynchronous": {"enabled": True, "schedule": "free", "max_staleness_steps": 4},
}
LONGEST, MEDIAN, SIGMA = 512, 50, 0.8  # tokens; log-normal


def length_of(key: tuple[int, int]) -> int:
    """Tokens of the sample with this key."""
    drawn = np.random.default_rng(key).lognormal(np.log(MEDIAN), SIGMA)
    return int(np.clip(drawn, 1, LONGEST))


def makespan(lengths: Sequence[int], slots: int) -> int:
    """Token times until the last of some samples is done; they take free slots in order."""
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


class SleepingEngine:
    """An `Engine` whose samples take time and nothing else."""

    def __init__(self, slots: int, token_seconds: float) -> None:
        self.slots, self.token_seconds = slots, token_seconds
        self.changes: list[tuple[float, int]] = []  # when weights came, and their version
        self.busy, self.first = 0.0, 0.0  # seconds of slots; when the first request came
        self._queue: list[tuple[Request, tuple[int, int], Future[Completion]]] = []
        self._running: list[tuple[float, int, float, Future[Completion]]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="sleeping-engine", daemon=True).start()

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        groups: list[list[Future[Completion]]] = [[Future() for _ in r.keys] for r in requests]
        self.first = self.first or time.perf_counter()
        with self._changed:
            for request, futures in zip(requests, groups, strict=True):
                self._queue += [(request, k, f) for k, f in zip(request.keys, futures, strict=True)]
            self._changed.notify()
        return groups

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        return [[future.result() for future in group] for group in self.submit(requests)]

    def update_weights(self, params: Any, version: int) -> None:
        self.changes.append((time.perf_counter(), version))

    def warm_up(self, requests: Sequence[Request]) -> None: ...

    def describe(self) -> str:
        return f"{self.slots} slots, {self.token_seconds * 1e3:.2f} ms a token"

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.perf_counter()
                while self._queue and len(self._running) < self.slots:
                    _, key, future = self._queue.pop(0)
                    entry = (now + length_of(key) * self.token_seconds, id(future), now, future)
                    heapq.heappush(self._running, entry)
                done = []
                while self._running and self._running[0][0] <= now:
                    done.append(heapq.heappop(self._running))
                if not done:
                    left = self._running[0][0] - now if self._running else None
                    self._changed.wait(left)
            for end, _, start, future in done:
                self.busy += end - start
                if not future.cancelled():
                    future.set_result(self._completion(start, end))

    def _completion(self, start: float, end: float) -> Completion:
        count = round((end - start) / self.token_seconds)
        times = [at for at, _ in self.changes]
        drawn = (start + i * self.token_seconds for i in range(count))
        versions = [self.changes[max(bisect.bisect(times, t) - 1, 0)][1] for t in drawn]
        return Completion([1] * count, [-1.0] * count, "length", versions)


class SleepingRun(BasePPOExp):
    """A run whose engine and updates sleep."""

    def __init__(self, config: Any, engine: SleepingEngine, update_seconds: float) -> None:
        super().__init__(config)
        self.sleeping, self.update_seconds = engine, update_seconds

    def get_engine(self, model: Any, mesh: Any) -> Any:
        return self.sleeping

    def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
        trainer = super().get_trainer(*args, **kwargs)

        def update(batch: TrainBatch, step: int) -> None:
            time.sleep(self.update_seconds)
            trainer.finish(step, rows=len(batch.index))

        trainer.update = update
        return trainer


def load_config(folder: str, steps: int, mode: str, **changes: Any) -> cfg.TrainConfig:
    """The quickstart with one update a step, and nothing done but sampling and training."""
    settings = {
        "data.val_data": [],
        "trainer.max_training_steps": steps,
        "trainer.policy_mini_batch_size": changes.get("trainer.train_batch_size", 32),
        "trainer.algorithm.policy_loss_type": "rollout_is",
        "trainer.logger": "jsonl",
        "trainer.run_name": "run",
        "trainer.resume_mode": "none",
        **{f"trainer.{x}_interval": -1 for x in ("eval", "ckpt", "hf_save", "print_example")},
        **{f"trainer.{x}_path": folder for x in ("log", "ckpt", "export")},
        **{f"trainer.fully_async.{name}": value for name, value in MODES[mode].items()},
    }
    recipe = cfg.load_config_file(str(ROOT / "configs" / "quickstart.py"))
    return cfg.apply_overrides(recipe, settings | changes)


def lines_of(folder: str) -> list[dict[str, float]]:
    """The metrics of the steps."""
    text = (Path(folder) / "run" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def idle_seconds(lines: Sequence[dict[str, float]]) -> float:
    """Of the trainer: waiting for trajectories; all of sampling, where nothing overlaps."""
    return sum(x.get("async/trainer_idle_seconds", x["timing/generate"]) for x in lines)


def sleeping(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run with sleeping parts."""
    slots, steps = arguments.slots, arguments.steps
    changes = {
        "trainer.train_batch_size": arguments.prompts,
        "generator.n_samples_per_prompt": arguments.samples,
        "generator.sampling_params.max_generate_length": LONGEST,
    }
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(folder, steps, mode, **changes)
        engine = SleepingEngine(slots, 1.0)
        with mock.patch("jaxrl.trainer.Trainer.warm_up"):  # nothing is compiled but the advantages
            trainer = SleepingRun(config, engine, arguments.update_seconds).build()
            lengths = planned_lengths(trainer, steps)
            total = sum(map(sum, lengths))
            engine.token_seconds = steps * arguments.update_seconds * slots / total
            trainer.train()
            wall = time.perf_counter() - engine.first
        lines = lines_of(folder)
    trained = sum(x["generate/batch_num_seq"] * x["generate/avg_num_tokens"] for x in lines)
    assert round(trained) == total, (trained, total)  # every sample of every batch, once
    spans = [makespan(batch, slots) * engine.token_seconds for batch in lengths]
    train = arguments.update_seconds
    theory = {
        "synchronous": sum(spans) + steps * train,
        "one step off": spans[0] + sum(max(train, m) for m in spans[1:]) + train,
        "fully asynchronous": max(total * engine.token_seconds / slots, steps * train),
    }
    return {
        "mode": mode,
        "seconds": wall,
        "theory": theory[mode],
        "tokens": total,
        "us_per_token": wall / total * 1e6,
        "trainer_idle": idle_seconds(lines) / wall,
        "engine_idle": 1 - engine.busy / (slots * wall),
        "staleness_mean": float(np.mean([x.get("async/staleness_mean", 0.0) for x in lines])),
    }


def planned_lengths(trainer: Any, steps: int) -> list[list[int]]:
    """Tokens of each sample of each batch, by the keys that the trainer will give them."""
    seed, params = trainer.config.trainer.seed, trainer.config.generator.sampling_params
    sampling = sampling_of(params, trainer.eos_token_ids)
    asked: list[list[int]] = []
    for step in range(1, steps + 1):
        given = trainer.prompts_of(step - 1), trainer.samples, (seed, "train", step), sampling
        asked.append([length_of(key) for key in generator_input(*given)["keys"]])
    return asked


def real(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The quickstart; seconds of the steps after the first two."""
    with tempfile.TemporaryDirectory() as folder:
        run = BasePPOExp(load_config(folder, arguments.steps, mode))
        run.run()
        lines = lines_of(folder)[2:]
    tokens = sum(x["generate/batch_num_seq"] * x["generate/avg_num_tokens"] for x in lines)
    wall = sum(x["timing/wall"] for x in lines)
    engine_idle = sum(x.get("async/engine_idle_seconds", wall) for x in lines) / wall
    if mode == "synchronous":
        engine_idle = 1 - sum(x["timing/generate"] for x in lines) / wall
    return {
        "mode": mode,
        "seconds": wall,
        "tokens": tokens,
        "us_per_token": wall / tokens * 1e6,
        "trainer_idle": idle_seconds(lines) / wall,
        "engine_idle": engine_idle,
        "reward": lines[-1]["reward/avg_raw_reward"],
        "staleness_mean": float(np.mean([x.get("async/staleness_mean", 0.0) for x in lines])),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write the JSON; 1 if a bound is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="four steps of 0.1 s, no bound")
    parser.add_argument("--real", action="store_true", help="the real engine, no bound")
    parser.add_argument("--steps", type=int, default=40, help="default: 40")
    parser.add_argument("--update-seconds", type=float, default=1.0, help="default: 1")
    parser.add_argument("--prompts", type=int, default=16, help="of a batch; default: 16")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt; default: 8")
    parser.add_argument("--slots", type=int, default=32, help="of the engine; default: 32")
    parser.add_argument("--json", type=Path, default=Path("overlap.json"), help="output file")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.steps, arguments.update_seconds = 4, 0.1
    load = roofline.machine_load()
    rows = [(real if arguments.real else sleeping)(mode, arguments) for mode in MODES]
    first = rows[0]["us_per_token"]
    for row in rows:
        told = f"{row['mode']:19} {row['seconds']:7.1f} s, {row['us_per_token']:8.1f} us/token"
        told += f", {first / row['us_per_token']:.2f} x as fast"
        if "theory" in row:
            told += f"; theory {row['theory']:.1f} s: {row['seconds'] / row['theory'] - 1:+.1%}"
        idle = f"idle: trainer {row['trainer_idle']:.1%}, engine {row['engine_idle']:.1%}"
        print(f"{told}; {idle}; staleness {row['staleness_mean']:.2f}")
    print(f"{arguments.steps} steps; load {load}")
    missed = [r["mode"] for r in rows[1:] if "theory" in r and r["seconds"] > BOUND * r["theory"]]
    report = {"benchmark": "overlap", "real": arguments.real, "rows": rows, "missed": missed}
    arguments.json.write_text(json.dumps(report, indent=1))
    if missed and not arguments.smoke:
        print(f"more than {BOUND - 1:.0%} above: {', '.join(missed)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
