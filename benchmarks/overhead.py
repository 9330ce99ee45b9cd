"""What it costs to watch a run: seconds of a training step with everything recorded, and bare.

    python -m benchmarks.overhead                          # SmolLM2-135M on one-digit sums
    python -m benchmarks.overhead --smoke                  # the quickstart's model
    python -m benchmarks.overhead --loggers jsonl tensorboard wandb
    python -m benchmarks.overhead --no-checksums           # trainer.ledger.record_checksums=false

Claim: diagnostics, alarms, the ledger and the loggers jsonl and tensorboard cost less than 3 % of
the time of a step of configs/arithmetic_smollm2_grpo.py, checksums of the whole state included.

One process, one trainer, two jitted updates: one counts ratios, the other does not. The steps come
in pairs, recorded and bare in turns as to which is first. Both of a pair do the same work to the
token: the learning rate is 0, and the same prompts are drawn with the same keys. Bare is a step
without the statistics of ratios, groups, lengths by reward, advantages by correctness and speed,
without a line for anybody, and without rollouts, checksums and ledger. A recorded step ends when
all of it is written, which a run does not wait for. The figures are the quartiles over the pairs of
recorded / bare - 1; "cpu" is the same of the time of all cores, which says more than the wall clock
on a machine with other work.
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from benchmarks import roofline
from jaxrl import config as cfg
from jaxrl.records.ledger.writer import LedgerWriter
from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer
from jaxrl.training.build import assemble_update

ROOT = Path(__file__).parent.parent
RECIPES = {True: "quickstart.py", False: "arithmetic_smollm2_grpo.py"}
STATISTICS = (  # what a bare step does without
    "jaxrl.training.objective.ratio_sums",
    "jaxrl.training.objective.ratio_metrics",
    "jaxrl.training.metrics.group_metrics",
    "jaxrl.training.metrics.length_metrics",
    "jaxrl.trainer.advantages_by_correctness",
    "jaxrl.trainer.speed_metrics",
)


def load_config(
    folder: str, *, smoke: bool, loggers: Sequence[str], checksums: bool
) -> cfg.TrainConfig:
    """The recipe, with a learning rate of 0 and nothing saved."""
    changes = {
        "data.val_data": [],
        "trainer.policy.optimizer_config.lr": 0.0,
        "trainer.logger": list(loggers),
        "trainer.ledger.record_checksums": checksums,
        "trainer.resume_mode": "none",
        **{f"trainer.{x}_interval": -1 for x in ("eval", "ckpt", "hf_save", "print_example")},
        **{f"trainer.{x}_path": folder for x in ("log", "ckpt", "export")},
    }
    return cfg.apply_overrides(
        cfg.load_config_file(str(ROOT / "configs" / RECIPES[smoke])), changes
    )


class Steps:
    """The trainer, ready for a step of either kind."""

    def __init__(self, config: cfg.TrainConfig) -> None:
        self.trainer: Trainer = BasePPOExp(config).build()
        trainer = self.trainer
        trainer.state = trainer.updater.offload(trainer.restore_or_init())
        trainer.batches_drawn = 0
        trainer.load_reference()
        trainer.sync_weights(0)
        self.recorder = trainer.recorder.open(0)
        silent = LedgerWriter(trainer.ledger.folder, trainer.ledger.settings)
        self.ledgers = {True: trainer.ledger, False: silent}
        trainer.begin_ledger(0)
        placement, trained = trainer.policy.placement, trainer.policy.trained
        bare = assemble_update(
            trainer.config, trainer.forward_pass, placement, trainer.total_steps, trained
        )[2]
        self.updaters = {True: trainer.updater, False: bare}
        self.lines = 0

    def run(self, number: int, *, recorded: bool) -> tuple[float, float]:
        """Wall and CPU seconds of step `number`, done once more."""
        trainer = self.trainer
        trainer.batches_drawn, trainer.updater = number, self.updaters[recorded]
        trainer.ledger = self.ledgers[recorded]
        with contextlib.ExitStack() as stack:
            for name in () if recorded else STATISTICS:
                stack.enter_context(mock.patch(name, lambda *_, **__: {}))
            gc.collect()  # a full collection would fall on one step of a pair
            gc.disable()
            stack.callback(gc.enable)
            started = time.perf_counter(), time.process_time()
            metrics = trainer.train_step(number + 1)
            if recorded:
                self.lines += 1
                trainer.ledger.end_step(self.lines, trainer.batch, trainer.state)
                self.recorder.record(self.lines, metrics)
                trainer.ledger.commit()  # or the bare step would pay for what goes on meanwhile
            jax.block_until_ready(trainer.state)
            return time.perf_counter() - started[0], time.process_time() - started[1]


def measure(steps: Steps, pairs: int) -> list[dict[str, float]]:
    """Seconds of both steps of each pair, after one that compiles."""
    rows = []
    for number in range(-2, pairs):  # two pairs compile: the second has the layout of the first
        order = (True, False) if number % 2 else (False, True)
        seconds = {kind: steps.run(max(number, 0), recorded=kind) for kind in order}
        (recorded, recorded_cpu), (bare, bare_cpu) = seconds[True], seconds[False]
        row = {"recorded": recorded, "bare": bare}
        rows.append(row | {"recorded_cpu": recorded_cpu, "bare_cpu": bare_cpu})
        if number >= 0:
            told = ", ".join(f"{name} {x:.3f} s" for name, x in rows[-1].items())
            print(f"pair {number}: {told}", flush=True)
    return rows[2:]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="the quickstart's model, three pairs")
    parser.add_argument("--pairs", type=int, default=20, help="default: 20")
    parser.add_argument("--loggers", nargs="+", default=["jsonl", "tensorboard"])
    parser.add_argument("--no-checksums", dest="checksums", action="store_false")
    parser.add_argument("--json", type=Path, default=Path("overhead.json"), help="output file")
    arguments = parser.parse_args(argv)
    load = roofline.machine_load()
    with tempfile.TemporaryDirectory() as folder:
        chosen = {name: getattr(arguments, name) for name in ("smoke", "loggers", "checksums")}
        config = load_config(folder, **chosen)
        steps = Steps(config)
        rows = measure(steps, 3 if arguments.smoke else arguments.pairs)
        steps.recorder.logger.close()
        steps.ledgers[True].close()
    report: dict[str, Any] = {"benchmark": "overhead", "loggers": arguments.loggers, "rows": rows}
    for kind in ("", "_cpu"):
        shares = [row[f"recorded{kind}"] / row[f"bare{kind}"] - 1 for row in rows]
        report[f"overhead{kind}"] = statistics.median(shares)
        seconds = statistics.median(row[f"bare{kind}"] for row in rows)
        quartiles = ", ".join(f"{x:+.2%}" for x in statistics.quantiles(shares, n=4))
        label = kind.strip("_") or "wall"
        print(f"{label:5}bare {seconds:.3f} s, recorded more by (quartiles) {quartiles}")
    print(
        f"{RECIPES[arguments.smoke]}, {len(rows)} pairs, loggers {arguments.loggers}; load {load}"
    )
    arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
