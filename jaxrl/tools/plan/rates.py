"""What the devices can do: from the table of `chips.py`, or measured."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Rates:
    """Hold the measured limits of this machine."""

    matmul_flops: float  # FLOP/s of a large square matrix product
    bandwidth: float  # bytes/s read by the sum of a large array


def best_seconds(func: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """Return the least seconds of a call, after one that compiles."""
    jax.block_until_ready(func(*args))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(func(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_rates(dtype: jnp.dtype, *, smoke: bool = False) -> Rates:
    """Measure the matmul rate in `dtype` and the memory bandwidth of the first device."""
    large = jax.default_backend() != "cpu"
    size, elements = (8192, 2**30) if large else (2048, 2**26)  # 2**26 float32 = 256 MiB
    if smoke:
        size, elements = 64, 2**12
    a = jnp.ones((size, size), dtype)
    matmul = best_seconds(jax.jit(lambda x, y: x @ y), a, a)
    x = jnp.ones((64, elements // 64), dtype)
    read = best_seconds(jax.jit(lambda x: x.sum(-1)), x)
    return Rates(matmul_flops=2 * size**3 / matmul, bandwidth=x.nbytes / read)
