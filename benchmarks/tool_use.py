"""Does reinforcement learning teach a model to use its calculator?

    python -m benchmarks.tool_use [--json=tool_use.json] [--plot=docs/curves/calculator.png]

Claim: the table and the curve of docs/tool_use.md. After a short fine-tuning on demonstrations in
which the calculator is often left out, GRPO with the reward of the final answer alone makes the
policy call it; without the tool, or without the demonstrations, the same training does not.

For each seed configs/sft_calculator.py, then from its export configs/calculator_grpo.py as

    grpo               it is
    no_tool            generator.max_turns=1: the first response is the last, no result comes back
    no_demonstrations  from random weights

Scores are the share of right answers to 256 held-out expressions, one sample of each at temperature
1; calls and malformed turns are per conversation, of the last step's samples.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl import config as cfg
from jaxrl.files import check_file
from jaxrl.records.json_lines import read_lines
from jaxrl.sft import sft
from jaxrl.train import BasePPOExp

CONFIGS = Path(__file__).parent.parent / "configs"
MODEL = "trainer.policy.model"
ARMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "no_tool": {"generator.max_turns": 1, "generator.max_input_length": None},
    "no_demonstrations": {
        f"{MODEL}.path": str(CONFIGS / "tiny_tool_model"),
        f"{MODEL}.random_init": True,
    },
}
SMOKE = {
    "trainer.max_training_steps": 2,
    "trainer.train_batch_size": 16,
    "trainer.micro_train_batch_size_per_gpu": 2,
    "trainer.micro_forward_batch_size_per_gpu": 2,
    "trainer.eval_interval": 1,
    "trainer.eval_batch_size": 16,
}
SMOKE_GRPO = {"trainer.policy_mini_batch_size": 16, "generator.n_samples_per_prompt": 2}
NAMES = {  # of a step
    "reward": "reward/avg_raw_reward",
    "calls": "environment/calls",
    "malformed": "environment/malformed",
}


def load(recipe: str, changes: Mapping[str, Any], seed: int, folder: Path) -> Any:
    """A recipe of configs/ that writes into a folder."""
    return cfg.apply_overrides(
        cfg.load_config_file(str(CONFIGS / f"{recipe}.py")),
        {
            "trainer.seed": seed,
            "trainer.run_name": "run",
            "trainer.logger": "console",
            "trainer.ckpt_interval": -1,
            "trainer.log_path": str(folder),
            "trainer.ckpt_path": str(folder / "checkpoints"),
            "trainer.export_path": str(folder / "exports"),
            **changes,
        },
    )


def demonstrate(seed: int, folder: Path, *, smoke: bool = False) -> str:
    """Fine-tune; the folder of the policy."""
    config = load("sft_calculator", SMOKE if smoke else {}, seed, folder)
    steps = config.trainer.max_training_steps
    config.trainer.hf_save_interval = steps
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        sft(config)
    return str(folder / f"exports/global_step_{steps}/policy")


def learn(arm: str, seed: int, policy: str, *, smoke: bool) -> dict[str, Any]:
    """Train from a fine-tuned policy; scores on held-out expressions, and every step's rollouts."""
    started = time.perf_counter()
    changes = {
        f"{MODEL}.path": policy,
        "trainer.hf_save_interval": -1,
        "trainer.print_example_interval": -1,
        **(SMOKE | SMOKE_GRPO if smoke else {}),
        **ARMS[arm],
    }
    with tempfile.TemporaryDirectory() as folder:
        config = load("calculator_grpo", changes, seed, Path(folder))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            BasePPOExp(config).run()
        lines = read_lines(Path(folder) / "run" / "metrics.jsonl")
    score = "eval/all/avg_score"
    steps = [line for line in lines if NAMES["reward"] in line]
    return {
        **{"arm": arm, "seed": seed, "seconds": time.perf_counter() - started},
        "scores": {line["step"]: line[score] for line in lines if score in line},
        **{name: [line[key] for line in steps] for name, key in NAMES.items()},
    }


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line for each run, the scores by step."""
    steps = list(runs[0]["scores"])
    ends = "calls, first and last step", "malformed, first and last step"
    lines = ["| run | seed | " + " | ".join(f"step {step}" for step in steps)]
    lines[0] += f" | {' | '.join(ends)} |"
    lines.append("|---" * (len(steps) + 4) + "|")
    for run in runs:
        cells = [f"`{run['arm']}`", str(run["seed"])]
        cells += [f"{score:.2f}" for score in run["scores"].values()]
        cells += [f"{run[name][0]:.2f}, {run[name][-1]:.2f}" for name in ("calls", "malformed")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Held-out scores and calls by step: a colour for each arm, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (scores, calls) = plt.subplots(1, 2, figsize=(11, 4))
    colors = dict(zip(ARMS, ("tab:blue", "tab:red", "tab:gray"), strict=True))
    for arm, color in colors.items():
        for n, run in enumerate(run for run in runs if run["arm"] == arm):
            label = arm if n == 0 else None
            points = [(int(step), score) for step, score in run["scores"].items()]
            scores.plot(*zip(*points, strict=True), marker="o", ms=4, color=color, label=label)
            calls.plot(range(1, len(run["calls"]) + 1), run["calls"], color=color)
    scores.set(xlabel="step", ylabel="right answers, held out", ylim=(-0.02, 1.02))
    calls.set(xlabel="step", ylabel="calls per conversation")
    for axes in (scores, calls):
        axes.grid(alpha=0.3)
    scores.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--smoke", action="store_true", help="two steps of everything, one seed")
    arguments = parser.parse_args(argv)
    try:
        check_file("--json", arguments.json)
        check_file("--plot", arguments.plot)
    except ValueError as error:
        parser.error(str(error))
    runs: list[dict[str, Any]] = []
    for seed in arguments.seeds[:1] if arguments.smoke else arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            policy = demonstrate(seed, Path(folder), smoke=arguments.smoke)
            for arm in arguments.arms:
                runs.append(learn(arm, seed, policy, smoke=arguments.smoke))
                print(json.dumps(runs[-1]["scores"]), arm, seed, file=sys.stderr, flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps({"runs": runs}))
    print(table(runs))
    if arguments.plot:
        plot(runs, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
