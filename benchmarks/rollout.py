"""A mixed batch of requests, by our engine and by `generate` of transformers.

    python -m benchmarks.rollout [--model=models/smollm2-135m-instruct] [--json=FILE]
    python -m benchmarks.rollout --device=gpu --shape=qwen2.5-1.5b --requests=256

Claim: none measured yet. The aim: 64 requests on SmolLM2-135M (float32; groups of 8 samples of a
prompt, prompts of 16-200 tokens, limits of 16-128 tokens) take the engine at most half the time of
transformers' padded batches on the same CPU, and greedy tokens are the same.

transformers gets the requests sorted by limit, in left-padded batches of `--batch` rows, each run
to the longest limit in it; that is how its `generate` is used without a server. Both are kept to
the limits. Only wanted tokens count. The bound of a step is the larger of bytes (weights, filled
keys and values) over the measured bandwidth and FLOPs over the measured rate of matrix products;
the bound of the run adds up those of the steps that a schedule without waiting would take, and the
prefill of every prompt once. Without --model our engine runs alone, on random weights.
"""

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import roofline
from benchmarks.shapes import SHAPES, transformer_config
from jaxrl.models import hf
from jaxrl.models.transformer import TransformerConfig, init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling

MODES = {"greedy": 0.0, "sampled": 1.0}  # temperature
Tokens = list[list[int]]  # of each sample


@dataclass(frozen=True)
class Work:
    """The requests: one prompt and one limit per group."""

    prompts: list[list[int]]
    limits: list[int]
    group: int

    @property
    def tokens(self) -> int:
        """Tokens to generate."""
        return self.group * sum(self.limits)


def make_work(model: TransformerConfig, requests: int, group: int, *, smoke: bool) -> Work:
    """Prompts and limits drawn evenly from their ranges."""
    rng = np.random.default_rng(0)
    number = max(requests // group, 1)
    shortest, longest, least, most = (4, 12, 2, 6) if smoke else (16, 200, 16, 128)
    lengths = rng.integers(shortest, longest + 1, number)
    limits = rng.integers(least, most + 1, number).tolist()
    prompts = [rng.integers(3, model.vocab_size, n).tolist() for n in lengths]
    return Work(prompts, limits, group)


def engine_generate(engine: NativeEngine, work: Work) -> Callable[[float], Tokens]:
    """All requests at once to our engine."""

    def generate(temperature: float) -> Tokens:
        requests = [
            Request(
                tuple(prompt),
                tuple((number, i) for i in range(work.group)),
                Sampling(max_tokens=limit, temperature=temperature),
            )
            for number, (prompt, limit) in enumerate(zip(work.prompts, work.limits, strict=True))
        ]
        return [c.tokens for samples in engine.generate(requests) for c in samples]

    return generate


def transformers_generate(folder: Path, work: Work, batch: int) -> Callable[[float], Tokens]:
    """Left-padded batches of requests with similar limits, through transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [
        (limit, number * work.group + i, prompt)
        for number, (prompt, limit) in enumerate(zip(work.prompts, work.limits, strict=True))
        for i in range(work.group)
    ]
    rows.sort(key=lambda row: row[0])

    def generate(temperature: float) -> Tokens:
        out: Tokens = [[] for _ in rows]
        options = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        for first in range(0, len(rows), batch):
            part = rows[first : first + batch]
            width = max(len(prompt) for _, _, prompt in part)
            pads = [width - len(prompt) for _, _, prompt in part]
            ids = torch.tensor([[0] * n + p for n, (_, _, p) in zip(pads, part, strict=True)])
            mask = torch.tensor([[0] * n + [1] * (width - n) for n in pads])
            limit = part[-1][0]
            tokens = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=bool(temperature),
                min_new_tokens=limit,
                max_new_tokens=limit,
                pad_token_id=0,
                **options,
            )
            for (own, row, _), drawn in zip(part, tokens[:, width:].tolist(), strict=True):
                out[row] = drawn[:own]
        return out

    return generate


def bound_seconds(model: TransformerConfig, work: Work, rates: roofline.Rates, size: int) -> float:
    """Least seconds: every prompt prefilled once, every step with all rows that have one left."""
    flops = sum(roofline.layers_flops(model, 0, len(p)) for p in work.prompts)
    seconds = flops / rates.matmul_flops
    for step in range(max(work.limits)):
        live = [len(p) + step for p, n in zip(work.prompts, work.limits, strict=True) if n > step]
        rows, context = len(live) * work.group, statistics.mean(live)
        seconds += roofline.decode_step_bound(model, rates, rows, context, size)
    return seconds


def measure(
    systems: dict[str, Callable[[float], Tokens]], work: Work, repeats: int
) -> tuple[list[dict[str, Any]], dict[str, Tokens]]:
    """Medians over turns of the systems, and what each drew greedily."""
    times: dict[tuple[str, str], list[float]] = {}
    greedy: dict[str, Tokens] = {}
    for repeat in range(-1, repeats):  # the first compiles
        for mode, temperature in MODES.items():
            for name, generate in systems.items():
                start = time.perf_counter()
                tokens = generate(temperature)
                if repeat >= 0:
                    times.setdefault((name, mode), []).append(time.perf_counter() - start)
                if mode == "greedy":
                    greedy[name] = tokens
    rows = [
        {
            "system": name,
            "sampling": mode,
            "seconds": statistics.median(column),
            "tokens_per_second": work.tokens / statistics.median(column),
        }
        for (name, mode), column in times.items()
    ]
    return rows, greedy


def same_tokens(greedy: dict[str, Tokens]) -> float | None:
    """Share of greedy tokens that agree up to the first difference of each sample."""
    if len(greedy) < 2:
        return None
    ours, theirs = greedy.values()
    agree = total = 0
    for a, b in zip(ours, theirs, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        agree, total = agree + first, total + len(a)
    return agree / total


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure on a model folder, or on random weights."""
    gpu, folder = arguments.device == "gpu", arguments.model
    dtype = jnp.bfloat16 if gpu else jnp.float32
    model = hf.load_config(folder) if folder else transformer_config(arguments.shape)
    params = hf.load_params(folder, model) if folder else init_params(model, 0)
    rates = roofline.measure_rates(dtype, smoke=arguments.smoke)
    work = make_work(model, arguments.requests, arguments.group, smoke=arguments.smoke)
    slots = min(arguments.slots, len(work.prompts) * work.group)
    options: dict[str, Any] = {"max_num_seqs": slots, "steps_per_dispatch": arguments.block}
    engine = NativeEngine(model, make_mesh(devices=jax.devices()[:1]), dtype=dtype, **options)
    engine.update_weights(params, 0)
    systems = {"jaxrl": engine_generate(engine, work)}
    if folder and not gpu and importlib.util.find_spec("torch"):
        systems["transformers"] = transformers_generate(folder, work, arguments.batch)
    load = roofline.machine_load()
    rows, greedy = measure(systems, work, arguments.repeats)
    bound = bound_seconds(model, work, rates, jnp.dtype(dtype).itemsize)
    print(
        f"{work.tokens} tokens; {rates.matmul_flops / 1e9:.0f} GFLOP/s, "
        f"{rates.bandwidth / 1e9:.1f} GB/s, load {load}; {engine.describe()}"
    )
    print(f"bound {bound:.2f} s; greedy tokens alike: {same_tokens(greedy)}")
    for row in rows:
        row["of_bound"] = bound / row["seconds"]
        print(
            f"{row['system']:<14}{row['sampling']:<9}{row['seconds']:>8.2f} s"
            f"{row['tokens_per_second']:>9.1f} tokens/s{100 * row['of_bound']:>6.0f} % of the bound"
        )
    return {"rows": rows, "bound": bound, "load": load, "same_greedy": same_tokens(greedy)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of a model")
    parser.add_argument("--shape", default="smollm2-135m", choices=list(SHAPES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--requests", type=int, default=64, help="samples in all")
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--slots", type=int, default=64, help="of our engine")
    parser.add_argument("--block", type=int, default=16, help="decode steps per dispatch")
    parser.add_argument("--batch", type=int, default=16, help="rows of transformers")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, few tokens")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.shape, arguments.requests, arguments.group, arguments.model = "smoke", 4, 2, None
    result = run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
