"""Guessed tokens: what a decoding step costs with them, and what they bring at best.

    JAX_PLATFORMS=cpu python -m benchmarks.drafts [--shape=3m] [--rows 1 8 32] [--drafts 1 3 7]
    JAX_PLATFORMS=cpu python -m benchmarks.drafts --rows --tasks quickstart guess_number

Weights are random. Drawn at temperature 1 nothing comes again, and each step guesses in vain; drawn
greedily a row soon repeats itself, and nearly every guess is right. Real answers lie between. The
numbers of drafts go by turns; of three rounds the fastest counts. With `--tasks` recipes learn from
64 prompts, over and over, without guesses, with them, and with the answers of earlier epochs to
guess from: seconds of a step's sampling, tokens of a decoding step and reward, of the second and of
the last quarter.

Claim: the tokens are the same; where they are guessed, few rows gain most.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.shapes import SHAPES
from jaxrl.config import apply_overrides, load_config_file
from jaxrl.models.families import config_from_hf
from jaxrl.models.transformer import Params, TransformerConfig, init_params
from jaxrl.parallel import make_mesh
from jaxrl.records.json_lines import read_lines
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.train import BasePPOExp

PROMPT, DRAWN, ROUNDS = 32, 256, 3
CONFIGS = Path(__file__).parent.parent / "configs"


def measure(
    engines: Mapping[int, NativeEngine], rows: int, temperature: float, vocab: int
) -> tuple[dict[int, float], dict[int, float], int]:
    """Return by the number of drafts the seconds of a rollout, and tokens of a step; and of how
    many rows of all together the tokens are those without drafts."""
    draw, sampling = np.random.default_rng(0), Sampling(DRAWN, temperature=temperature)
    prompts = draw.integers(0, vocab, (rows, PROMPT)).tolist()
    asks = [Request(tuple(p), ((1, i),), sampling) for i, p in enumerate(prompts)]
    best, share, tokens = dict.fromkeys(engines, float("inf")), {}, {}
    for number in range(1 + ROUNDS):
        for drafts, engine in engines.items():
            start = time.perf_counter()
            found = [of_request[0] for of_request in engine.generate(asks)]
            if number:  # the first one compiles
                best[drafts] = min(best[drafts], time.perf_counter() - start)
            steps = sum(c.steps for c in found) or rows * DRAWN
            share[drafts] = sum(len(c.tokens) for c in found) / steps
            tokens[drafts] = [c.tokens for c in found]
    same = sum(a == b for x in tokens.values() for a, b in zip(x, tokens[0], strict=True))
    return best, share, same


_ENGINE = "generator.inference_engine"
WAYS: dict[str, dict[str, Any]] = {
    "no guesses": {},
    "3 guesses": {f"{_ENGINE}.speculative_tokens": 3},
    "3 guesses, history": {
        f"{_ENGINE}.speculative_tokens": 3,
        f"{_ENGINE}.speculative_history": 256,
    },
}
PROMPTS = {"quickstart": "sort_digits", "guess_number": "guess_number"}


def trained(task: str, settings: dict[str, Any], steps: int) -> str:
    """Train a recipe of `PROMPTS`; return what sampling took in its second and last quarter."""
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "data.train_data": [f"jaxrl.envs.toys.{PROMPTS[task]}:prompts(size=64, seed=0)"],
            **{f"trainer.{name}_interval": -1 for name in ("eval", "ckpt", "hf_save")},
            **{f"trainer.{name}_path": f"{folder}/{name}" for name in ("log", "ckpt", "export")},
            "trainer.print_example_interval": -1,
            "trainer.logger": "console",
            "trainer.run_name": "run",
            "trainer.max_training_steps": steps,
            "trainer.epochs": steps,
        }
        recipe = load_config_file(str(CONFIGS / f"{task}.py"))
        with contextlib.redirect_stdout(io.StringIO()):
            BasePPOExp(apply_overrides(recipe, {**changes, **settings})).run()
        lines: list[dict[str, Any]] = read_lines(Path(folder) / "log" / "run" / "metrics.jsonl")

    def median(name: str, quarter: int) -> float:
        part = lines[quarter * steps // 4 : (quarter + 1) * steps // 4]
        return statistics.median(line.get(name, 1.0) for line in part)

    return ", ".join(
        f"{median('timing/generate', quarter):.3f} s "
        f"({median('generate/tokens_per_decode_step', quarter):.2f}), "
        f"reward {median('reward/avg_raw_reward', quarter):.2f}"
        for quarter in (1, 3)
    )


def main() -> None:
    """Print seconds of a rollout, and tokens of a step, by rows, temperature and drafts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="3m", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, nargs="*", default=[1, 3, 7])
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=48)
    options = parser.parse_args()
    for task in options.tasks:
        for way, settings in WAYS.items():
            print(f"{task}, {way}: {trained(task, settings, options.steps)}", flush=True)
    model = config_from_hf(SHAPES[options.shape])
    params = init_params(model, 0)
    print(f"{options.shape}, {jax.devices()[0].device_kind}: seconds (tokens of a step)")
    for rows in options.rows:
        engines = {n: engine_of(model, params, rows, n) for n in (0, *options.drafts)}
        for temperature in (1.0, 0.0):
            best, share, same = measure(engines, rows, temperature, model.vocab_size)
            cells = (f"{n}: {best[n]:.2f} ({share[n]:.2f})" for n in engines)
            print(
                f"rows {rows}, temperature {temperature:g}: {', '.join(cells)}; "
                f"{same} of {rows * len(engines)} rows with the tokens of 0",
                flush=True,
            )


def engine_of(model: TransformerConfig, params: Params, rows: int, drafts: int) -> NativeEngine:
    """Return an engine with the weights, on one device."""
    mesh = make_mesh(devices=jax.devices()[:1])
    engine = NativeEngine(model, mesh, max_num_seqs=rows, speculative_tokens=drafts)
    engine.update_weights(params, 0)
    return engine


if __name__ == "__main__":
    main()
