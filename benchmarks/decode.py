"""Decode tokens/s of the native engine, its parts, and transformers' `generate` beside it.

    python -m benchmarks.decode --model=models/smollm2-135m-instruct
    python -m benchmarks.decode --device=gpu     # jaxrl alone, Qwen2.5-0.5B and 1.5B shapes

Claim: on a CPU, in float32, the engine samples from SmolLM2-135M at least 1.3 times as fast as
transformers on torch at batch 32 and 64 (8 samples per 64-token prompt, 32 new tokens).

The rows of a batch are `--group` samples of a prompt, as GRPO draws them: the engine runs each
prompt once, `generate` once per row (it has no shared prefill); `--group=1` compares distinct
prompts. Every call has prompts of its own, as the engine finds those that it has prefilled. Both
systems take turns in one process and use all cores. Tokens/s count new tokens over
the whole call, prefill too; a decode step is (call - call for one token) / (new tokens - 1). The
bound is the larger of bytes over the measured bandwidth and FLOPs over the measured matmul rate
(`roofline.py`).

The split is by ablation, through the engine's public interface: MLP = the model minus the same
model with MLP width 1; head and sampling = minus the same model with 8 tokens; sampling = the
jitted `sample` alone; attention, with norms and everything else, is the rest.
"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import roofline
from benchmarks.shapes import transformer_config
from jaxrl.models import hf
from jaxrl.models.transformer import Params, TransformerConfig, init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.sampling import sample
from jaxrl.rollout.protocol import Request, Sampling

MODES = {"greedy": 0.0, "sampled": 1.0}  # temperature
Generate = Callable[[np.ndarray, int, float], None]  # prompts [B, T], new tokens, temperature


@dataclasses.dataclass(frozen=True)
class Work:
    """Sizes of a run."""

    prompt_length: int
    new_tokens: int
    batches: tuple[int, ...]
    dtype: Any
    repeats: int
    group: int  # samples of a prompt

    @property
    def context(self) -> float:
        """Mean positions that a decoded token sees."""
        return self.prompt_length + self.new_tokens / 2


def engine_generate(model: TransformerConfig, params: Params, dtype: Any) -> Generate:
    """Generation with the native engine; no stop tokens."""

    @functools.cache
    def engine_of(batch: int) -> NativeEngine:
        engine = NativeEngine(model, make_mesh(), dtype=dtype, max_num_seqs=batch)
        engine.update_weights(params, 0)
        return engine

    def generate(prompts: np.ndarray, new_tokens: int, temperature: float) -> None:
        sampling = Sampling(max_tokens=new_tokens, temperature=temperature)
        by_prompt = itertools.groupby(enumerate(map(tuple, prompts.tolist())), key=lambda x: x[1])
        requests = [
            Request(prompt, tuple((0, i) for i, _ in rows), sampling) for prompt, rows in by_prompt
        ]
        completions = engine_of(len(prompts)).generate(requests)
        assert all(len(c.tokens) == new_tokens for samples in completions for c in samples)

    return generate


def transformers_generate(folder: Path) -> Generate:
    """Generation with transformers on torch, float32, all cores."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(prompts: np.ndarray, new_tokens: int, temperature: float) -> None:
        ids = torch.tensor(prompts)
        options = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        tokens = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=bool(temperature),
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            **options,
        )
        assert tokens.shape[1] == prompts.shape[1] + new_tokens

    return generate


def random_prompts(
    rng: np.random.Generator, model: TransformerConfig, batch: int, work: Work
) -> np.ndarray:
    """Prompts [batch, length] of random tokens, each `work.group` times."""
    groups = -(-batch // work.group)
    prompts = rng.integers(3, model.vocab_size, (groups, work.prompt_length))
    return np.repeat(prompts, work.group, axis=0)[:batch]


def measure_batch(
    systems: Mapping[str, Generate],
    model: TransformerConfig,
    work: Work,
    batch: int,
    modes: Sequence[str] = tuple(MODES),
) -> list[dict[str, Any]]:
    """Rows of one batch size: the systems in turns, medians."""
    rng = np.random.default_rng(batch)
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def seconds(generate: Generate, new_tokens: int, mode: str) -> float:
        prompts, start = random_prompts(rng, model, batch, work), time.perf_counter()
        generate(prompts, new_tokens, MODES[mode])
        return time.perf_counter() - start

    for repeat in range(-1, work.repeats):  # the first compiles
        for mode in modes:
            for name, generate in systems.items():
                first, whole = (seconds(generate, n, mode) for n in (1, work.new_tokens))
                if repeat >= 0:
                    times.setdefault((name, mode), []).append((first, whole))
    rows = []
    for (name, mode), pairs in times.items():
        first, whole = (statistics.median(column) for column in zip(*pairs, strict=True))
        rows.append(
            {
                "system": name,
                "batch": batch,
                "sampling": mode,
                "tokens_per_second": batch * work.new_tokens / whole,
                "prefill_ms": 1e3 * first,
                "decode_step_ms": 1e3 * (whole - first) / (work.new_tokens - 1),
                "seconds": [whole for _, whole in pairs],
            }
        )
    return rows


def split_decode_step(model: TransformerConfig, work: Work, batch: int) -> dict[str, float]:
    """Milliseconds of the parts of one sampled decode step, by ablation (see the module)."""
    ablated = {
        "whole": model,
        "no_mlp": dataclasses.replace(model, intermediate_size=1),
        "no_vocabulary": dataclasses.replace(model, vocab_size=8),
    }
    generate = {
        name: engine_generate(config, init_params(config, 0), work.dtype)
        for name, config in ablated.items()
    }
    small = ablated["no_vocabulary"]  # its tokens are in all vocabularies
    rows = measure_batch(generate, small, work, batch, modes=("sampled",))
    ms = {row["system"]: row["decode_step_ms"] for row in rows}
    sampling = 1e3 * sample_seconds(model.vocab_size, batch)
    mlp = ms["whole"] - ms["no_mlp"]
    head = ms["whole"] - ms["no_vocabulary"] - sampling
    attention = ms["whole"] - mlp - head - sampling
    parts = {"attention": attention, "mlp": mlp, "head": head, "sampling": sampling}
    return {"batch": batch, "whole": ms["whole"]} | parts


def sample_seconds(vocab: int, batch: int) -> float:
    """Seconds of drawing one token per row at temperature 1 from [batch, vocab] logits."""
    ones, off = jnp.ones(batch), jnp.zeros(batch, jnp.int32)

    def draw(logits: jax.Array) -> Any:
        return sample(
            logits,
            ones / 2,
            temperature=ones,
            top_k=off,
            top_p=ones,
            min_p=0 * ones,
            filtered=False,
        )

    logits = jax.random.normal(jax.random.key(0), (batch, vocab))
    return roofline.best_seconds(jax.jit(draw), logits)


def add_bounds(
    rows: Sequence[dict[str, Any]], model: TransformerConfig, rates: roofline.Rates, work: Work
) -> None:
    """The bound of each row's decode step, and the fraction of it that was reached."""
    for row in rows:
        bound = roofline.decode_step_bound(
            model, rates, row["batch"], work.context, jnp.dtype(work.dtype).itemsize
        )
        row["bound_step_ms"] = 1e3 * bound
        row["fraction_of_bound"] = 1e3 * bound / row["decode_step_ms"]


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per system, batch and mode."""
    print(
        f"{'batch':>5} {'sampling':9}{'system':13}{'tokens/s':>9}{'prefill ms':>11}"
        f"{'step ms':>9}{'bound ms':>9}{'% of bound':>11}"
    )
    for row in rows:
        print(
            f"{row['batch']:>5} {row['sampling']:9}{row['system']:13}"
            f"{row['tokens_per_second']:>9.1f}{row['prefill_ms']:>11.1f}"
            f"{row['decode_step_ms']:>9.2f}{row['bound_step_ms']:>9.2f}"
            f"{100 * row['fraction_of_bound']:>11.1f}"
        )


def run_model(name: str, arguments: argparse.Namespace, work: Work) -> dict[str, Any]:
    """All batch sizes of one shape, or of the model folder that `name` is."""
    load = roofline.machine_load()
    folder = Path(name) if (Path(name) / "config.json").is_file() else None
    model = hf.load_config(folder) if folder else transformer_config(name)
    params = hf.load_params(folder, model) if folder else init_params(model, 0)
    rates = roofline.measure_rates(work.dtype, smoke=arguments.smoke)
    systems = {"jaxrl": engine_generate(model, params, work.dtype)}
    if folder and arguments.device == "cpu" and importlib.util.find_spec("torch"):
        systems["transformers"] = transformers_generate(folder)
    rows = [row for batch in work.batches for row in measure_batch(systems, model, work, batch)]
    add_bounds(rows, model, rates, work)
    print(
        f"\n{name} on {jax.devices()[0].device_kind}, {jnp.dtype(work.dtype).name}: "
        f"{rates.matmul_flops / 1e9:.0f} GFLOP/s matmul, {rates.bandwidth / 1e9:.1f} GB/s; load "
        f"{load} before, {roofline.machine_load()} after; medians of {work.repeats} repeats"
    )
    print_rows(rows)
    split = None
    if arguments.split_batch:
        split = split_decode_step(model, work, arguments.split_batch)
        print("decode step by ablation:", ", ".join(f"{k} {v:.2f}" for k, v in split.items()), "ms")
    about = {"model": name, "load": load, "rates": dataclasses.asdict(rates)}
    return about | {"rows": rows, "split_ms": split}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="default: cpu")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, one repeat")
    parser.add_argument("--model", default="models/smollm2-135m-instruct", help="folder, on cpu")
    parser.add_argument("--batches", type=int, nargs="+", help="default: 1 8 32 64; gpu: to 256")
    parser.add_argument("--repeats", type=int, default=3, help="default: 3")
    parser.add_argument("--group", type=int, default=8, help="samples per prompt; default: 8")
    parser.add_argument("--split-batch", type=int, default=32, help="0 = no split; default: 32")
    parser.add_argument("--json", type=Path, default=Path("decode.json"), help="output file")
    arguments = parser.parse_args(argv)
    gpu = arguments.device == "gpu"
    work = Work(
        prompt_length=128 if gpu else 64,
        new_tokens=128 if gpu else 32,
        batches=tuple(arguments.batches or ((1, 8, 32, 64, 256) if gpu else (1, 8, 32, 64))),
        dtype=jnp.bfloat16 if gpu else jnp.float32,
        repeats=arguments.repeats,
        group=arguments.group,
    )
    models = ["qwen2.5-0.5b", "qwen2.5-1.5b"] if gpu else [arguments.model]
    if arguments.smoke:
        models, arguments.split_batch = ["smoke"], 2
        work = dataclasses.replace(work, prompt_length=8, new_tokens=4, batches=(1, 2), repeats=1)
    if not gpu and not arguments.smoke and not (Path(arguments.model) / "config.json").is_file():
        parser.error(f"--model={arguments.model}: no config.json there; give a model folder")
    results = [run_model(name, arguments, work) for name in models]
    report = {"benchmark": "decode", "device": arguments.device, "results": results}
    arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
