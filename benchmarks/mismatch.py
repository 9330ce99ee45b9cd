"""What a gap between sampler and trainer does to a training run, and what closes it.

    JAX_PLATFORMS=cpu python -m benchmarks.mismatch [--seeds 1 2 3] [--steps=80] [--ways exact int8]

The quickstart, with trainer and engine in bfloat16: as it is; with the truncated importance weights
of each token that are the field's answer to samplers that are not the trainer; in the exact mode,
of which some rows are scored all the same; and with the engine's weights, or its keys and values,
in 8 bits, with the same correction, and alone, without it. A run is its reward over the last
quarter of the steps and greedy on held-out strings, how far the log-probs of sampler and trainer
are apart, the share of tokens whose ratio is beyond the clip, and the seconds of a step.

Claim: the two are 0 apart in the exact mode. Whether that is seen in the rewards is the question.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from jaxrl.config import TrainConfig, load_config_file, to_train_config
from jaxrl.models.linear import EIGHT_BITS
from jaxrl.records.json_lines import read_lines
from jaxrl.train import BasePPOExp

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.py"
APART = "policy/rollout_train_logprobs_abs_diff"
CHECKED_ROWS = 64
ALONE = "-alone"
PAGES = "fp8-pages"
WAYS = (
    *("ordinary", "corrected", "exact"),
    *(f"{kind}{end}" for kind in EIGHT_BITS for end in ("", ALONE)),
    PAGES,
)


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
    elif way != "ordinary" and not way.endswith(ALONE):
        trainer.algorithm.off_policy_correction.tis_ratio_type = "token"
    if (kind := way.removesuffix(ALONE)) in EIGHT_BITS:
        config.generator.inference_engine.quantization = kind
    if way == PAGES:
        config.generator.inference_engine.kv_cache_dtype = "fp8"
    return to_train_config(config)


def unchecked() -> contextlib.AbstractContextManager[object]:
    """Let a config pass that samples in 8 bits and does not correct for it.

    A config is refused there. What the correction is for is seen only in a run without it.
    """
    return mock.patch("jaxrl.config.validation._check_eight_bits")


def learn(way: str, seed: int, steps: int) -> dict[str, float]:
    """Train once; return what the table says of it."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            config = config_of(way, seed, steps, Path(folder))
            with unchecked() if way.endswith(ALONE) else contextlib.nullcontext():
                experiment = BasePPOExp(config)
            experiment.run()
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
