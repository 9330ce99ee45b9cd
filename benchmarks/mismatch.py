"""What a gap between sampler and trainer does to a training run, and what closes it.

    JAX_PLATFORMS=cpu python -m benchmarks.mismatch [--seeds 1 2 3] [--steps=80] [--ways exact int8]

The quickstart, with trainer and engine in bfloat16: as it is; with the truncated importance weights
of each token that are the field's answer to samplers that are not the trainer; in the exact mode,
of which some rows are scored all the same; and, with the same correction, with the engine's weights
in 8 bits. A run is its reward over the last quarter of the steps and greedy on held-out strings,
how far the log-probs of sampler and trainer are apart, the share of tokens whose ratio is beyond
the clip, and the seconds of a step.

Claim: the two are 0 apart in the exact mode. Whether that is seen in the rewards is the question.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
from pathlib import Path
from typing import Any

from jaxrl.config import TrainConfig, load_config_file, to_train_config
from jaxrl.models.linear import EIGHT_BITS
from jaxrl.records.json_lines import read_lines
from jaxrl.train import BasePPOExp

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.py"
APART = "policy/rollout_train_logprobs_abs_diff"
CHECKED_ROWS = 64
WAYS = ("ordinary", "corrected", "exact", "int8", "fp8")


def config_of(way: str, seed: int, steps: int, folder: Path) -> TrainConfig:
    """Return the config of a run."""
    config = load_config_file(str(QUICKSTART))
    trainer = config.trainer
    trainer.bf16, trainer.seed, trainer.run_name = True, seed, "run"
    config.generator.inference_engine.model_dtype = "bfloat16"
    trainer.max_training_steps = trainer.eval_interval = steps
    trainer.eval_before_train = False
    trainer.ckpt_interval = trainer.hf_save_interval = trainer.print_example_interval = -1
    trainer.logger, trainer.log_path = "console", str(folder)
    trainer.ckpt_path, trainer.export_path = str(folder / "checkpoints"), str(folder / "exports")
    if way == "exact":
        trainer.exact, trainer.exact_checked_rows = "log_probs", CHECKED_ROWS
    elif way != "ordinary":
        trainer.algorithm.off_policy_correction.tis_ratio_type = "token"
    if way in EIGHT_BITS:
        config.generator.inference_engine.quantization = way
    return to_train_config(config)


def learn(way: str, seed: int, steps: int) -> dict[str, float]:
    """Train once; return what the table says of it."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            BasePPOExp(config_of(way, seed, steps, Path(folder))).run()
        lines: list[dict[str, Any]] = list(read_lines(Path(folder) / "run" / "metrics.jsonl"))

    def mean(name: str, *, of: int = 0) -> float:
        return statistics.fmean(line[name] for line in lines[of:])

    ends = ("policy/clip_fraction_low", "policy/clip_fraction_high")
    return {
        "reward": mean("reward/avg_raw_reward", of=-(steps // 4)),
        "greedy": lines[-1]["eval/all/avg_score"],
        "apart": mean(f"{APART}_mean"),
        "at most": max(line[f"{APART}_max"] for line in lines),
        "beyond clip": sum(mean(name) for name in ends),
        "s / step": statistics.median(line["timing/step"] for line in lines),
    }


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    options = parser.parse_args()
    header = False
    for seed in options.seeds:
        for way in options.ways:
            found = learn(way, seed, options.steps)
            if not header:
                print("| seed | way |", " | ".join(found), "|")
                print("|---" * (2 + len(found)) + "|")
                header = True
            numbers = " | ".join(f"{x:.4g}" for x in found.values())
            print(f"| {seed} | {way} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
