"""Operations of a decode block for TPUs that need not be there, by the loops that run them.

    JAX_PLATFORMS=cpu python -m benchmarks.decode_program --top-p=0.7

Compiles the block of a few layers of a published shape ahead of time (it needs libtpu) and counts,
for the loop over tokens and the loops inside of it, instructions, the compiler's estimate of their
cycles, sorts, and what gathers and scatters move. The estimate is a model and no measurement: it
has no number for Pallas kernels, sorts and large scatters.
"""

import argparse
import collections
import dataclasses
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from benchmarks import ahead_of_time
from benchmarks.shapes import transformer_config
from jaxrl.models.placement import placed_params
from jaxrl.parallel import Placement, make_mesh
from jaxrl.parallel.compilation import Call
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_BODY = re.compile(r"body=%?([\w.-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}


def decode_call(
    shape: str, sampling: Sampling, *, layers: int, rows: int, topology: str, tensor: int
) -> Call:
    """The block of `rows` rows on each group of `tensor` chips, in bfloat16, 1024 positions."""
    model = dataclasses.replace(transformer_config(shape), num_layers=layers)
    devices = ahead_of_time.topology_devices(topology)[:tensor]
    mesh = make_mesh(devices=devices, data=1, tensor=tensor)
    engine = NativeEngine(
        model, mesh, dtype=jnp.bfloat16, max_num_seqs=rows, max_model_len=1024, device_memory=1e12
    )
    params = placed_params(model, Placement(mesh))
    return engine.calls(params, [Request((0,) * 512, ((0, 0),), sampling)])["decode"]


def loops(text: str) -> dict[str, dict[str, Any]]:
    """What each loop of a compiled program runs in one round, by the name of its body."""
    bodies: dict[str, list[tuple[str, str, str, str]]] = {}
    current: list[tuple[str, str, str, str]] = []
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            current = bodies.setdefault(found[1], [])
        elif found := _INSTRUCTION.match(line):
            current.append((found[1], found[2], found[3], found[4]))
    parents = {
        body: name
        for name, instructions in bodies.items()
        for *_, kind, rest in instructions
        if kind == "while"
        for body in _BODY.findall(rest)
    }
    found = {}
    for body, parent in parents.items():
        kinds: collections.Counter[str] = collections.Counter()
        cycles, notes = 0, []
        for name, array, kind, rest in bodies[body]:
            if kind in _FREE or kind.endswith("-done"):
                continue
            target = _TARGET.search(rest)
            kinds[target[1] if target else kind] += 1
            cycles += sum(map(int, _CYCLES.findall(rest)))
            if kind in ("sort", "gather", "scatter", "all-gather") or "opk" in rest[:200]:
                notes.append(f"{name} = {array}")
        found[body] = {"in": parent, "kinds": kinds, "cycles": cycles, "notes": notes}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Compile and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-1.5b", help="default: qwen2.5-1.5b")
    parser.add_argument("--layers", type=int, default=2, help="default: 2")
    parser.add_argument("--rows", type=int, default=64, help="default: 64")
    parser.add_argument("--tensor", type=int, default=1, help="chips; default: 1")
    parser.add_argument("--topology", default="v5e:2x4", help="default: v5e:2x4")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--keep", action="store_true", help="report the sets that filters left")
    parser.add_argument("--logprobs", type=int, default=0)
    arguments = parser.parse_args(argv)
    sampling = Sampling(
        max_tokens=512,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        keep_sampling_mask=arguments.keep,
        logprobs=arguments.logprobs,
    )
    sizes = {name: getattr(arguments, name) for name in ("layers", "rows", "topology", "tensor")}
    lowered = decode_call(arguments.shape, sampling, **sizes).lower()
    started = time.process_time()
    compiled = lowered.compile()
    print(f"compiled in {time.process_time() - started:.0f} CPU seconds")
    for body, found in loops(compiled.as_text() or "").items():
        kinds = ", ".join(f"{n} {kind}" for kind, n in found["kinds"].most_common())
        print(f"{body} in {found['in']}: {sum(found['kinds'].values())} instructions ({kinds})")
        print(f"  {found['cycles']:,} estimated cycles", *found["notes"], sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
