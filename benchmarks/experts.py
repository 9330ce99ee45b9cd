"""Experts of a mixture on this machine: one grouped product, and a loop over experts.

    python -m benchmarks.experts [--tokens=2048] [--width=256] [--json=FILE]

One layer, forward and gradient of value, tokens and weights. "grouped" sorts tokens by expert and
multiplies each group once (`expert_mlp`); "loop" multiplies all tokens with every expert and a
weight that is 0 where it was not chosen, as a dense model of E MLPs does. The same arrays, float32,
in turns in the same process; medians of `--repeats` calls.

Claim: with 8 of 64 and of 128 experts the grouped product takes less than half of the loop's time,
forward and gradient, on CPUs; and both give the same numbers.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.roofline import machine_load
from jaxrl.models.architecture import Experts
from jaxrl.models.experts import expert_mlp, route

CASES = ((8, 2), (32, 8), (64, 8), (128, 8))  # experts, of which a token has
MOST = 0.5  # of the loop's time, with the experts of the claim
Weights = dict[str, jax.Array]


def grouped(experts: Experts, weights: Weights, y: jax.Array) -> jax.Array:
    """Compute the layer as jaxrl does."""
    return expert_mlp(experts, jax.nn.silu, weights, y)[0]


def loop(experts: Experts, weights: Weights, y: jax.Array) -> jax.Array:
    """Compute every expert for every token."""
    tokens = y.reshape(-1, y.shape[-1])
    routes, _ = route(experts, tokens @ weights["router"])

    def add(out: jax.Array, given: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        number, gate, up, down = given
        weight = jnp.where(routes.ids == number, routes.weights, 0).sum(axis=1, keepdims=True)
        return out + weight * ((jax.nn.silu(tokens @ gate) * (tokens @ up)) @ down), None

    names = ("experts_gate", "experts_up", "experts_down")
    of_experts = jnp.arange(experts.count), *(weights[name] for name in names)
    out, _ = jax.lax.scan(jax.checkpoint(add), jnp.zeros_like(tokens), of_experts)
    return out.reshape(y.shape)


def measure(count: int, chosen: int, tokens: int, width: int, repeats: int) -> dict[str, Any]:
    """Return milliseconds of both, forward and gradient."""
    experts = Experts(count=count, per_token=chosen, width=width // 2, normalise=True)
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), jnp.float32)

    weights = {
        "router": draw(width, count),
        "experts_gate": draw(count, width, experts.width),
        "experts_up": draw(count, width, experts.width),
        "experts_down": draw(count, experts.width, width),
    }
    y = draw(1, tokens, width) * np.float32(np.sqrt(tokens))
    runs = {}
    for name, layer in (("grouped", grouped), ("loop", loop)):
        forward = functools.partial(layer, experts)
        gradient = jax.grad(lambda w, y, f=forward: jnp.sin(f(w, y)).sum(), (0, 1))
        runs[name, "forward"], runs[name, "gradient"] = jax.jit(forward), jax.jit(gradient)
    for what in ("forward", "gradient"):
        found, expected = (runs[name, what](weights, y) for name in ("grouped", "loop"))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))
    seconds: dict[tuple[str, str], list[float]] = {of: [] for of in runs}
    for _ in range(repeats):
        for of, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run(weights, y))
            seconds[of].append(time.perf_counter() - started)
    took = {of: 1e3 * statistics.median(found) for of, found in seconds.items()}
    return {
        "experts": count,
        "of a token": chosen,
        "tokens": tokens,
        "width": width,
        **{f"{name} {what} ms": value for (name, what), value in took.items()},
        **{
            f"{what} grouped / loop": took["grouped", what] / took["loop", what]
            for what in ("forward", "gradient")
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where the claim is false."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256, help="of the model; experts have half")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="one tiny case, once; no claim")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args(argv)
    cases, size = (CASES, (given.tokens, given.width, given.repeats))
    if given.smoke:
        cases, size = (CASES[:1], (32, 16, 1))
    rows, before = [], machine_load()
    for case in cases:
        rows.append(measure(*case, *size))
        print(", ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    print(f"load before {before}, after {machine_load()}")
    if given.json:
        given.json.write_text(json.dumps({"rows": rows}))
    claimed = [] if given.smoke else [row for row in rows if row["experts"] >= 64]
    ratios = ("forward grouped / loop", "gradient grouped / loop")
    return int(any(row[ratio] > MOST for row in claimed for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())
