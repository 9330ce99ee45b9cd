"""How long a step waits for its longest answers, and what shortens that.

    JAX_PLATFORMS=cpu python -m benchmarks.tail [--rounds=3] [--steps=12]

First the engine alone: as many answers as four times its slots, of lengths with a long tail, begun
in the order of the data or the longest first, as `generator.longest_first` does where lengths are
known. Then whole runs with untrained weights, whose answers end at a token in about forty: as it is
and with `generator.partial_rollouts`. A run is the seconds and the tokens of a step's sampling, and
the share of trained tokens that are of older policies.

Claim: begun the longest first, the same tokens take less time; where slots are few, fewer blocks of
decode steps.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.mismatch import QUICKSTART
from jaxrl.config import apply_overrides, load_config_file
from jaxrl.models import init_params
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel import make_mesh
from jaxrl.records.json_lines import read_lines
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.train import BasePPOExp

MODEL = TransformerConfig(
    vocab_size=1024,
    hidden_size=192,
    intermediate_size=512,
    num_layers=6,
    num_heads=6,
    num_kv_heads=3,
    head_dim=32,
)
RUN = {
    "trainer.algorithm.old_log_probs": "rollout",
    "trainer.train_batch_size": 8,
    "trainer.policy_mini_batch_size": 8,
    "trainer.eval_interval": -1,
    "trainer.ckpt_interval": -1,
    "trainer.hf_save_interval": -1,
    "trainer.print_example_interval": -1,
    "trainer.logger": "console",
    "trainer.run_name": "run",
    "generator.n_samples_per_prompt": 4,
    "generator.sampling_params.max_generate_length": 256,
    "trainer.algorithm.max_seq_len": 264,
}
WAYS: dict[str, dict[str, Any]] = {
    "waits for all": {},
    **{
        f"carries, 96 tokens, {extra} more groups": {
            "generator.partial_rollouts.max_tokens_per_step": 96,
            "generator.partial_rollouts.extra_prompts": extra,
        }
        for extra in (2, 4, 8)
    },
}


def order(
    slots: int, rounds: int, model: TransformerConfig = MODEL
) -> dict[str, tuple[float, int]]:
    """Return what the same answers take in the order of the data, and the longest first.

    That is seconds, and blocks of decode steps.
    """
    engine = NativeEngine(model, make_mesh(devices=jax.devices()[:1]), max_num_seqs=slots)
    engine.update_weights(init_params(model, 0), 0)
    decode, blocks = engine.programs.decode, [0]

    def counted(*given: Any) -> Any:
        blocks[0] += 1
        return decode(*given)

    engine.programs.decode = counted  # type: ignore[method-assign]
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.pareto(1.2, 4 * slots) * 24, 8, 512).astype(int).tolist()
    asked = [Request((1, 2, 3), ((0, i),), Sampling(n)) for i, n in enumerate(lengths)]
    ways = {
        "order of the data": asked,
        "longest first": sorted(asked, key=lambda r: -r.sampling.max_tokens),
    }
    found = {way: (float("inf"), 0) for way in ways}
    for _ in range(rounds + 1):  # the first one compiles
        for way, requests in ways.items():
            begun, blocks[0] = time.perf_counter(), 0
            engine.generate(requests)
            found[way] = min(found[way][0], time.perf_counter() - begun), blocks[0]
    return found


def run(way: dict[str, Any], steps: int) -> dict[str, float]:
    """Train; return what sampling took, and how old its tokens were."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {f"trainer.{name}_path": f"{folder}/{name}" for name in ("ckpt", "export")}
        settings = {**RUN, **paths, "trainer.log_path": folder, **way}
        config = apply_overrides(
            load_config_file(str(QUICKSTART)), {**settings, "trainer.max_training_steps": steps}
        )
        with contextlib.redirect_stdout(io.StringIO()):
            BasePPOExp(config).run()
        lines: list[dict[str, Any]] = read_lines(Path(folder) / "run" / "metrics.jsonl")[2:-2]
    seconds = [line["timing/generate"] for line in lines]
    return {
        "s": statistics.median(seconds),
        "tokens": statistics.fmean(line["generate/sampled_tokens"] for line in lines),
        "tokens / s": sum(line["generate/sampled_tokens"] for line in lines) / sum(seconds),
        "longest": max(line["generate/max_num_tokens"] for line in lines),
        "older": statistics.fmean(line.get("generate/carried_tokens", 0.0) for line in lines),
    }


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    for way, (seconds, blocks) in order(options.slots, options.rounds).items():
        print(f"{way}: {seconds:.2f} s, {blocks} blocks")
    for way, settings in WAYS.items():
        found = run(settings, options.steps)
        print(f"{way}:", ", ".join(f"{name} {x:.3g}" for name, x in found.items()), flush=True)


if __name__ == "__main__":
    main()
