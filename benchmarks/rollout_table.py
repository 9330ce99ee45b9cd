"""A rollout beside a peer, with each feature of the engine on and off, in one table.

    python -m benchmarks.rollout_table [--shape=3m] [--temperature=0] [--ways plain int8]
    python -m benchmarks.rollout_table --vllm-url=http://127.0.0.1:8001 --vllm-model=NAME

The requests of `rollout.py`: groups of 8 samples of a prompt, prompts of 16-200 tokens, limits of
16-128. transformers' `generate` has the same weights, in batches sorted by limit; vLLM, where a
server runs, those it was started with, which may be of the same shape alone: `python -m
benchmarks.shapes 3m FOLDER`, then `vllm serve FOLDER --load-format=dummy --skip-tokenizer-init
--no-enable-prefix-caching`. Weights are random: at temperature 1 guesses are in vain, greedily a
row repeats itself. All go by turns, each with nothing in its cache; of some rounds the fastest
counts. Two engines have half the slots each. Steps are counted in a run more; of two engines the
one with more steps counts.

Claim: the engine is faster than transformers, and with lending two engines take fewer steps.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import roofline
from benchmarks.grpo_step import skewed_lengths
from benchmarks.rollout import (
    Tokens,
    Work,
    engine_generate,
    make_work,
    transformers_generate,
    vllm_generate,
)
from benchmarks.shapes import SHAPES, transformer_config
from jaxrl.models.exact import choose_tiles
from jaxrl.models.export import save_pretrained
from jaxrl.models.transformer import Params, TransformerConfig, init_params
from jaxrl.parallel import engine_meshes
from jaxrl.rollout.native.balancer import Balancer
from jaxrl.rollout.native.engine import NativeEngine

PEER, PLAIN, APART = "transformers", "plain", "two engines, no lending"
# shrink=False: blocks of all rows, whatever is live; two engines of one CPU device each lend so.
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "prefix caching": {"enable_prefix_caching": True},
    "3 guesses": {"speculative_tokens": 3},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "fp8 pages": {"kv_cache_dtype": "fp8"},
    "exact": {},
    "all rows": {"shrink": False},
    "two engines": {"shrink": False},
    APART: {"shrink": False},
}
SECONDS = 5.0  # a server has to say which model it has


class Counted:
    """Count the steps of an engine's blocks."""

    def __init__(self, engine: NativeEngine) -> None:
        self.steps, self._programs, self._decode = 0, engine.programs, engine.programs.decode
        engine.programs.decode = self._run  # type: ignore[method-assign]

    def _run(self, rows: Any, *others: Any) -> Any:
        after, block = self._decode(rows, *others)
        of_row = block.steps if rows.features.drafts else block.count
        self.steps += int((rows.start + np.asarray(of_row)).max())
        return after, block

    def end(self) -> int:
        """Count no more; return the steps."""
        self._programs.decode = self._decode  # type: ignore[method-assign]
        return self.steps


def engines_of(
    way: str, model: TransformerConfig, params: Params, slots: int, block: int
) -> list[NativeEngine]:
    """Return the engines of a way, without weights."""
    count = 2 if way.startswith("two") else 1
    options = {"max_num_seqs": slots // count, "steps_per_dispatch": block, **WAYS[way]}
    if way == "exact":
        options["tiles"] = choose_tiles("log_probs", "cpu", tokens=None, parts=1, rows=slots)
    meshes = engine_meshes(jax.devices()[:count], count, 1)
    return [NativeEngine(model, mesh, **options) for mesh in meshes]


def check_server(url: str) -> None:
    """Refuse a server that does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=SECONDS):
            return
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"--vllm-url={url} does not answer: {error}; start the server, or leave it out"
        ) from None


def measure(
    calls: dict[str, Callable[[float], Tokens]],
    forget: Callable[[str], None],
    temperature: float,
    rounds: int,
) -> dict[str, float]:
    """Return the least seconds of each, by turns.

    Args:
        forget: empties the cache of one.
    """
    best = dict.fromkeys(calls, float("inf"))
    for number in range(1 + rounds):
        for name, call in calls.items():
            forget(name)
            start = time.perf_counter()
            call(temperature)
            if number:  # the first one compiles
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def peer_steps(work: Work, batch: int) -> int:
    """Return the steps of batches that are sorted by limit, each run to its longest."""
    limits = sorted(limit for limit in work.limits for _ in range(work.group))
    return sum(max(limits[i : i + batch]) for i in range(0, len(limits), batch))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, and print the table."""
    model = transformer_config(arguments.shape)
    params, load = init_params(model, 0), roofline.machine_load()
    work = make_work(model, arguments.requests, arguments.group, smoke=arguments.smoke)
    if arguments.skewed:
        limits = skewed_lengths(len(work.prompts), max(work.limits))
        order = np.random.default_rng(arguments.seed).permutation(len(limits))
        work = dataclasses.replace(work, limits=[limits[i] for i in order])
    slots = min(arguments.slots, len(work.prompts) * work.group)
    ways = [way for way in arguments.ways if len(jax.devices()) > 1 or not way.startswith("two")]
    engines = {way: engines_of(way, model, params, slots, arguments.block) for way in ways}
    calls: dict[str, Callable[[float], Tokens]] = {}
    steps: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("torch") and not arguments.no_peer:
            import torch

            torch.set_num_threads(arguments.torch_threads or os.cpu_count() or 1)
            save_pretrained(Path(folder) / "model", model, params)
            calls[PEER] = transformers_generate(Path(folder) / "model", work, arguments.batch)
            steps[PEER] = peer_steps(work, arguments.batch)
    if arguments.vllm_url:
        calls["vLLM"] = vllm_generate(arguments.vllm_url, arguments.vllm_model, work)
    for way, parts in engines.items():
        whole = parts[0] if len(parts) == 1 else Balancer(parts)
        if way == APART:
            for engine in parts:
                engine.offer = None
        calls[way] = engine_generate(whole, work)

    def forget(name: str) -> None:
        for engine in engines.get(name, ()):
            engine.update_weights(params, 0)

    best = measure(calls, forget, arguments.temperature, arguments.rounds)
    for way, parts in engines.items():
        forget(way)
        counted = [Counted(engine) for engine in parts]
        calls[way](arguments.temperature)
        steps[way] = max(count.end() for count in counted)
    print(
        f"{arguments.shape}, {jax.devices()[0].device_kind}, float32, temperature "
        f"{arguments.temperature:g}: {work.tokens} tokens of {len(work.prompts)} groups of "
        f"{work.group}, {slots} slots, load {load}\n"
    )
    print("| | seconds | tokens/s | times plain | steps | tokens of a step |")
    print("|---" * 6 + "|")
    rows = []
    for name, seconds in best.items():
        row = {"way": name, "seconds": seconds, "tokens_per_second": work.tokens / seconds}
        row |= {"times_plain": seconds / best[PLAIN], "steps": steps.get(name)}
        rows.append(row)
        of_step = f"{steps[name]} | {work.tokens / steps[name]:.1f}" if name in steps else " | "
        print(
            f"| {name} | {seconds:.2f} | {row['tokens_per_second']:.0f} | "
            f"{row['times_plain']:.2f} | {of_step} |"
        )
    return {"rows": rows, "tokens": work.tokens, "load": load}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="3m", choices=list(SHAPES))
    parser.add_argument("--requests", type=int, default=128, help="samples in all")
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--skewed", action="store_true", help="few long answers, many short ones")
    parser.add_argument("--seed", type=int, default=0, help="of their order")
    parser.add_argument("--slots", type=int, default=32, help="of our engine")
    parser.add_argument("--block", type=int, default=16, help="decode steps per dispatch")
    parser.add_argument("--batch", type=int, default=32, help="rows of transformers")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--torch-threads", type=int, help="fewer where other work runs")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--vllm-url", help="of a vLLM server with a model of that shape")
    parser.add_argument("--vllm-model", default="model", help="its name there")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, few tokens")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.shape, arguments.requests, arguments.group = "smoke", 8, 2
        arguments.slots, arguments.rounds, arguments.block = 4, 1, 2
    arguments.ways = [PLAIN, *(way for way in arguments.ways if way != PLAIN)]
    if arguments.vllm_url:
        check_server(arguments.vllm_url)
    result = run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 2)  # for two engines
    raise SystemExit(main())
