"""What each registered loss and estimator learns in 100 steps of `sort_digits`.

    python -m benchmarks.sort_digits --json=sort_digits.json
    python -m benchmarks.sort_digits --losses gspo gmpo --estimators --seeds 1

Claim: the table of docs/sort_digits.md. Not a contest: one learning rate for all, a task of
seconds. It shows which functions learn here at all, and which do not and why.

The model of configs/quickstart.py sorts two digits from random weights, 16 prompts x 16 samples,
four updates per step (two minibatches, two passes), so that all but the first are off policy;
entropy bonus 0.1 (less for estimators that do not scale), no KL. Losses run with the
estimator `grpo`, estimators with the loss `regular`. The score is the mean reward of the sampled
answers, 1/3 for each right digit and for stopping after the second; over the steps 41-60 and
81-100, and greedy on held-out strings after the last.
"""

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.config import TrainConfig, load_config_file, to_train_config
from jaxrl.records.json_lines import read_lines
from jaxrl.registry import AdvantageEstimatorRegistry, PolicyLossRegistry
from jaxrl.train import BasePPOExp

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.py"
NEEDS_CRITIC = {"gae"}
SETTINGS: dict[str, dict[str, Any]] = {  # what the papers say beyond the name
    "gspo": dict(loss_reduction="sequence_mean", eps_clip_low=3e-4, eps_clip_high=4e-4),
    "gmpo": dict(loss_reduction="sequence_mean", eps_clip_low=0.4, eps_clip_high=0.4),
    "sapo": dict(loss_reduction="sequence_mean"),
    # Not divided by a standard deviation of about 0.2, hence the smaller entropy bonus.
    "rloo": dict(entropy_loss_coef=0.02),
    "dr_grpo": dict(
        entropy_loss_coef=0.01, loss_reduction="seq_mean_token_sum_norm", max_seq_len=6
    ),
    "grpo_token": dict(gamma=0.0),
}


def make_config(settings: Mapping[str, Any], seed: int, steps: int, folder: Path) -> TrainConfig:
    """The quickstart, shorter, with fields of the algorithm set."""
    config = load_config_file(str(QUICKSTART))
    source = "jaxrl.envs.toys.sort_digits:prompts(size={size}, length=2, split='{split}')"
    config.data.train_data = [source.format(size=90, split="train")]
    config.data.val_data = [source.format(size=9, split="eval")]
    trainer = config.trainer
    trainer.seed, trainer.run_name = seed, "run"
    optimizer = trainer.policy.optimizer_config
    optimizer.lr, optimizer.num_warmup_steps = 3e-3, 10
    trainer.epochs, trainer.max_training_steps = steps, steps
    trainer.train_batch_size, trainer.policy_mini_batch_size = 16, 8
    trainer.algorithm.advantage_estimator, trainer.algorithm.gamma = "grpo", 1.0
    trainer.update_epochs_per_batch = 2
    for name, value in settings.items():
        setattr(trainer.algorithm, name, value)
    trainer.eval_before_train, trainer.eval_interval = False, steps
    trainer.ckpt_interval = trainer.hf_save_interval = trainer.print_example_interval = -1
    trainer.logger, trainer.log_path = "console", str(folder)
    trainer.ckpt_path, trainer.export_path = str(folder / "checkpoints"), str(folder / "exports")
    return to_train_config(config)


def learn(settings: Mapping[str, Any], seed: int, steps: int) -> dict[str, Any]:
    """Train once; the scores, or the error that ended the run."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                BasePPOExp(make_config(settings, seed, steps, Path(folder))).run()
        except (ValueError, FloatingPointError) as error:
            return {"seed": seed, "error": str(error)}
        lines = read_lines(Path(folder) / "run" / "metrics.jsonl")
    reward = [line["reward/avg_raw_reward"] for line in lines]
    return {
        "seed": seed,
        "middle": statistics.fmean(reward[int(0.4 * steps) : int(0.6 * steps)]),
        "end": statistics.fmean(reward[int(0.8 * steps) :]),
        "greedy": lines[-1]["eval/all/avg_score"],
        "entropy": lines[-1]["policy/policy_entropy"],
        "seconds": time.perf_counter() - started,
    }


def table_row(name: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """One line of the table, the seeds separated by slashes."""
    if any("error" in run for run in runs):
        return f"| {name} | {runs[0].get('error')} | | | |"
    cells = (
        " / ".join(f"{run[key]:.2f}" for run in runs)
        for key in ("middle", "end", "greedy", "entropy")
    )
    return f"| {name} | {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> int:
    """Run what the flags name and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    losses, estimators = (
        PolicyLossRegistry.list_available(),
        AdvantageEstimatorRegistry.list_available(),
    )
    parser.add_argument("--losses", nargs="*", default=losses)
    parser.add_argument(
        "--estimators", nargs="*", default=[e for e in estimators if e not in NEEDS_CRITIC]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    print("| | steps 41-60 | steps 81-100 | greedy, held out | entropy at the end |")
    print("|---|---|---|---|---|")
    report = {}
    for field, names in (
        ("policy_loss_type", arguments.losses),
        ("advantage_estimator", arguments.estimators),
    ):
        for name in names:
            settings = {field: name, **SETTINGS.get(name, {})}
            runs = [learn(settings, seed, arguments.steps) for seed in arguments.seeds]
            report[f"{field}={name}"] = {"settings": settings, "runs": runs}
            print(table_row(name, runs), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
