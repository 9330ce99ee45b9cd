"""Seconds of a call."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def median_seconds(func: Callable[..., Any], repeats: int, *args: Any) -> float:
    """Return the median seconds of a call, after one that compiles."""
    jax.block_until_ready(func(*args))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(func(*args))
        times.append(time.perf_counter() - started)
    return statistics.median(times)
