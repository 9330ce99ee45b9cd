"""Memory of the vocabulary head and of the whole gradient, from the compiler, before any run.

    JAX_PLATFORMS=cpu python -m benchmarks.memory --topology=v5e:2x4 [--json=FILE] [--step]
    python -m benchmarks.memory                     # for this machine's own first device

Claim: at vocabulary 151,936, d 2048 and 16k tokens the temporaries of value and gradient of our
head are at most 0.6 GiB; those of logits [B, T, V] and a float32 log-softmax are more than 9 GiB.

The head is `jaxrl.training.forward.score` from the last hidden states to log-probs and entropy, in
rows of 1024 tokens that all want a log-prob, bfloat16 weights, by each kernel that the device has;
"naive" unembeds the same hidden states at once. All are differentiated by weights and hidden
states. These gradients are outputs, not temporaries. `--step` compiles `accumulate` of whole
models, by remat policy and mesh; its peak is arguments + outputs + temporaries of one device,
AdamW's moments not included.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import ahead_of_time
from benchmarks.collectives import mesh_sizes
from benchmarks.shapes import SHAPES, transformer_config
from jaxrl.array_ops import Array
from jaxrl.models.kernels import HEAD_LOG_PROBS
from jaxrl.models.remat import REMAT_POLICIES
from jaxrl.models.transformer import Params, abstract_params, head_axes
from jaxrl.parallel import Placement, make_mesh
from jaxrl.training.forward import Head, Targets, score
from jaxrl.types import ModelRows

GIB = 2**30
ROW = 1024  # tokens


def ours(
    kernel: str,
    head: Head,
    weights: Params,
    hidden: Array,
    rows: ModelRows,
    placement: Placement,
) -> tuple[Array, Array]:
    """Log-probs and entropy as the trainer computes them by a kernel of `HEAD_LOG_PROBS`."""
    head = dataclasses.replace(head, kernel=kernel)
    given = jax.tree.map(lambda x: x[:, :-1], (hidden, Targets(rows.targets, None), rows.wanted))
    return score(head, weights, *given, placement)


def naive(
    head: Head, weights: Params, hidden: Array, rows: ModelRows, placement: Placement
) -> tuple[Array, Array]:
    """The same from logits [B, T, V]."""
    del placement  # one device
    return head(weights, hidden[:, :-1], Targets(rows.tokens[:, 1:], None))


def head_temporaries(
    scores: Callable[..., tuple[Array, Array]],
    vocabulary: int,
    width: int,
    tokens: int,
    device: jax.Device,
) -> int | str:
    """Bytes of temporaries of value and gradient; the compiler's words if they do not fit."""
    placement = Placement(make_mesh(devices=[device]))
    array = functools.partial(jax.ShapeDtypeStruct, sharding=placement.sharding((), ()))
    model = dataclasses.replace(
        transformer_config("smoke"), vocab_size=vocabulary, hidden_size=width, tie_embeddings=False
    )
    head = Head(model, temperature=1.0, dtype=jnp.bfloat16, with_entropy=True)
    shapes = abstract_params(model)
    weights = {name: array(shapes[name].shape, jnp.bfloat16) for name in head_axes(model)}
    shape = (max(tokens // ROW, 1), min(tokens, ROW))
    hidden, ints = array((*shape, width), jnp.bfloat16), array(shape, jnp.int32)
    rows = ModelRows(ints, ints, ints, ints, array(shape, jnp.bool_))

    def objective(weights: Params, hidden: Array, rows: ModelRows) -> Array:
        log_probs, entropy = scores(head, weights, hidden, rows, placement)
        return log_probs.sum() + 0.01 * entropy.sum()

    lowered = jax.jit(jax.value_and_grad(objective, argnums=(0, 1))).lower(weights, hidden, rows)
    return _memory(lowered, lambda stats: stats.temp_size_in_bytes)


def step_peak(
    shape: str, policy: str, mesh: str, devices: list[jax.Device], rows: int, length: int
) -> int | str:
    """Bytes of one device during `accumulate`; the compiler's words if they do not fit."""
    run = ahead_of_time.assemble(
        transformer_config(shape),
        devices,
        mesh_sizes(mesh),
        rows=rows,
        length=length,
        settings={"trainer.bf16": True, "trainer.remat_policy": policy},
    )
    return _memory(
        ahead_of_time.accumulate_call(run).lower(),
        lambda stats: (
            stats.argument_size_in_bytes
            + stats.output_size_in_bytes
            - stats.alias_size_in_bytes
            + stats.temp_size_in_bytes
        ),
    )


def _memory(lowered: jax.stages.Lowered, figure: Callable[[Any], int]) -> int | str:
    try:
        return figure(lowered.compile().memory_analysis())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return str(error).splitlines()[0]


def show(value: int | str) -> str:
    """GiB, or what the compiler said."""
    return value if isinstance(value, str) else f"{value / GIB:.3f} GiB"


def measure_head(arguments: argparse.Namespace, device: jax.Device) -> list[dict[str, Any]]:
    """Temporaries of the head by number of tokens, printed as they come."""
    vocabulary, width = (512, 16) if arguments.smoke else (151_936, 2048)
    results = []
    kernels = HEAD_LOG_PROBS.order[device.platform]
    ways: dict[str, Callable[..., tuple[Array, Array]]] = {"naive": naive}
    ways |= {name: functools.partial(ours, name) for name in kernels}
    print(f"head, vocabulary {vocabulary}, d {width}, temporaries on {device.device_kind}")
    for tokens in [64] if arguments.smoke else arguments.tokens:
        row: dict[str, Any] = {"tokens": tokens}
        for name, scores in ways.items():
            row[name] = head_temporaries(scores, vocabulary, width, tokens, device)
        print(f"{tokens:>8} tokens", *(f"{name} {show(row[name])}" for name in ways), sep="   ")
        results.append(row)
    return results


def measure_step(arguments: argparse.Namespace, devices: list[jax.Device]) -> list[dict[str, Any]]:
    """Peaks of the gradient by shape, mesh and remat policy, printed as they come."""
    results = []
    rows, length = (len(devices), 16) if arguments.smoke else (arguments.rows, arguments.length)
    for shape in ["smoke"] if arguments.smoke else arguments.shapes:
        for mesh in arguments.meshes or [f"fsdp={len(devices)}"]:
            for policy in arguments.policies:
                peak = step_peak(shape, policy, mesh, devices, rows, length)
                print(f"{shape} {rows} x {length}  {mesh:<18}{policy:<12}{show(peak)}")
                results.append(dict(shape=shape, mesh=mesh, policy=policy, peak=peak))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", help='TPU slice to compile for, "v5e:2x4"; needs libtpu')
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 8192, 16384])
    parser.add_argument("--step", action="store_true", help="whole models instead of the head")
    parser.add_argument(
        "--shapes", nargs="*", choices=list(SHAPES), default=["qwen2.5-0.5b", "qwen2.5-1.5b"]
    )
    parser.add_argument("--meshes", nargs="*", help='"fsdp=4,tensor=2"; default: all fsdp')
    parser.add_argument("--policies", nargs="*", default=list(REMAT_POLICIES))
    parser.add_argument("--rows", type=int, default=8, help="of the microbatch of --step")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape")
    arguments = parser.parse_args(argv)
    devices = (
        ahead_of_time.topology_devices(arguments.topology) if arguments.topology else jax.devices()
    )
    if arguments.step:
        results = measure_step(arguments, devices)
    else:
        results = measure_head(arguments, devices[0])
    if arguments.json:
        report = {"topology": arguments.topology, "rows": results}
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
