"""Guessed tokens: what a decoding step costs with them, and what they bring at best.

    JAX_PLATFORMS=cpu python -m benchmarks.drafts [--shape=3m] [--rows 1 8 32] [--drafts 1 3 7]

Weights are random. Drawn at temperature 1 nothing comes again, and each step guesses in vain; drawn
greedily a row soon repeats itself, and nearly every guess is right. Real answers lie between. The
numbers of drafts go by turns; of three rounds the fastest counts.

Claim: the tokens are the same; where they are guessed, few rows gain most.
"""

import argparse
import time
from collections.abc import Mapping

import jax
import numpy as np

from benchmarks.shapes import SHAPES
from jaxrl.models.families import config_from_hf
from jaxrl.models.transformer import Params, TransformerConfig, init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling

PROMPT, DRAWN, ROUNDS = 32, 256, 3


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


def main() -> None:
    """Print seconds of a rollout, and tokens of a step, by rows, temperature and drafts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="3m", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, nargs="*", default=[1, 3, 7])
    options = parser.parse_args()
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
