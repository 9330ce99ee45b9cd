"""A sampler in 8 bits: how far its log-probs are from the trainer's, by depth and place.

    JAX_PLATFORMS=cpu python -m benchmarks.eight_bits [--layers 2 4 8 16] [--rows=32]

Models of width 64 and 4 heads with random weights, in float32. Answers of 128 tokens are drawn by
the engine with its matrices in int8 or fp8, its keys and values in fp8, or both, and scored by the
trainer, which has neither. A cell is the mean and the largest difference of the log-prob of a drawn
token: of all, and of the first and the last quarter of the answers.

Claim: it grows with the depth, and not with the place in the answer.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.exact import TEMPERATURE, rows_of, scoring
from jaxrl.models.transformer import TransformerConfig, init_params
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling

PROMPT, DRAWN = 32, 128
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "fp8 pages": {"kv_cache_dtype": "fp8"},
    "fp8, fp8 pages": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}


def model_of(layers: int) -> TransformerConfig:
    """Return a model whose distributions are neither flat nor a single token."""
    return TransformerConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        tie_embeddings=False,
        initializer_range=0.2,
    )


def differences(layers: int, rows: int, drawn: int = DRAWN) -> dict[str, np.ndarray]:
    """Return by way how far the log-probs [rows, drawn] of sampler and trainer are apart."""
    model, draw = model_of(layers), np.random.default_rng(0)
    params = init_params(model, 0)
    prompts = draw.integers(0, model.vocab_size, (rows, PROMPT)).tolist()
    sampling = Sampling(max_tokens=drawn, temperature=TEMPERATURE)
    asks = [Request(tuple(p), ((1, i),), sampling) for i, p in enumerate(prompts)]
    score, apart = jax.jit(scoring(model, jnp.float32, None)), {}
    for way, options in WAYS.items():
        engine = NativeEngine(
            model, make_mesh(devices=jax.devices()[:1]), max_num_seqs=rows, **options
        )
        engine.update_weights(params, 0)
        found = [of_request[0] for of_request in engine.generate(asks)]
        scored, sampled = rows_of(prompts, found, PROMPT + drawn)
        apart[way] = np.abs(np.asarray(score(params, scored)) - sampled)[:, PROMPT:]
    return apart


def main() -> None:
    """Print a line for each depth and way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rows", type=int, default=32)
    options = parser.parse_args()
    print("| layers | 8 bits | all | first quarter | last quarter |")
    print("|---" * 5 + "|")
    for layers in options.layers:
        for way, apart in differences(layers, options.rows).items():
            quarter = apart.shape[1] // 4
            parts = apart, apart[:, :quarter], apart[:, -quarter:]
            cells = " | ".join(f"{x.mean():.2g}, {x.max():.2g}" for x in parts)
            print(f"| {layers} | {way} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
