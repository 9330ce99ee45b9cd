"""Long rows: attention on one core, and the gradient compiled for a TPU slice.

    JAX_PLATFORMS=cpu python -m benchmarks.long_context [--topology=v5p:2x2x2] [--lengths 2048 ...]
    JAX_PLATFORMS=cpu python -m benchmarks.long_context --one-core [--timed-up-to=32768]

For each length the gradient of one row is compiled, with `mesh.context` over all devices, by each
strategy, of a shape with few layers. Printed: temporaries of a device, what it sends to others, and
the largest array that has the row's length twice. With `--window` all layers slide.

With `--one-core`: one layer's attention, forward and backward, on this machine's CPU, by the kernel
`chunked` of `packed_attention`, the one without the scores of whole rows: temporaries, and the
seconds of one call where the row is not longer than `--timed-up-to`. 2 query heads and 1 key/value
head of 64, float32, a row of two trajectories.

Claim: no array has a row's length, or a device's part of it, twice.
"""

import argparse
import dataclasses
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ahead_of_time
from benchmarks.shapes import SHAPES, transformer_config
from jaxrl.models.attention import Segments
from jaxrl.models.kernels.packed_attention import self_attention
from jaxrl.models.transformer import TransformerConfig
from jaxrl.tools.plan import hlo

MIB = 2**20
LENGTHS = [2048, 8192, 32_768, 131_072]
ONE_CORE_LENGTHS = [2**n for n in range(11, 18)]
ONE_LAYER = TransformerConfig(
    vocab_size=8,
    hidden_size=128,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
)
ARRAY = re.compile(r"\b(?:f32|bf16|f16|pred|s32|u32)\[([0-9,]+)\]")


def squares(text: str, length: int, devices: int) -> int:
    """Return the elements of the largest array with a row's length, or a part of it, twice."""
    found = 0
    for dims in {m.group(1) for m in ARRAY.finditer(text)}:
        sizes = [int(n) for n in dims.split(",")]
        if sum(n in (length, length // devices) for n in sizes) > 1:
            found = max(found, int(np.prod(sizes)))
    return found


def measure(arguments: argparse.Namespace, strategy: str, length: int) -> dict[str, Any]:
    """Compile the gradient of a length."""
    devices = ahead_of_time.topology_devices(arguments.topology)
    model = transformer_config(arguments.shape)
    model = dataclasses.replace(model, num_layers=arguments.layers)
    if arguments.window:
        slides = (True,) * arguments.layers
        model = dataclasses.replace(model, sliding_window=arguments.window, sliding_layers=slides)
    run = ahead_of_time.assemble(
        model,
        devices,
        {"context": len(devices)},
        rows=1,
        length=length,
        settings={"trainer.bf16": True, "trainer.context_strategy": strategy},
    )
    compiled = ahead_of_time.accumulate_call(run).lower().compile()
    text = compiled.as_text()
    sent: dict[str, float] = {}
    for one in hlo.collectives(text):
        name = f"{one.kind} {'of attention' if 'attention' in one.source else 'of others'}"
        sent[name] = sent.get(name, 0.0) + one.moved * one.times
    return {
        "strategy": strategy,
        "length": length,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "sent": sent,
        "square": squares(text, length, len(devices)),
    }


def one_core(length: int, timed: bool) -> dict[str, Any]:
    """Compile one layer's attention and its gradient, and run it once if it is timed."""
    heads, kv = ONE_LAYER.num_heads, ONE_LAYER.num_kv_heads
    draw = np.random.default_rng(0).standard_normal
    q = jnp.asarray(draw((1, length, heads, ONE_LAYER.head_dim), np.float32))
    k, v = (jnp.asarray(draw((1, kv, length, ONE_LAYER.head_dim), np.float32)) for _ in "kv")
    ids = jnp.where(jnp.arange(length) < length // 2, 1, 2)[None]

    def total(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        out = self_attention(ONE_LAYER, q, k, v, Segments(ids, False), kernel="chunked")
        return jnp.square(out).sum()

    compiled = jax.jit(jax.value_and_grad(total, (0, 1, 2))).lower(q, k, v, ids).compile()
    seconds = None
    if timed:
        started = time.process_time()
        jax.block_until_ready(compiled(q, k, v, ids))
        seconds = time.process_time() - started
    return {
        "length": length,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "seconds": seconds,
        "square": squares(compiled.as_text(), length, 1),
    }


def on_one_core(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print and return the figures of one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = []
    for length in arguments.lengths or ONE_CORE_LENGTHS:
        row = one_core(length, length <= arguments.timed_up_to)
        rows.append(row)
        seconds = "not run" if row["seconds"] is None else f"{row['seconds']:,.2f} s"
        print(
            f"{length:>9} tokens: temporaries {row['temporaries'] / MIB:>8,.1f} MiB, "
            f"square {row['square']}, {seconds}",
            flush=True,
        )
    return rows


def on_slice(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print and return the figures of a slice."""
    rows = []
    for strategy in arguments.strategies:
        for length in arguments.lengths or LENGTHS:
            row = measure(arguments, strategy, length)
            rows.append(row)
            sent = ", ".join(f"{kind} {x / MIB:,.0f}" for kind, x in row["sent"].items())
            print(
                f"{strategy:<8}{length:>9} tokens: temporaries {row['temporaries'] / MIB:>9,.0f} "
                f"MiB, square {row['square']}, MiB sent: {sent}",
                flush=True,
            )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where a claim is false."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--shape", default="qwen2.5-7b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=5, help="more than are unrolled")
    parser.add_argument("--window", type=int, help="every layer slides: what is sent in its branch")
    parser.add_argument("--lengths", type=int, nargs="*")
    parser.add_argument("--one-core", action="store_true", help="one layer's attention, here")
    parser.add_argument("--timed-up-to", type=int, default=32_768, help="of --one-core")
    parser.add_argument("--strategies", nargs="*", default=["gather", "ring"])
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args(argv)
    rows = (on_one_core if arguments.one_core else on_slice)(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return int(any(row["square"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
