"""Seconds of a decode step by the tokens before it: attention, gated DeltaNet, and both.

    python -m benchmarks.linear_decode [--lengths 64 512 2048 8192]

Claim: a step of layers that keep a state takes as long behind 8,192 tokens as behind 64; a step of
attention grows with the keys that it reads, and one of a hybrid by its share of attention.

The rows are samples of one prompt, which is there before the clock starts: the engine finds its
pages, and the state behind them. On a CPU the time is that of the process on all cores, which other
processes do not lengthen; elsewhere that of the clock.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.architecture import DeltaNet, TransformerConfig, state_elements
from jaxrl.models.transformer import init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling

MIXERS = {
    "attention": ("attention",) * 4,
    "delta": ("delta",) * 4,
    "hybrid": ("delta",) * 3 + ("attention",),
}
SIZES = {  # (D, MLP width, heads, head width, V)
    "cpu": (128, 256, 4, 32, 512),
    "gpu": (2048, 6144, 16, 128, 32_768),
}


def model(mixers: Sequence[str], platform: str) -> TransformerConfig:
    """Four layers of one width, of these mixers."""
    width, mlp, heads, head, vocab = SIZES[platform]
    return TransformerConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=mlp,
        num_layers=len(mixers),
        num_heads=heads,
        num_kv_heads=heads // 2,
        head_dim=head,
        mixers=tuple(mixers),
        delta_net=DeltaNet(heads, heads, head, head, window=4) if "delta" in mixers else None,
    )


def step_seconds(engine: NativeEngine, length: int, rows: int, steps: int) -> float:
    """Return the seconds of a step of `rows` rows behind `length` tokens."""
    prompt = np.random.default_rng(length).integers(0, 512, length).tolist()
    request = Request(prompt, [(0, key) for key in range(rows)], Sampling(1))
    engine.generate([request])
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter

    def taken(tokens: int) -> float:
        asked = dataclasses.replace(request, sampling=Sampling(tokens))
        before = engine.prefilled_tokens
        start = clock()
        engine.generate([asked])
        seconds = clock() - start
        assert engine.prefilled_tokens == before  # nothing but steps
        return seconds

    taken(1), taken(steps + 1)  # whatever is compiled is compiled now
    return statistics.median((taken(steps + 1) - taken(1)) / steps for _ in range(3))


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the seconds of each model and length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 2048, 8192])
    parser.add_argument("--rows", type=int, default=8, help="samples that decode; default: 8")
    parser.add_argument("--steps", type=int, default=64, help="default: 64")
    parser.add_argument("--json", type=Path, default=Path("linear_decode.json"))
    arguments = parser.parse_args(argv)
    platform = "cpu" if jax.default_backend() == "cpu" else "gpu"
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    longest = max(arguments.lengths) + arguments.steps + 1
    found = {}
    for name, mixers in MIXERS.items():
        config = model(mixers, platform)
        mesh = make_mesh(devices=jax.devices()[:1])
        engine = NativeEngine(config, mesh, dtype=dtype, max_num_seqs=arguments.rows)
        engine.update_weights(init_params(config, 0), 0)
        engine.generate([Request([1] * longest, [(0, 0)], Sampling(1))])  # room for all rows
        found[name] = {
            str(length): step_seconds(engine, length, arguments.rows, arguments.steps)
            for length in arguments.lengths
        }
        times = "  ".join(f"{n} tokens {1e3 * s:.3f} ms" for n, s in found[name].items())
        print(f"{name:9s} {times}; a row's states {4 * state_elements(config) / 2**20:.2f} MiB")
    arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
