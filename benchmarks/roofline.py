"""What a machine can do, measured, and what a phase needs, counted from shapes.

Counted is the useful work alone: padding, slots of rows that are done, and prompts prefilled more
than once are not. A fraction of the matmul rate below 1 therefore holds all overheads.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.transformer import TransformerConfig


@dataclass(frozen=True)
class Rates:
    """Measured limits of this machine."""

    matmul_flops: float  # FLOP/s of a large square matrix product
    bandwidth: float  # bytes/s read by the sum of a large array


def best_seconds(func: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """Least seconds of a call, after one that compiles."""
    jax.block_until_ready(func(*args))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(func(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_rates(dtype: jnp.dtype, *, smoke: bool = False) -> Rates:
    """The matmul rate in `dtype` and the memory bandwidth of the first device."""
    large = jax.default_backend() != "cpu"
    size, elements = (8192, 2**30) if large else (2048, 2**26)  # 2**26 float32 = 256 MiB
    if smoke:
        size, elements = 64, 2**12
    a = jnp.ones((size, size), dtype)
    matmul = best_seconds(jax.jit(lambda x, y: x @ y), a, a)
    x = jnp.ones((64, elements // 64), dtype)
    read = best_seconds(jax.jit(lambda x: x.sum(-1)), x)
    return Rates(matmul_flops=2 * size**3 / matmul, bandwidth=x.nbytes / read)


def machine_load() -> list[float]:
    """Load averages over 1, 5 and 15 minutes; timings mean little above the number of cores."""
    return [round(x, 2) for x in os.getloadavg()]


# ---- work, from shapes ---------------------------------------------------------------------------


def layer_params(model: TransformerConfig) -> int:
    """Parameters of all layers that take part in matrix products."""
    c = model
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)


def layers_flops(model: TransformerConfig, start: int, stop: int) -> int:
    """FLOPs of the layers for positions start..stop-1 of one sequence.

    2 per parameter and token; 2 for q k^T and 2 for probs v, per head dim and position seen.
    """
    seen = (stop * (stop + 1) - start * (start + 1)) // 2
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * seen
    return 2 * layer_params(model) * (stop - start) + attention


def head_flops(model: TransformerConfig, tokens: int) -> int:
    """FLOPs of the logits of `tokens` positions."""
    return 2 * model.hidden_size * model.vocab_size * tokens


def step_flops(
    model: TransformerConfig, prompts: int, prompt_length: int, lengths: Sequence[int]
) -> dict[str, int]:
    """FLOPs of the phases of one GRPO step.

    Args:
        lengths: response tokens of each sample. The prompts are prefilled once each; logits are
            counted where a response token is predicted; the update is three forwards.
    """
    head = head_flops(model, sum(lengths))
    prefill = prompts * layers_flops(model, 0, prompt_length)
    decode = sum(layers_flops(model, prompt_length, prompt_length + n) for n in lengths)
    forward = sum(layers_flops(model, 0, prompt_length + n) for n in lengths) + head
    phases = {
        "generation": prefill + decode + head,
        "reference": forward,
        "old": forward,
        "update": 3 * forward,
    }
    return phases | {"total": sum(phases.values())}


def decode_step_bytes(
    model: TransformerConfig, batch: int, context: float, bytes_per_element: int
) -> float:
    """Bytes that one decode step must read: every weight once, the keys and values of each row.

    Args:
        context: mean positions seen by a row.
    """
    weights = layer_params(model) + model.hidden_size * model.vocab_size
    cache = 2 * model.num_layers * model.num_kv_heads * model.head_dim * context * batch
    return bytes_per_element * (weights + cache)


def decode_step_bound(
    model: TransformerConfig, rates: Rates, batch: int, context: float, bytes_per_element: int
) -> float:
    """Least seconds of one decode step: the larger of its bytes and its FLOPs over the rates."""
    bytes_bound = decode_step_bytes(model, batch, context, bytes_per_element) / rates.bandwidth
    token = layers_flops(model, int(context) - 1, int(context)) + head_flops(model, 1)
    return max(bytes_bound, batch * token / rates.matmul_flops)
