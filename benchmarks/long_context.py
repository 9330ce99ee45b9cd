"""Long rows over devices: memory and traffic of the gradient, compiled for a TPU slice.

    JAX_PLATFORMS=cpu python -m benchmarks.long_context [--topology=v5p:2x2x2] [--lengths 2048 ...]

For each length the gradient of one row is compiled, with `mesh.context` over all devices, by each
strategy, of a shape with few layers. Printed: temporaries of a device, what it sends to others, and
the largest array that has the row's length twice.

Claim: no array has a row's length, or a device's part of it, twice.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ahead_of_time
from benchmarks.shapes import SHAPES, transformer_config
from jaxrl.tools.plan import hlo

MIB = 2**20
LENGTHS = [2048, 8192, 32_768, 131_072]
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where a claim is false."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--shape", default="qwen2.5-7b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=5, help="more than are unrolled")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--strategies", nargs="*", default=["gather", "ring"])
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args(argv)
    rows = []
    for strategy in arguments.strategies:
        for length in arguments.lengths:
            row = measure(arguments, strategy, length)
            rows.append(row)
            sent = ", ".join(f"{kind} {x / MIB:,.0f}" for kind, x in row["sent"].items())
            print(
                f"{strategy:<8}{length:>9} tokens: temporaries {row['temporaries'] / MIB:>9,.0f} "
                f"MiB, square {row['square']}, MiB sent: {sent}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return int(any(row["square"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
