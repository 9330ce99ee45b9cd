"""Runs of a sweep: a method, a learning rate, a seed; each is trained once and then a file."""

import concurrent.futures
import contextlib
import copy
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import shutil
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl import config as cfg
from jaxrl.config.dataclass_config import flatten
from jaxrl.files import replace_text
from jaxrl.records.json_lines import read_lines
from jaxrl.tools.compare.variants import Variant

LAST = 0.2  # share of the steps, the last ones, whose mean reward is the score of a run
REWARD, EVAL = "reward/avg_raw_reward", "eval/all/avg_score"


@dataclass(frozen=True)
class Unit:
    """Hold one run of a sweep.

    Attributes:
        method: name of the variant.
        config: resolved, with learning rate, seed and folders of the run.
        result: file that says how it went, once it has ended.
    """

    method: str
    lr: float
    seed: int
    config: cfg.TrainConfig
    result: Path


@dataclass(frozen=True)
class Outcome:
    """Hold how a run went.

    Attributes:
        rewards: mean reward of each step.
        score: mean of the last ones; None = it failed.
        evaluation: score of the last evaluation; None = there was none.
        error: why it failed; "" = it did not.
    """

    method: str
    lr: float
    seed: int
    rewards: list[float]
    score: float | None
    evaluation: float | None
    error: str


def units(
    variants: Iterable[Variant], lrs: Sequence[float], seeds: Sequence[int], folder: Path
) -> list[Unit]:
    """Return the runs of all variants with every learning rate and seed; no lrs: the config's own.

    A result is found again by all fields that are not at their defaults, folders of the run apart:
    a sweep that is started again with another config does not take the old ones. A path below the
    working directory counts from there, so that a copy of the repository finds the same.
    """
    found, usual = [], flatten(cfg.resolve(cfg.TrainConfig()))
    for variant in variants:
        for lr in lrs or [variant.config.trainer.policy.optimizer_config.lr]:
            for seed in seeds:
                config = copy.deepcopy(variant.config)
                trainer = config.trainer
                trainer.policy.optimizer_config.lr, trainer.seed = lr, seed
                trainer.ckpt_interval = trainer.hf_save_interval = -1
                trainer.print_example_interval, trainer.logger = -1, "console"
                trainer.run_name = ""
                trainer.log_path = trainer.ckpt_path = trainer.export_path = ""
                own = {k: _here(v) for k, v in flatten(config).items() if usual.get(k) != v}
                made_of = json.dumps(own, sort_keys=True)
                key = hashlib.sha256(made_of.encode()).hexdigest()[:16]
                trainer.run_name, trainer.log_path = key, str(folder / "runs")
                trainer.ckpt_path = str(folder / "runs" / key / "checkpoints")
                trainer.export_path = str(folder / "runs" / key / "exports")
                result = folder / "results" / f"{key}.json"
                found.append(Unit(variant.name, lr, seed, config, result))
    return found


def _here(value: Any) -> Any:
    """Return a path below the working directory as it is from there, anything else as it is."""
    here = f"{Path.cwd()}/"
    return value.removeprefix(here) if isinstance(value, str) else value


def outcomes(todo: Sequence[Unit], processes: int) -> Generator[Outcome]:
    """Yield how each run went, in order; those that have no result yet are trained.

    Args:
        processes: that train beside each other, each on cores of its own.
    """
    context = multiprocessing.get_context("spawn")  # JAX has threads
    numbers = context.SimpleQueue()
    for number in range(processes):
        numbers.put(number)
    waiting = (unit for unit in todo if not unit.result.exists())
    running: set[concurrent.futures.Future] = set()
    pool = concurrent.futures.ProcessPoolExecutor(
        processes, context, initializer=take_cores, initargs=(numbers, processes)
    )
    with pool:
        for unit in todo:
            while not unit.result.exists():
                # no more than can run: what the pool holds beyond that could not be taken back
                for following in itertools.islice(waiting, processes - len(running)):
                    running.add(pool.submit(_train, following))
                ended, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
                for future in ended:
                    future.result()
            yield Outcome(**json.loads(unit.result.read_text(encoding="utf-8")))


def take_cores(numbers: multiprocessing.SimpleQueue, processes: int) -> None:
    """Keep a process to its share of the cores, before XLA starts a thread for each it may use.

    Two processes with threads on the same two cores took 1.6 times as long, see LOG.md.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS, Windows
        return
    cores = sorted(os.sched_getaffinity(0))
    if mine := cores[numbers.get() :: processes]:  # more processes than cores share them all
        os.sched_setaffinity(0, mine)


def _train(unit: Unit) -> None:
    """Train a run to its end and write its result; an error is a result, a kill is none."""
    from jaxrl.train import train  # in the process that trains

    folder, error = cfg.run_folder(unit.config.trainer), ""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            train(unit.config)
        except (ValueError, FloatingPointError) as problem:
            error = str(problem).partition("\n")[0] or type(problem).__name__
    lines = read_lines(folder / "metrics.jsonl")
    rewards = [line[REWARD] for line in lines if REWARD in line]
    evaluations = [line[EVAL] for line in lines if EVAL in line]
    last = rewards[-max(1, round(LAST * len(rewards))) :]
    if not error and not (rewards and np.isfinite(rewards).all()):
        error = "its rewards are not finite" if rewards else "it has no step with a reward"
    found = {
        "method": unit.method,
        "lr": unit.lr,
        "seed": unit.seed,
        "rewards": [round(x, 6) for x in rewards],
        "score": None if error else float(np.mean(last)),
        "evaluation": evaluations[-1] if evaluations else None,
        "error": error,
    }
    replace_text(unit.result, json.dumps(found))
    shutil.rmtree(folder, ignore_errors=True)  # its rollouts are large, and nobody reads them
