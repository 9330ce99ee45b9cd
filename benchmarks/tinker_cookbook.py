"""Tinker's cookbook against our training service, beside `jaxrl.train` on the same task.

    python -m venv cookbook && cookbook/bin/pip install 'tinker-cookbook[math-rl]<0.6'
    JAX_PLATFORMS=cpu python -m benchmarks.tinker_cookbook --cookbook=cookbook/bin/python --out=DIR

The cookbook's recipe `math_rl` with its environment `arithmetic`, which needs no hub: sums of two
numbers from 0 to 100 behind one example, "User: What is 27 + 45?", reward 1 for the sum, -0.1
without the end that the renderer asks for. The base is a 130k-parameter model of single
characters, fine-tuned on the same texts by `jaxrl.sft` until it is right now and then. The recipe's
program runs as it is, by an interpreter of its own, since the cookbook wants other versions of
packages; it draws problems by the number of the step, so every run has the same.

Claim: docs/tinker.md. The recipe's curve of right answers, smoothed over ten steps, is one more
draw from what `jaxrl.train` has with the same loss, adapters, optimizer and problems: it lies
between the least and the most of five seeds at two thirds of the steps, as a sixth seed would. How
often it does is printed, and all curves are in DIR/curves.json and DIR/curves.png.
"""

import argparse
import json
import re
import shutil
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl import config as cfg
from jaxrl.config import load_config_file, to_train_config
from jaxrl.records.json_lines import read_lines
from jaxrl.sft import sft
from jaxrl.tools.tinker.build import make_server
from jaxrl.train import train

CONFIGS = Path(__file__).parent.parent / "configs"
END = "\n\nUser:"  # of an answer, as the cookbook's renderer `role_colon` has it
EXAMPLE = "User: What is 4 + 5?\n\nAssistant: 9\n\n"
GROUPS, SAMPLES, RANK, LR, LONGEST = 32, 8, 16, 1e-3, 12
SEEDS = (1, 2, 3, 4, 5)
SMOOTHED = 10  # steps


def problem(rng: np.random.RandomState) -> dict[str, Any]:
    """Return a row with a sum, drawn as the cookbook does."""
    x, y = rng.randint(0, 101), rng.randint(0, 101)
    return {
        "prompt": f"{EXAMPLE}User: What is {x} + {y}?\n\nAssistant:",
        "completion": f" {x + y}{END}",
        "data_source": "arithmetic",
        "reward_spec": {"method": "rule", "ground_truth": str(x + y)},
    }


def cookbook_problems(steps: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of all steps: those of a step follow from its number."""
    for step in range(steps):
        rng = np.random.RandomState(step)
        yield from (problem(rng) for _ in range(GROUPS))


def other_problems(size: int) -> Iterator[dict[str, Any]]:
    """Yield rows to be fine-tuned on."""
    rng = np.random.RandomState(12_345)
    yield from (problem(rng) for _ in range(size))


def right(action: str, extras: Mapping[str, Any]) -> float:
    """Return 1 if the last number of an answer is the sum."""
    numbers = re.findall(r"-?\d+", action.partition(END)[0].replace(",", ""))
    answer = extras["reward_spec"]["ground_truth"]
    return float(bool(numbers) and int(numbers[-1]) == int(answer))


def unended(action: str) -> float:
    """Return 1 for an answer without its end."""
    return float(not action.endswith(END))


def write_base(folder: Path) -> None:
    """Write the model of configs/quickstart.py with all characters, and a head of its own."""
    source = CONFIGS / "tiny_char_model"
    folder.mkdir(parents=True, exist_ok=True)
    characters = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    vocabulary = {c: i for i, c in enumerate([*characters, "<eos>", "<pad>", "<unk>"])}
    ids = {"eos_token_id": vocabulary["<eos>"], "pad_token_id": vocabulary["<pad>"]}
    changes: dict[str, dict[str, Any]] = {
        "config.json": {"vocab_size": len(vocabulary), "tie_word_embeddings": False} | ids,
        "generation_config.json": ids,
        "tokenizer_config.json": {
            "chat_template": "{%- for m in messages %}{{- m['content'] }}{%- endfor %}"
        },
        "tokenizer.json": {},
    }
    for name, new in changes.items():
        found = json.loads((source / name).read_text()) | new
        if name == "tokenizer.json":
            found["model"]["vocab"] = vocabulary
            for token in found["added_tokens"]:
                token["id"] = vocabulary[token["content"]]
        (folder / name).write_text(json.dumps(found))


def fine_tune(out: Path, base: Path, steps: int) -> Path:
    """Teach the base what an answer looks like; return the folder of what becomes of it."""
    exported = out / "sft" / "exports" / f"global_step_{steps}" / "policy"
    if exported.exists():
        return exported
    config = to_train_config(load_config_file(str(CONFIGS / "sft_addition.py")))
    changes = {
        "data.train_data": [f"benchmarks.tinker_cookbook:other_problems(size={steps * 256})"],
        "data.val_data": [],
        "trainer.policy.model.path": str(base),
        "trainer.max_training_steps": steps,
        "trainer.train_batch_size": 256,
        "trainer.micro_train_batch_size_per_gpu": 256,
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": steps,
        "trainer.logger": "console",
        "trainer.log_path": str(out / "sft"),
        "trainer.ckpt_path": str(out / "sft" / "checkpoints"),
        "trainer.export_path": str(out / "sft" / "exports"),
    }
    sft(cfg.apply_overrides(config, changes))
    return exported


def by_jaxrl(out: Path, base: Path, steps: int, seed: int) -> list[float]:
    """Return the share of right answers at each step of `jaxrl.train`."""
    folder = out / f"jaxrl_{seed}"
    if len(curve(folder, "reward/right/mean")) < steps:
        shutil.rmtree(folder, ignore_errors=True)
        config = to_train_config(load_config_file(str(CONFIGS / "addition_grpo.py")))
        own = [f"benchmarks.tinker_cookbook:{f}" for f in ("right", "unended")]
        changes = {
            "data.train_data": [f"benchmarks.tinker_cookbook:cookbook_problems(steps={steps})"],
            "data.val_data": [],
            "data.shuffle": False,
            "environment.reward_functions": own,
            "environment.reward_weights": {"environment": 0.0, "right": 1.0, "unended": -0.1},
            "trainer.seed": seed,
            "trainer.policy.model.path": str(base),
            "trainer.policy.model.lora.rank": RANK,
            "trainer.policy.model.lora.alpha": 32,
            "trainer.policy.model.lora.target_modules": ["all-linear", "lm_head"],
            "trainer.policy.optimizer_config.lr": LR,
            "trainer.policy.optimizer_config.num_warmup_steps": 0,
            "trainer.policy.optimizer_config.adam_betas": [0.9, 0.95],
            "trainer.policy.optimizer_config.max_grad_norm": 1e9,
            "trainer.algorithm.policy_loss_type": "importance_sampling",
            "trainer.algorithm.old_log_probs": "rollout",
            "trainer.algorithm.grpo_norm_by_std": False,
            "trainer.epochs": 1,
            "trainer.max_training_steps": steps,
            "trainer.train_batch_size": GROUPS,
            "trainer.policy_mini_batch_size": GROUPS,
            "trainer.max_prompt_length": 80,
            "trainer.eval_interval": -1,
            "trainer.eval_before_train": False,
            "trainer.ckpt_interval": -1,
            "trainer.print_example_interval": -1,
            "trainer.logger": "console",
            "trainer.log_path": str(folder / "run"),
            "generator.n_samples_per_prompt": SAMPLES,
            "generator.sampling_params.max_generate_length": LONGEST,
            "generator.sampling_params.stop": [END],
        }
        train(cfg.apply_overrides(config, changes))
    return curve(folder, "reward/right/mean")


def by_cookbook(python: str, out: Path, base: Path, steps: int, number: int) -> list[float]:
    """Return the share of right answers at each step of the cookbook's program at our service."""
    folder = out / f"cookbook_{number}"
    if len(curve(folder, "env/all/correct")) < steps:
        for begun in (folder, out / f"service_{number}"):
            shutil.rmtree(begun, ignore_errors=True)
        config = to_train_config(load_config_file(str(CONFIGS / "quickstart.py")))
        changes = {
            "trainer.policy.model.path": str(base),
            "trainer.policy.model.random_init": False,
            "trainer.logger": "console",
            "tinker.root": str(out / f"service_{number}"),
            "tinker.max_rank": RANK,
            "tinker.max_waiting": 4 * GROUPS,
            "tinker.row_tokens": 256,
            "tinker.samplers": 2,
            "serve.max_num_seqs": 256,
            "serve.max_model_len": 128,
            "generator.inference_engine.served_model_name": str(base),
            "generator.inference_engine.http_endpoint_port": 0,
        }
        server = make_server(cfg.apply_overrides(config, changes))
        server.start()
        try:
            settings = {
                "base_url": server.url,
                "model_name": base,
                "renderer_name": "role_colon",
                "env": "arithmetic",
                "groups_per_batch": GROUPS,
                "group_size": SAMPLES,
                "learning_rate": LR,
                "lora_rank": RANK,
                "max_tokens": LONGEST,
                "max_steps": steps,
                "eval_every": 0,
                "log_path": folder,
            }
            named = [f"{name}={value}" for name, value in settings.items()]
            command = [python, "-m", "tinker_cookbook.recipes.math_rl.train", *named]
            given = {"TINKER_API_KEY": "tml-of-the-benchmark", "HF_HUB_OFFLINE": "1"}
            subprocess.run(command, check=True, env=given)
        finally:
            server.stop()
    return curve(folder, "env/all/correct")


def curve(folder: Path, name: str) -> list[float]:
    """Return a metric of each step of a run; [] where there is none."""
    found = [row for path in folder.rglob("metrics.jsonl") for row in read_lines(path)]
    return [row[name] for row in found if name in row]


def smooth(curves: np.ndarray) -> np.ndarray:
    """Return means of neighbouring steps."""
    window = np.ones(SMOOTHED) / SMOOTHED
    return np.array([np.convolve(one, window, mode="valid") for one in curves])


def picture(path: Path, ours: np.ndarray, theirs: np.ndarray) -> None:
    """Draw the range of our seeds and the cookbook's curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    at = np.arange(ours.shape[1]) + SMOOTHED
    axes.fill_between(at, ours.min(0), ours.max(0), alpha=0.3, label="jaxrl.train, five seeds")
    for number, curve in enumerate(theirs):
        axes.plot(at, curve, color="C1", label="cookbook" if number == 0 else None)
    axes.set_xlabel("step")
    axes.set_ylabel("share of right answers")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not there yet, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cookbook", required=True, help="interpreter that has tinker-cookbook")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sft_steps", type=int, default=300)
    parser.add_argument("--runs", type=int, default=2, help="of the cookbook")
    options = parser.parse_args(argv)
    out, steps = options.out.absolute(), options.steps
    write_base(out / "base")
    base = fine_tune(out, out / "base", options.sft_steps)
    found = {
        "cookbook": [
            by_cookbook(options.cookbook, out, base, steps, number)
            for number in range(options.runs)
        ],
        "jaxrl": [by_jaxrl(out, base, steps, seed) for seed in SEEDS],
    }
    (out / "curves.json").write_text(json.dumps(found))
    for name, curves in found.items():
        print(f"{name}: all steps {np.mean(curves, axis=1).round(3).tolist()}", end=", ")
        print(f"last {SMOOTHED} {np.array(curves)[:, -SMOOTHED:].mean(1).round(3).tolist()}")
    theirs, ours = (smooth(np.array(curves)) for curves in found.values())
    inside = (ours.min(0) <= theirs) & (theirs <= ours.max(0))
    print(f"within the range of the five seeds at {inside.mean(1).round(2).tolist()} of the steps")
    picture(out / "curves.png", ours, theirs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
