"""The exact mode: what it promises, measured on many tokens, and what it costs beside ordinary.

    JAX_PLATFORMS=cpu python -m benchmarks.exact [--shape=3m] [--rows 8 32 128] [--tiles 64 128]
    JAX_PLATFORMS=cpu python -m benchmarks.exact --shape=smollm2-135m --rows 4 --tokens=2000

Weights are random. Rows of 32 prompt tokens and 96 drawn ones go through a rollout of the engine, a
scoring pass, and the gradient of the log-probs in one microbatch, in each mode by turns; of three
rounds the fastest counts. Then mixed requests are sampled, prefixes reused, until `--tokens`
are drawn, and their log-probs compared with the trainer's.

Claim: the difference is 0 in the exact mode.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import SHAPES
from jaxrl.array_ops import DTYPES
from jaxrl.models.exact import Tiles, choose_tiles
from jaxrl.models.families import config_from_hf
from jaxrl.models.transformer import Params, TransformerConfig, init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Completion, Request, Sampling
from jaxrl.training.forward import log_probs_and_entropy
from jaxrl.types import ModelRows

PROMPT, DRAWN, TEMPERATURE = 32, 96, 0.9
SEQUENCES = 64  # of mixed requests that are sampled, and scored, at a time
LONGEST = 384  # tokens of a mixed row
MODES = ("off", "log_probs", "full")
ROUNDS = 3


def engine_of(
    model: TransformerConfig, params: Params, dtype: Any, tiles: Tiles | None, slots: int
) -> NativeEngine:
    """Return an engine with the weights, on one device."""
    mesh = make_mesh(devices=jax.devices()[:1])
    settings = {"dtype": dtype, "max_num_seqs": slots, "enable_prefix_caching": True}
    engine = NativeEngine(model, mesh, tiles=tiles, **settings)
    engine.update_weights(params, 0)
    return engine


def rows_of(prompts: Sequence[Sequence[int]], found: Sequence[Completion], length: int) -> Any:
    """Return the trainer's rows [B, T], and the sampler's log-probs [B, T]."""
    shape = len(prompts), length
    tokens, ends = np.zeros(shape, np.int32), np.zeros((len(prompts), 1), np.int32)
    wanted, log_probs = np.zeros(shape, bool), np.zeros(shape, np.float32)
    for row, (prompt, drawn) in enumerate(zip(prompts, found, strict=True)):
        whole = [*prompt, *drawn.tokens]
        tokens[row, : len(whole)], ends[row] = whole, len(whole)
        wanted[row, len(prompt) - 1 : len(whole) - 1] = True
        log_probs[row, len(prompt) : len(whole)] = drawn.log_probs
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    rows = ModelRows(
        tokens=tokens,
        positions=positions,
        segment_ids=(positions < ends).astype(np.int32),
        targets=np.roll(tokens, -1, axis=1),
        wanted=wanted,
    )
    return rows, log_probs


def scoring(model: TransformerConfig, dtype: Any, tiles: Tiles | None) -> Callable[..., Any]:
    """Return (params, rows) -> log-probs [B, T]."""

    def score(params: Params, rows: ModelRows) -> Any:
        settings = {"temperature": TEMPERATURE, "dtype": dtype, "with_entropy": False}
        return log_probs_and_entropy(model, params, rows, tiles=tiles, **settings)[0]

    return score


def prices(
    model: TransformerConfig, params: Params, dtype: Any, rows: int, ways: dict[str, Tiles | None]
) -> dict[str, tuple[float, float, float]]:
    """Return by way the seconds of a rollout, of a scoring pass and of a gradient."""
    draw, calls = np.random.default_rng(0), {}
    prompts = draw.integers(0, model.vocab_size, (rows, PROMPT)).tolist()
    sampling = Sampling(max_tokens=DRAWN, temperature=TEMPERATURE)
    asks = [Request(tuple(p), ((1, i),), sampling) for i, p in enumerate(prompts)]
    for name, tiles in ways.items():
        engine = engine_of(model, params, dtype, tiles, rows)
        drawn = [found[0] for found in engine.generate(asks)]
        placed = jax.tree.map(jnp.asarray, rows_of(prompts, drawn, PROMPT + DRAWN)[0])
        score = scoring(model, dtype, tiles)
        scored = jax.jit(score)
        total = jax.jit(jax.grad(lambda p, r, score=score: score(p, r).sum()))
        calls[name] = (
            lambda engine=engine: engine.generate(asks),
            lambda score=scored, r=placed: jax.block_until_ready(score(params, r)),
            lambda total=total, r=placed: jax.block_until_ready(total(params, r)),
        )
    best = {name: [float("inf")] * 3 for name in ways}
    for number in range(1 + ROUNDS):
        for name, parts in calls.items():
            for i, call in enumerate(parts):
                start = time.perf_counter()
                call()
                if number:  # the first one compiles
                    best[name][i] = min(best[name][i], time.perf_counter() - start)
    return {name: (a, b, c) for name, (a, b, c) in best.items()}


def difference(
    model: TransformerConfig, params: Params, dtype: Any, tiles: Tiles | None, tokens: int
) -> tuple[int, float, int]:
    """Return tokens drawn, the largest difference of their log-probs, and how many have any."""
    engine, draw = engine_of(model, params, dtype, tiles, 24), np.random.default_rng(1)
    score, drawn, largest, apart, number = jax.jit(scoring(model, dtype, tiles)), 0, 0.0, 0, 0
    while drawn < tokens:
        sizes = draw.integers(4, LONGEST // 2, SEQUENCES)
        prompts = [draw.integers(0, model.vocab_size, n).tolist() for n in sizes]
        prompts[1::4] = [[*p, 5] for p in prompts[0::4]]  # begin as others do
        most = draw.integers(2, LONGEST // 2 - 1, SEQUENCES)
        asks = [
            Request(tuple(p), ((number, i),), Sampling(max_tokens=int(n), temperature=TEMPERATURE))
            for i, (p, n) in enumerate(zip(prompts, most, strict=True))
        ]
        found = [of_request[0] for of_request in engine.generate(asks)]
        rows, expected = rows_of(prompts, found, LONGEST)
        off = np.abs(np.asarray(score(params, rows)) - expected)
        drawn += int(rows.wanted.sum())
        largest, apart, number = (
            max(largest, float(off.max())),
            apart + int((off > 0).sum()),
            number + 1,
        )
    return drawn, largest, apart


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="3m", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--rows", type=int, nargs="*", default=[8, 32, 128])
    parser.add_argument("--tiles", type=int, nargs="*", default=[], help="beside the rule's")
    parser.add_argument("--tokens", type=int, default=50_000)
    options = parser.parse_args()
    model, dtype = config_from_hf(SHAPES[options.shape]), DTYPES[options.dtype]
    params = init_params(model, 0)
    platform = jax.devices()[0].platform
    print(f"{options.shape}, {options.dtype}, {jax.devices()[0].device_kind}")
    print(
        f"{'rows':>5} {'way':>16} {'rollout s':>10} {'score s':>8} {'gradient s':>11}  ratio of all"
    )
    for rows in options.rows:
        ways: dict[str, Tiles | None] = {"off": None}
        for size in (None, *options.tiles):
            for mode in MODES[1:]:
                tiles = choose_tiles(mode, platform, tokens=size, parts=1, rows=rows)
                assert tiles is not None
                ways[f"{mode} {tiles.tokens}"] = tiles
        found = prices(model, params, dtype, rows, ways)
        for name, seconds in found.items():
            rollout, score, gradient = seconds
            ordinary = sum(found["off"])  # with a scoring pass, which exact has no need of
            now = sum(seconds) if name == "off" else rollout + gradient
            numbers = f"{rollout:10.2f} {score:8.2f} {gradient:11.2f}"
            print(f"{rows:5} {name:>16} {numbers}  {now / ordinary:.2f}", flush=True)
    for mode in MODES[:2] if options.tokens else ():
        tiles = choose_tiles(mode, platform, tokens=None, parts=1)
        drawn, largest, apart = difference(model, params, dtype, tiles, options.tokens)
        print(
            f"{mode}: {drawn} tokens, largest difference {largest:.3g}, of {apart} tokens",
            flush=True,
        )


if __name__ == "__main__":
    main()
