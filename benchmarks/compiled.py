"""Programs of a training step as the TPU compiler makes them, for slices that need not be there.

    JAX_PLATFORMS=cpu python -m benchmarks.compiled --topology=v5e:2x4 --json=FILE
    python -m benchmarks.compiled --before=FILE --after=FILE     # a table of two such files

Claim: no program sorts the vocabulary, copies the cache of a layer or multiplies in a type that is
slower than the run's. It needs libtpu.

Compiles GRPO at the true widths of a published shape and with few layers (all programs of a layer
are alike): mesh fsdp over all chips, bfloat16, rows of 512 + 1024 tokens packed by 4 (update) and 8
(scorer), 64 slots on each chip. Figures are of one chip and one execution: the compiler's estimate
of cycles (it has none for kernels, sorts, large scatters, or waits for the network), bytes of main
memory read and written (kernels apart, as if they read all they are given), bytes sent by kind of
collective, temporaries, sorts, copies as large as the pages of a layer, FLOPs of products by dtype
(without those in kernels). They are read from the text of the program, loops by trips; none is a
measurement. "prefill" and "decode block" are one program: what a chunk of prompts adds to a block,
and a block without chunks.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.shapes import SHAPES
from jaxrl import config as cfg
from jaxrl.tools.plan import hlo, topology
from jaxrl.tools.plan.operations import Program
from jaxrl.tools.plan.phases import SAMPLING, Phase, phases
from jaxrl.tools.plan.run import Run
from jaxrl.training.resident_memory import device_bytes

SETTINGS = {
    "trainer.bf16": True,
    "trainer.flash_attn": True,
    "trainer.gradient_checkpointing": True,
    "trainer.use_sample_packing": True,
    "trainer.few_shapes": True,
    "trainer.max_prompt_length": 512,
    "trainer.micro_train_batch_size_per_gpu": 4,
    "trainer.micro_forward_batch_size_per_gpu": 8,
    "generator.n_samples_per_prompt": 8,
    "generator.sampling_params.max_generate_length": 1024,
    "generator.inference_engine.model_dtype": "bfloat16",
}
SLOTS = 64  # of a chip
NAMES = {  # of the phases, as in the table
    "load weights": "sync",
    "prefill": "prefill",
    "decode": "decode block",
    "log-probs": "scorer",
    "gradient": "gradient",
    "apply": "apply",
}
COPIES = ("copy", "copy-done", "slice-done", "transpose")
MIB = 2**20


def assemble(shape: str, layers: int, machine: topology.Machine, folder: Path) -> Run:
    """The run, of a model folder that is written; a minibatch is 8 prompts a chip, a step 16."""
    chips = len(machine.devices)
    written = SHAPES[shape] | {"num_hidden_layers": layers, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(written))
    settings = {
        "trainer.policy.model.path": str(folder),
        "trainer.policy.mesh.fsdp": chips,
        "trainer.train_batch_size": 16 * chips,
        "trainer.policy_mini_batch_size": 8 * chips,
        "generator.inference_engine.max_num_seqs": SLOTS * chips,
    }
    config = cfg.resolve(cfg.TrainConfig.from_cli_overrides(SETTINGS | settings))
    return Run(config, machine)


def figures(phase: Phase, compiled: Any) -> dict[str, Any]:
    """Read the compiled program of a phase."""
    stats, text = compiled.memory_analysis(), compiled.as_text() or ""
    program = Program(text, phase.trips, phase.inner)
    totals = program.totals()
    sent: dict[str, float] = dict.fromkeys(hlo.KINDS, 0.0)
    for one in hlo.collectives(text, phase.inner):
        sent[one.kind] += one.times * (1 if one.fixed else phase.trips) * one.moved
    sorts, copies = program.find(("sort",)), []
    if phase.kind in SAMPLING:
        layer = min(map(device_bytes, jax.tree.leaves(phase.call.args[1])))
        copies = program.find(COPIES, layer)
    return {
        "cycles": totals.cycles,
        "moved": totals.moved,
        "kernel_moved": totals.kernel_moved,
        "sent": {kind: amount for kind, amount in sent.items() if amount},
        "temporaries": stats.temp_size_in_bytes if stats else None,
        "sorts": [one.array for one in sorts],
        "copies": [one.array for one in copies],
        "products": totals.products,
    }


def table(report: Mapping[str, Any]) -> str:
    """The figures of one model on one slice as text."""
    lines = [
        f"{report['shape']}, {report['layers']} layers, {report['topology']}, jax {report['jax']}",
        f"{'program':<14}{'Mcycles':>9}{'GB':>8}{'kernels':>9}{'MB sent':>10}{'MiB temps':>11}"
        f"{'sorts':>7}{'copies':>8}  TFLOP by dtypes",
    ]
    for name, row in report["programs"].items():
        products = ", ".join(
            f"{types}: {flops / 1e12:.3g}" for types, flops in sorted(row["products"].items())
        )
        lines.append(
            f"{name:<14}{row['cycles'] / 1e6:>9.1f}{row['moved'] / 1e9:>8.2f}"
            f"{row['kernel_moved'] / 1e9:>9.2f}{sum(row['sent'].values()) / 1e6:>10.1f}"
            f"{row['temporaries'] / MIB:>11.1f}{len(row['sorts']):>7}{len(row['copies']):>8}"
            f"  {products}"
        )
    return "\n".join(lines)


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Markdown: the figures of two files side by side, `before -> after`."""
    lines = [
        "| model, slice | program | Mcycles | GB moved | MB sent | MiB temps | sorts | copies "
        "| TFLOP in float32 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    old = {(one["shape"], one["topology"]): one["programs"] for one in before["reports"]}
    for one in after["reports"]:
        was = old.get((one["shape"], one["topology"]), {})
        for name, row in one["programs"].items():
            pairs = zip(_cells(was[name]) if name in was else ["?"] * 7, _cells(row), strict=True)
            cells = " | ".join(f"{a} -> {b}" if a != b else a for a, b in pairs)
            lines.append(f"| {one['shape']}, {one['topology']} | {name} | {cells} |")
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    operands = {types: types.split(" -> ")[0].split(" x ") for types in row["products"]}
    slow = sum(flops for types, flops in row["products"].items() if "f32" in operands[types])
    return [
        f"{row['cycles'] / 1e6:.1f}",
        f"{row['moved'] / 1e9:.2f}",
        f"{sum(row['sent'].values()) / 1e6:.1f}",
        f"{row['temporaries'] / MIB:.1f}",
        str(len(row["sorts"])),
        str(len(row["copies"])),
        f"{slow / 1e12:.2f}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Compile and print, or compare two files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default=["v5e:2x4"], nargs="+", help="default: v5e:2x4")
    parser.add_argument("--shape", default=["qwen2.5-1.5b"], nargs="+", help="of SHAPES")
    parser.add_argument("--layers", type=int, default=6, help="default: 6, which are scanned")
    parser.add_argument("--programs", nargs="+", default=list(NAMES.values()), help="default: all")
    parser.add_argument("--json", type=Path, help="write the figures there, after each program")
    parser.add_argument("--before", type=Path, help="a file of --json; nothing is compiled")
    parser.add_argument("--after", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.before:
        print(compared(*(json.loads(x.read_text()) for x in (arguments.before, arguments.after))))
        return 0
    reports: list[dict[str, Any]] = []
    for name in arguments.topology:
        machine = topology.machine(name)
        for shape in arguments.shape:
            reports.append(
                {
                    "shape": shape,
                    "layers": arguments.layers,
                    "topology": name,
                    "jax": jax.__version__,
                    "programs": {},
                }
            )
            with tempfile.TemporaryDirectory() as folder:
                run = assemble(shape, arguments.layers, machine, Path(folder))
                wanted = [
                    x for x in phases(run, run.engine()) if NAMES.get(x.name) in arguments.programs
                ]
            call, compiled = None, None
            for phase in wanted:
                if phase.call is not call:  # those of a block share one
                    call, compiled = phase.call, phase.call.lower().compile()
                reports[-1]["programs"][NAMES[phase.name]] = figures(phase, compiled)
                if arguments.json:
                    arguments.json.write_text(json.dumps({"reports": reports}, indent=1))
            print(table(reports[-1]) + "\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
