"""A mixed batch of requests, by our engine, by `generate` of transformers, and by vLLM.

    python -m benchmarks.rollout [--model=models/smollm2-135m-instruct] [--json=FILE]
        [--vllm-url=http://127.0.0.1:8001 --vllm-model=NAME]
    python -m benchmarks.rollout --device=gpu --shape=qwen2.5-1.5b --requests=256 --slots=256

Claim: 64 requests on SmolLM2-135M (float32; groups of 8 samples of a prompt, prompts of 16-200
tokens, limits of 16-128 tokens) take the engine at most half the time of transformers' padded
batches on the same CPU; half of vLLM's is the aim, LOG.md says how far it is. Greedy tokens are the
same but for near ties, whose gap is printed.

transformers gets the requests sorted by limit, in left-padded batches of `--batch` rows, each run
to the longest limit in it; that is how its `generate` is used without a server. Both are kept to
the limits. vLLM gets all groups at once, over HTTP, from a server that runs already with the same
model. Only wanted tokens count. The bound of a step is the larger of bytes (weights, filled
keys and values) over the measured bandwidth and FLOPs over the measured rate of matrix products;
the bound of the run adds up those of the steps that a schedule without waiting would take, and the
prefill of every prompt once. No run finds prompts of the one before: ours forgets them, vLLM has to
be started with --no-enable-prefix-caching. "where": one more run of ours with a clock around
blocks, which prefill too; idle = row-steps of blocks in which a row was done or no row was there.
Without --model our engine runs alone, on random weights.
"""

import argparse
import asyncio
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
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
from jaxrl.rollout.native.engine import NativeEngine
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
    model.generation_config.eos_token_id = None  # it goes on to the limit, as the others do
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
                max_new_tokens=limit,
                pad_token_id=0,
                **options,
            )
            for (own, row, _), drawn in zip(part, tokens[:, width:].tolist(), strict=True):
                out[row] = drawn[:own]
        return out

    return generate


def vllm_generate(url: str, name: str, work: Work) -> Callable[[float], Tokens]:
    """All groups at once to a vLLM server."""
    import aiohttp

    async def ask(
        http: aiohttp.ClientSession, prompt: list[int], limit: int, n: int, t: float
    ) -> Tokens:
        body = {"model": name, "prompt": prompt, "n": n, "max_tokens": limit}
        body |= {"temperature": t, "ignore_eos": True, "return_token_ids": True}
        async with http.post(f"{url}/v1/completions", json=body) as response:
            if response.status != HTTPStatus.OK:
                raise RuntimeError(f"{url} answered {response.status}: {await response.text()}")
            return [choice["token_ids"] for choice in (await response.json())["choices"]]

    async def all_groups(temperature: float) -> Tokens:
        # vLLM takes n > 1 only of samples: greedy ones are asked one by one, it finds their prefix
        n = work.group if temperature else 1
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as http:
            asked = zip(work.prompts, work.limits, strict=True)
            groups = await asyncio.gather(
                *(
                    ask(http, p, limit, n, temperature)
                    for p, limit in asked
                    for _ in range(work.group // n)
                )
            )
        return [tokens for group in groups for tokens in group]

    return lambda temperature: asyncio.run(all_groups(temperature))


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
    systems: dict[str, Callable[[float], Tokens]],
    forget: Callable[[], None],
    work: Work,
    repeats: int,
) -> tuple[list[dict[str, Any]], dict[str, Tokens]]:
    """Medians over turns of the systems, and what each drew greedily.

    Args:
        forget: empties our engine's cache.
    """
    times: dict[tuple[str, str], list[float]] = {}
    greedy: dict[str, Tokens] = {}
    for temperature in MODES.values():
        for name in systems.keys() - {"transformers"}:
            systems[name](temperature)  # compiles
    for _ in range(repeats):
        for mode, temperature in MODES.items():
            for name, generate in systems.items():
                forget()
                start = time.perf_counter()
                tokens = generate(temperature)
                times.setdefault((name, mode), []).append(time.perf_counter() - start)
                print(f"{name} {mode}: {times[name, mode][-1]:.2f} s", flush=True)
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


def same_tokens(ours: Tokens, theirs: Tokens, engine: NativeEngine, work: Work) -> dict[str, float]:
    """Share of greedy tokens up to the first difference of each sample; the largest gap there.

    The gap is that of the log-probs that our engine gives the two tokens.
    """
    agree = total = 0
    gaps = [0.0]
    for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        agree, total = agree + first, total + len(a)
        if first < len(a) and row % work.group == 0:
            prefix = (*work.prompts[row // work.group], *a[:first])
            asked = Request(prefix, ((0, 0),), Sampling(max_tokens=1, temperature=0.0, logprobs=5))
            top = engine.generate([asked])[0][0].top_log_probs[0]
            gaps.append(top[a[first]] - top.get(b[first], -np.inf))
    return {"share": agree / total, "largest_gap": max(gaps)}


def where(engine: NativeEngine, generate: Callable[[float], Tokens]) -> dict[str, float]:
    """Seconds of one sampled run by part, and the idle share of the row-steps of its blocks."""
    programs: Any = engine.programs
    decode, before = programs.decode, engine.decoded_tokens
    blocks, computed = 0.0, 0

    def timed_decode(rows: Any, *others: Any) -> Any:
        nonlocal blocks, computed
        started = time.perf_counter()
        after, block = jax.block_until_ready(decode(rows, *others))
        blocks += time.perf_counter() - started
        computed += len(rows.live) * int((rows.start + block.count).max())
        return after, block

    programs.decode = timed_decode
    started = time.perf_counter()
    generate(1.0)
    total = time.perf_counter() - started
    programs.decode = decode
    idle = 1 - (engine.decoded_tokens - before) / computed
    return {"blocks": blocks, "rest": total - blocks, "total": total, "idle": idle}


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

    def forget() -> None:
        engine.update_weights(params, 0)

    forget()
    systems = {"jaxrl": engine_generate(engine, work)}
    if folder and not gpu and importlib.util.find_spec("torch"):
        systems["transformers"] = transformers_generate(folder, work, arguments.batch)
    if arguments.vllm_url:
        systems["vllm"] = vllm_generate(arguments.vllm_url, arguments.vllm_model, work)
    load = roofline.machine_load()
    rows, greedy = measure(systems, forget, work, arguments.repeats)
    bound = bound_seconds(model, work, rates, jnp.dtype(dtype).itemsize)
    print(
        f"{work.tokens} tokens; {rates.matmul_flops / 1e9:.0f} GFLOP/s, "
        f"{rates.bandwidth / 1e9:.1f} GB/s, load {load}; {engine.describe()}"
    )
    forget()
    ours, parts = greedy.pop("jaxrl"), where(engine, systems["jaxrl"])
    alike = {name: same_tokens(ours, tokens, engine, work) for name, tokens in greedy.items()}
    print(f"bound {bound:.2f} s; greedy tokens alike: {alike}")
    print("where: " + ", ".join(f"{name} {value:.2f}" for name, value in parts.items()))
    for row in rows:
        row["of_bound"] = bound / row["seconds"]
        print(
            f"{row['system']:<14}{row['sampling']:<9}{row['seconds']:>8.2f} s"
            f"{row['tokens_per_second']:>9.1f} tokens/s{100 * row['of_bound']:>6.0f} % of the bound"
        )
    return {"rows": rows, "bound": bound, "load": load, "same_greedy": alike, "where": parts}


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
    parser.add_argument("--vllm-url", help="of a vLLM server with the same model")
    parser.add_argument("--vllm-model", default="model", help="its name there")
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
