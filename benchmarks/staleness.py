"""What old rollouts cost, by the loss that trains on them.

    python -m benchmarks.staleness [--json=staleness.json] [--plot=docs/curves/staleness.png]
    python -m benchmarks.staleness --methods ppo decoupled --staleness 0 8 --lr=3e-4 --steps=400

Claim: the table of docs/asynchrony.md, section Staleness: the reward that each loss reaches on
rollouts that are 0, 1, 2, 4 and 8 training steps old, three seeds each.

The model of configs/quickstart.py sorts three digits from random weights: 200 steps of 16 prompts x
8 samples, two updates on each batch (two passes over one minibatch), AdamW with lr 1e-3 after ten
updates of warm-up, entropy bonus 0.03, no KL. `trainer.fully_async.schedule="lockstep"` makes
staleness exact: the batch of step t is sampled whole by the policy of max(0, t - 1 - staleness)
finished steps, so that the first staleness + 1 batches are of the random policy. All else is the
same, the learning rate too, which is chosen for none of the losses.

    ppo         regular, old_log_probs="rollout": the ratio and its clip are around the sampler
    decoupled   decoupled_ppo: weight to the policy at the start of the step, clip around that
    log_linear  the same with the proximal policy that needs no forward pass
    rollout_is  REINFORCE with the ratio to the sampler, dropped outside (0.5, 5)
    cispo       REINFORCE with the ratio to the sampler, clipped to [0, 5]
    uncorrected regular around the policy at the start of the step, as if that had sampled; refused
                as a built-in loss where rollouts are stale, so it runs as a user's

"reward" is the mean reward of the sampled answers over the last 20 steps, 1/4 for each right digit
and for stopping after the third; "greedy" that of greedy answers to 80 held-out strings after the
last step; "half at" where the first ten steps begin whose mean reward is 0.5, for each seed. Means
over seeds +- their standard deviation. The runs share compiled programs through the compilation
cache.
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

from jaxrl import config as cfg
from jaxrl.files import check_file
from jaxrl.losses.regular import regular
from jaxrl.records.json_lines import read_lines
from jaxrl.train import BasePPOExp
from jaxrl.types import Array

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.py"
METHODS: dict[str, dict[str, Any]] = {  # fields of trainer.algorithm
    "ppo": {"policy_loss_type": "regular", "old_log_probs": "rollout"},
    "decoupled": {"policy_loss_type": "decoupled_ppo"},
    "log_linear": {"policy_loss_type": "decoupled_ppo", "decoupled_ppo.proximal": "log_linear"},
    "rollout_is": {"policy_loss_type": "rollout_is", "eps_clip_low": 0.5, "eps_clip_high": 4.0},
    "cispo": {"policy_loss_type": "cispo", "cispo.cispo_anchor": "rollout"},
    "uncorrected": {"policy_loss_type": "benchmarks.staleness:uncorrected"},
}
LAST = 20
MEANS = {  # over the last steps
    "reward": "reward/avg_raw_reward",
    "effective_sample_size": "policy/effective_sample_size",
    "staleness": "async/staleness_mean",
    "entropy": "policy/policy_entropy",
}


def uncorrected(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    config: Any,
    loss_mask: Array | None = None,
) -> tuple[Array, Any]:
    """`regular`, by another name."""
    return regular(log_probs, old_log_probs, advantages, config, loss_mask)


def make_config(
    method: str, staleness: int, seed: int, *, steps: int, lr: float, folder: Path
) -> Any:
    """The quickstart, shorter, with rollouts that are so many steps old."""
    source = "jaxrl.envs.toys.sort_digits:prompts(size={}, length=3, split='{}')"
    optimizer = "trainer.policy.optimizer_config"
    changes = {
        "data.train_data": [source.format(800, "train")],
        "data.val_data": [source.format(80, "eval")],
        "trainer.seed": seed,
        "trainer.run_name": "run",
        f"{optimizer}.lr": lr,
        f"{optimizer}.num_warmup_steps": 10,
        f"{optimizer}.scheduler": "constant_with_warmup",
        "trainer.epochs": steps,
        "trainer.max_training_steps": steps,
        "trainer.train_batch_size": 16,
        "trainer.policy_mini_batch_size": 16,
        "trainer.update_epochs_per_batch": 2,
        "generator.n_samples_per_prompt": 8,
        "trainer.algorithm.entropy_loss_coef": 0.03,
        "trainer.fully_async.enabled": True,
        "trainer.fully_async.schedule": "lockstep",
        "trainer.fully_async.max_staleness_steps": staleness,
        "trainer.eval_before_train": False,
        "trainer.eval_interval": steps,
        **dict.fromkeys(("trainer.ckpt_interval", "trainer.hf_save_interval"), -1),
        "trainer.print_example_interval": -1,
        "trainer.ledger.record_rollouts": False,
        "trainer.ledger.record_checksums": False,
        "trainer.logger": "console",
        "trainer.log_path": str(folder),
        "trainer.ckpt_path": str(folder / "checkpoints"),
        "trainer.export_path": str(folder / "exports"),
        **{f"trainer.algorithm.{name}": value for name, value in METHODS[method].items()},
    }
    return cfg.apply_overrides(cfg.load_config_file(str(QUICKSTART)), changes)


def learn(method: str, staleness: int, seed: int, *, steps: int, lr: float) -> dict[str, Any]:
    """Train once; what came of it, and the reward of every step."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(method, staleness, seed, steps=steps, lr=lr, folder=Path(folder))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            BasePPOExp(config).run()
        lines = read_lines(Path(folder) / "run" / "metrics.jsonl")
    rewards = [line["reward/avg_raw_reward"] for line in lines]
    tens = [statistics.fmean(rewards[i : i + 10]) for i in range(max(1, len(rewards) - 9))]
    return {
        **{"method": method, "max_staleness_steps": staleness, "seed": seed},
        **{name: statistics.fmean(x[key] for x in lines[-LAST:]) for name, key in MEANS.items()},
        "greedy": lines[-1]["eval/all/avg_score"],
        "half_at": next((i + 1 for i, mean in enumerate(tens) if mean >= 0.5), None),
        "rewards": rewards,
        "seconds": time.perf_counter() - started,
    }


def cell(runs: Sequence[Mapping[str, Any]], name: str) -> str:
    """Mean +- standard deviation over seeds."""
    values = [run[name] for run in runs]
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.2f} +- {spread:.2f}"


def half_at(runs: Sequence[Mapping[str, Any]]) -> str:
    """The steps at which each seed got half the reward."""
    return " / ".join("-" if run["half_at"] is None else str(run["half_at"]) for run in runs)


def tables(runs: Sequence[Mapping[str, Any]]) -> str:
    """A markdown table per measure: a line for each loss, a column for each staleness."""
    ages = list(dict.fromkeys(run["max_staleness_steps"] for run in runs))
    shown = {
        "reward, last 20 steps": lambda group: cell(group, "reward"),
        "greedy, held out": lambda group: cell(group, "greedy"),
        "effective sample size": lambda group: cell(group, "effective_sample_size"),
        "half at": half_at,
    }
    lines = []
    for title, show in shown.items():
        lines += [f"| {title} | {' | '.join(map(str, ages))} |", f"|{'---|' * (len(ages) + 1)}"]
        for method in dict.fromkeys(run["method"] for run in runs):
            groups = [
                [r for r in runs if (r["method"], r["max_staleness_steps"]) == (method, age)]
                for age in ages
            ]
            lines.append(f"| `{method}` | {' | '.join(map(show, groups))} |")
        lines.append("")
    return "\n".join(lines)


def plot(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Final reward by staleness; and the curves of the oldest rollouts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (final, curves) = plt.subplots(1, 2, figsize=(11, 4))
    ages = sorted({run["max_staleness_steps"] for run in runs})
    for method in dict.fromkeys(run["method"] for run in runs):
        own = [run for run in runs if run["method"] == method]
        rewards = [[r["reward"] for r in own if r["max_staleness_steps"] == age] for age in ages]
        means = [statistics.fmean(x) for x in rewards]
        spreads = [statistics.stdev(x) if len(x) > 1 else 0.0 for x in rewards]
        final.errorbar(range(len(ages)), means, spreads, marker="o", capsize=3, label=method)
        oldest = [r["rewards"] for r in own if r["max_staleness_steps"] == ages[-1]]
        mean = [statistics.fmean(step) for step in zip(*oldest, strict=True)]
        smooth = [statistics.fmean(mean[max(0, i - 9) : i + 1]) for i in range(len(mean))]
        curves.plot(range(1, len(smooth) + 1), smooth, label=method)
    final.set_xticks(range(len(ages)), [str(age) for age in ages])
    final.set(xlabel="staleness, training steps", ylabel="reward, last 20 steps")
    curves.set(xlabel="step", ylabel="reward, ten steps", title=f"staleness {ages[-1]}")
    for axes in (final, curves):
        axes.grid(alpha=0.3)
        axes.set_ylim(0, 1)
    final.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--smoke", action="store_true", help="one short run each of two losses")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.methods, arguments.staleness, arguments.seeds = ["ppo", "log_linear"], [2], [1]
        arguments.steps = 4
    try:
        check_file("--json", arguments.json)
        check_file("--plot", arguments.plot)
    except ValueError as error:
        parser.error(str(error))
    runs: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        for age in arguments.staleness:
            for method in arguments.methods:
                runs.append(learn(method, age, seed, steps=arguments.steps, lr=arguments.lr))
                last = {k: v for k, v in runs[-1].items() if k != "rewards"}
                print(json.dumps(last), file=sys.stderr, flush=True)
                if arguments.json:
                    settings = {"steps": arguments.steps, "lr": arguments.lr, "methods": METHODS}
                    arguments.json.write_text(json.dumps({"settings": settings, "runs": runs}))
    print(tables(runs))
    if arguments.plot:
        plot(runs, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
