"""What the devices of a mesh send each other for the gradient of one microbatch.

    JAX_PLATFORMS=cpu python -m benchmarks.collectives --topology=v5e:2x4 [--json=FILE]
    NPROC=32 JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python -m benchmarks.collectives            # cost of 1, 2, 4, 8 host devices

Claim: under FSDP the devices exchange what they must and little else: each parameter is gathered
twice (forward, backward) in the compute type, its gradient reduce-scattered once in float32.

Counted from the HLO of `accumulate` (one jitted gradient, bf16, recomputed layers) after the
compiler's own passes, for a TPU slice that need not be there. Bytes are what one device sends on a
ring: (n - 1) / n of the array for all-gather and reduce-scatter, twice that for an all-reduce.
Instructions in loops count once per trip; loops whose count depends on the data (the chunks of the
vocabulary head) are listed by themselves, per trip. Under tensor parallelism the least is 4
all-reduces of the activations per layer (Shoeybi et al., https://arxiv.org/abs/1909.08053), and
recomputing a layer repeats the two of its forward.

The host part times the same gradient on 1, 2, 4 and 8 CPU devices that share the cores, at the same
total work: the ratio to one device is the cost of partitioning. NPROC is the number of XLA's
threads: with few, independent collectives of eight devices can wait for each other for ever.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ahead_of_time
from benchmarks.roofline import best_seconds, machine_load
from benchmarks.shapes import SHAPES, transformer_config
from jaxrl.models.transformer import init_params
from jaxrl.tools.plan import hlo
from jaxrl.types import TrainState

MESHES = ("fsdp=8", "fsdp=4,tensor=2")
HOST_DEVICES = (1, 2, 4, 8)
MIB = 2**20


def mesh_sizes(text: str) -> dict[str, int]:
    """Axis sizes of "fsdp=4,tensor=2"."""
    return {axis: int(size) for axis, size in (pair.split("=") for pair in text.split(","))}


def mesh_axes(group: Sequence[int], mesh: Mapping[str, int]) -> str:
    """The mesh axes along which the devices of a group differ."""
    coordinates = np.unravel_index(np.asarray(group), tuple(mesh.values()))
    return "+".join(
        axis for axis, place in zip(mesh, coordinates, strict=True) if len(set(place.tolist())) > 1
    )


def least(state: TrainState, mesh: Mapping[str, int], dtype: Any) -> dict[str, float]:
    """Bytes that a device must send over fsdp, by collective: 2 all-gathers, 1 reduce-scatter."""
    elements = 0
    for x in jax.tree.leaves(state.params):
        axes = [axis for entry in x.sharding.spec for axis in np.atleast_1d(entry) if axis]
        if "fsdp" in axes:
            elements += math.prod(x.sharding.shard_shape(x.shape)) * mesh["fsdp"]
    share = (mesh["fsdp"] - 1) / mesh["fsdp"]
    return {
        "all-gather": 2 * elements * jnp.dtype(dtype).itemsize * share,
        "reduce-scatter": elements * 4 * share,
    }


def count(found: Sequence[hlo.Collective], mesh: Mapping[str, int]) -> list[dict[str, Any]]:
    """One row for each kind, set of mesh axes, and kind of loop."""
    rows: dict[tuple, dict[str, Any]] = {}
    for one in found:
        key = (one.kind, mesh_axes(one.group, mesh), one.fixed)
        row = rows.setdefault(key, {"instructions": 0, "executions": 0, "bytes": 0.0})
        row["instructions"] += 1
        row["executions"] += one.times
        row["bytes"] += one.times * one.moved
    names = ("kind", "axes", "fixed_count")
    listed = [dict(zip(names, key, strict=True)) | row for key, row in rows.items()]
    return sorted(listed, key=lambda row: (not row["fixed_count"], -row["bytes"]))


def measure(arguments: argparse.Namespace, mesh_text: str) -> dict[str, Any]:
    """Collectives of the gradient on one mesh, and the least there can be."""
    devices = ahead_of_time.topology_devices(arguments.topology)
    sizes, dtype = mesh_sizes(mesh_text), jnp.bfloat16
    run = ahead_of_time.assemble(
        transformer_config(arguments.shape),
        devices,
        sizes,
        rows=arguments.rows,
        length=arguments.length,
        settings={"trainer.bf16": True},
    )
    compiled = ahead_of_time.accumulate_call(run).lower().compile()
    mesh = dict(run.mesh.shape)
    found = hlo.collectives(compiled.as_text())
    largest = sorted(found, key=lambda one: -one.moved * one.times)[: arguments.largest]
    return {
        "mesh": mesh_text,
        "rows": count(found, mesh),
        "least": least(run.state, mesh, dtype),
        "largest": [
            [one.kind, one.array, one.times, one.times * one.moved, one.source] for one in largest
        ],
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    }


def table(result: Mapping[str, Any]) -> str:
    """The result of one mesh as text, MiB."""
    lines = [
        f"mesh {result['mesh']}, temporaries {result['temporaries'] / MIB:,.0f} MiB per device",
        f"{'collective':<20}{'axes':<14}{'count':>7}{'executed':>10}{'MiB sent':>11}{'least':>9}",
    ]
    for row in result["rows"]:
        fsdp = row["axes"] == "fsdp" and row["fixed_count"]
        bound = result["least"].get(row["kind"], 0) if fsdp else 0
        trips = "" if row["fixed_count"] else "  per trip of the head's loop"
        lines.append(
            f"{row['kind']:<20}{row['axes']:<14}{row['instructions']:>7}{row['executions']:>10}"
            f"{row['bytes'] / MIB:>11,.1f}{bound / MIB:>9,.1f}{trips}"
        )
    total = sum(row["bytes"] for row in result["rows"])
    bound = sum(result["least"].values())
    lines.append(f"{'all':<51}{total / MIB:>11,.1f}{bound / MIB:>9,.1f}")
    lines += [
        f"  {sent / MIB:>9,.1f} MiB  {times} x {kind} {array}  {source[-70:]}"
        for kind, array, times, sent, source in result["largest"]
    ]
    return "\n".join(lines)


def host_seconds(shape: str, rows: int, length: int, repeats: int) -> list[dict[str, Any]]:
    """Seconds of the same gradient on more and more host devices."""
    model, results = transformer_config(shape), []
    for number in HOST_DEVICES:
        devices = jax.devices("cpu")[:number]
        if len(devices) < number:
            print(f"no {number} devices; start with the XLA_FLAGS of --help")
            break
        run = ahead_of_time.assemble(
            model, devices, {"fsdp": number}, rows=rows, length=length, settings={}
        )
        updater, shapes = run.updater, ahead_of_time.accumulate_call(run).args
        params = init_params(model, 0, jax.tree.map(lambda x: x.sharding, run.state.params))
        given = jax.tree.map(
            lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding), shapes[2:-1]
        )
        grads = updater.zeros(params)

        def step(grads: Any = grads, updater: Any = updater, rest: tuple = (params, *given)) -> Any:
            return updater.accumulate(jax.tree.map(jnp.copy, grads), *rest, jax.random.key(0))

        results.append({"devices": number, "seconds": best_seconds(step, repeats=repeats)})
    return results


def host_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Seconds by devices, and their ratio to one device."""
    lines = [f"{'host devices':<14}{'seconds':>9}{'times one':>11}"]
    for row in results:
        ratio = row["seconds"] / results[0]["seconds"]
        lines.append(f"{row['devices']:<14}{row['seconds']:>9.3f}{ratio:>11.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", help='TPU slice to compile for, "v5e:2x4"; needs libtpu')
    parser.add_argument("--meshes", nargs="*", default=list(MESHES))
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, default=8, help="of the microbatch")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--largest", type=int, default=8, help="instructions listed one by one")
    parser.add_argument("--repeats", type=int, default=5, help="of the host part")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--smoke", action="store_true", help="the host part on a tiny shape")
    arguments = parser.parse_args(argv)
    load, report = machine_load(), {}
    if arguments.topology:
        report["meshes"] = [measure(arguments, mesh) for mesh in arguments.meshes]
        print(f"{arguments.shape} on {arguments.topology}: {arguments.rows} x {arguments.length}")
        print("\n\n".join(map(table, report["meshes"])))
    else:
        shape, size = ("smoke", (8, 8)) if arguments.smoke else ("3m", (16, 192))
        report["host"] = host_seconds(shape, *size, arguments.repeats)
        print(f"{shape}, {size[0]} x {size[1]} tokens in all, float32; load before {load}")
        print(host_table(report["host"]))
    if arguments.json:
        arguments.json.write_text(json.dumps({"load": load} | report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
