"""Useful tokens/s, MFU and peak memory of an update, packed and padded, beside torch.

    python -m benchmarks.train_step --torch-python=VENV/bin/python    # with torch, transformers
    python -m benchmarks.train_step --shapes 3m smollm2-135m
    python -m benchmarks.train_step --device=gpu    # Qwen3-0.6B shape, bf16, full recompute

With torch on the same GPU set XLA_PYTHON_CLIENT_PREALLOCATE=false, or JAX takes its memory.

Claim: where trajectories have 40 % of the longest's length on average, packed rows train at least
1.8 times as many useful tokens per second as rows padded to the longest, on the same machine.

An update is the gradient of the clipped policy loss (`trainer.algorithm`'s defaults, old log-probs
given) on one device, in microbatches of at most `max_tokens` rows x tokens, and one AdamW step: the
trainer's own `Updater`. Useful tokens are those of the trajectories; all but the first are sampled.
Cases: "N": every trajectory has N tokens. "skewed": quantiles of an exponential distribution with
scale 0.45 of the longest, cut there, mean 40 % of it: what a sampler gives that stops with the same
probability at every token and has a limit. There, "padded" runs every row at the length of the
longest,
"sorted" sorts rows by length and pads to the longest of a microbatch (`use_sample_packing=False`),
"packed" is `use_sample_packing=True`. torch sorts.

MFU = FLOPs of the useful tokens / seconds / the matmul rate measured in the same run
(`roofline.py`). FLOPs are 6 N per token, N the parameters of layers and head, and 12 layers x heads
x head_dim per position that a token sees; recomputation does not count. Peak memory is the
compiler's figure for the gradient of a full microbatch: arguments, results and temporaries. The
systems run in turns; medians.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import roofline
from benchmarks.grpo_step import skewed_lengths, start
from benchmarks.shapes import SHAPES, transformer_config
from benchmarks.systems.worker import TrainWork
from jaxrl import config as cfg
from jaxrl.config import TrainConfig, resolve
from jaxrl.data.microbatches import microbatches
from jaxrl.data.packing import length_bucket
from jaxrl.models.placement import place_model
from jaxrl.models.transformer import init_params
from jaxrl.parallel import make_mesh, replicated
from jaxrl.tools.prove.training import random_batch
from jaxrl.training.build import assemble_update, make_forward_pass
from jaxrl.training.optim import init_state

SKEWED, SCALE = "skewed", 0.45
PRIME_RL = "prime-rl, public figure, 1 H100, RL step of 2 x 16,384 tokens: 16,500 tokens/s"
WARMUP_STEPS = 2  # the second runs with the layout that the first compiled for


@dataclasses.dataclass(frozen=True)
class Size:
    """What is measured of a shape: trajectories of the skewed case, tokens, equal lengths."""

    trajectories: int
    longest: int
    rows: int  # of a microbatch, of the longest trajectory
    equal: tuple[int, ...]


SIZES = {
    "smoke": Size(trajectories=8, longest=16, rows=2, equal=()),
    "3m": Size(trajectories=64, longest=512, rows=8, equal=(128, 256, 512, 1024)),
    "smollm2-135m": Size(trajectories=16, longest=256, rows=4, equal=(256,)),
    "qwen3-0.6b": Size(trajectories=32, longest=16_384, rows=1, equal=(4096, 16_384)),
}


def make_work(shape: str, *, bf16: bool) -> TrainWork:
    """The cases of a shape; those of equal lengths are two microbatches each."""
    size = SIZES[shape]
    max_tokens = size.rows * size.longest
    equal = {str(n): [n] * (2 * max_tokens // n) for n in size.equal}
    skewed = skewed_lengths(size.trajectories, size.longest, SCALE)
    return TrainWork(
        model=SHAPES[shape],
        lengths=equal | {SKEWED: [max(n, 2) for n in skewed]},
        max_tokens=max_tokens,
        bf16=bf16,
        recompute=bf16,  # activations of the large shapes would not fit
        learning_rate=1e-6,
    )


class Steps:
    """The trainer's update on one case."""

    def __init__(self, shape: str, work: TrainWork, case: str, *, packed: bool) -> None:
        model, mesh = transformer_config(shape), make_mesh(devices=jax.devices()[:1])
        lengths = np.array(work.lengths[case], np.int32)
        config = _config(work, len(lengths), packed=packed)
        placement = place_model(model, mesh, cfg.sharding_rules(config.trainer.sharding_rules))
        forward_pass = make_forward_pass(config, model, placement)
        optimizer, like, self.updater = assemble_update(
            config, forward_pass, placement, 1000, model
        )
        shardings = jax.tree.map(lambda x: x.sharding, like.params)
        params = init_params(model, 0, shardings)
        self.state = init_state(optimizer, params, shardings, replicated(mesh))
        width = length_bucket(int(lengths.max()))
        self.batch = random_batch(lengths, width, model.vocab_size)
        self.weights, _ = self.updater.weights(self.batch)

    def pad(self) -> "Steps":
        """Every row runs at the length of the longest; what is learnt stays the same."""
        longest = np.full_like(self.batch.lengths, self.batch.lengths.max())
        self.batch = self.batch.replace(lengths=longest)
        return self

    def __call__(self) -> dict[str, float]:
        """Seconds of one update."""
        started = time.perf_counter()
        given = self.state, self.batch, self.weights, jax.random.key(0)
        self.state, _, _ = self.updater.update(*given)
        jax.block_until_ready(self.state)
        return {"total": time.perf_counter() - started}

    def efficiency(self, useful: int) -> float:
        """Useful tokens / tokens that the model runs on."""
        share = self.updater.cut_metrics([self.batch])["trainer/packing_efficiency"]
        return share * useful / float(self.batch.lengths.sum())

    def peak_bytes(self) -> int:
        """Of the gradient of the first microbatch, which is a full one."""
        parts = microbatches((self.batch, self.weights), self.batch, self.updater.microbatching)
        _, rows, of_loss = next(parts)
        params, key = self.state.params, jax.random.key(0)
        given = self.updater.place((rows, *of_loss))
        grads = self.updater.zeros(params)
        memory = self.updater.accumulate.lower(grads, params, *given, key).compile()
        used = memory.memory_analysis()
        donated = used.argument_size_in_bytes - used.alias_size_in_bytes
        return donated + used.output_size_in_bytes + used.temp_size_in_bytes


def _config(work: TrainWork, trajectories: int, *, packed: bool) -> TrainConfig:
    config = TrainConfig()
    config.generator.n_samples_per_prompt = 1
    trainer = config.trainer
    trainer.train_batch_size = trainer.policy_mini_batch_size = trajectories
    trainer.use_sample_packing, trainer.max_tokens_per_microbatch = packed, work.max_tokens
    trainer.bf16, trainer.gradient_checkpointing = work.bf16, work.recompute
    trainer.flash_attn = work.bf16  # on the GPU; the CPU has no kernel
    trainer.policy.optimizer_config.lr = work.learning_rate
    return resolve(config)


def update_flops(shape: str, lengths: Sequence[int]) -> int:
    """FLOPs of an update by the convention of the module: three forwards."""
    model = transformer_config(shape)
    layers = sum(roofline.layers_flops(model, 0, n) for n in lengths)
    return 3 * (layers + roofline.head_flops(model, sum(lengths)))


def measure(systems: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, Any]]:
    """Median seconds of each system, in turns, and what else its last step told."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    told = {}
    for repeat in range(-WARMUP_STEPS, repeats):
        for name, step in systems.items():
            told[name] = step()
            if repeat >= 0:
                seconds[name].append(told[name]["total"])
    return {name: told[name] | {"total": statistics.median(seconds[name])} for name in systems}


def measure_case(
    shape: str, work: TrainWork, case: str, torch_step: Callable[[str], Any] | None, repeats: int
) -> list[dict[str, Any]]:
    """Rows of one case."""
    lengths = work.lengths[case]
    ours = {"packed": Steps(shape, work, case, packed=True)}
    if case == SKEWED:
        ours["sorted"] = Steps(shape, work, case, packed=False)
        ours["padded"] = Steps(shape, work, case, packed=False).pad()
    systems: dict[str, Callable[[], Any]] = dict(ours)
    if torch_step is not None:
        systems["torch"] = lambda: torch_step(case)
    rows = []
    for name, told in measure(systems, repeats).items():
        mine = ours.get(name)
        rows.append(
            {
                "case": case,
                "system": name,
                "seconds": told["total"],
                "tokens_per_second": sum(lengths) / told["total"],
                "flops_per_second": update_flops(shape, lengths) / told["total"],
                "efficiency": mine.efficiency(sum(lengths)) if mine else None,
                "peak_bytes": mine.peak_bytes() if mine else told.get("peak"),
            }
        )
    return rows


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per case and system; packed over the others' rate in the last column."""
    print(
        f"{'case':8}{'system':8}{'s':>9}{'tokens/s':>10}{'MFU %':>7}{'useful %':>10}{'GiB':>8}"
        f"{'packed/this':>13}"
    )
    for row in rows:
        best = next(r for r in rows if r["case"] == row["case"])["tokens_per_second"]
        useful, peak = row["efficiency"], row["peak_bytes"]
        print(
            f"{row['case']:8}{row['system']:8}{row['seconds']:>9.3f}"
            f"{row['tokens_per_second']:>10.0f}{100 * row['mfu']:>7.1f}"
            f"{'-' if useful is None else f'{100 * useful:.1f}':>10}"
            f"{'-' if peak is None else f'{peak / 2**30:.2f}':>8}"
            f"{best / row['tokens_per_second']:>13.2f}"
        )


def run_shape(shape: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All cases of one shape."""
    load = roofline.machine_load()
    bf16 = arguments.device == "gpu"
    work, repeats = make_work(shape, bf16=bf16), 1 if arguments.smoke else arguments.repeats
    dtype = jnp.bfloat16 if bf16 else jnp.float32
    rates, rows = roofline.measure_rates(dtype, smoke=arguments.smoke), []
    with ExitStack() as stack:
        torch_step = about = None
        if arguments.torch_python:
            system = stack.enter_context(start("torch", arguments.torch_python, work))
            torch_step, about = system.step, system.about
        for case in work.lengths:
            rows += measure_case(shape, work, case, torch_step, repeats)
    for row in rows:
        row["mfu"] = row["flops_per_second"] / rates.matmul_flops
    print(
        f"\n{shape} on {jax.devices()[0].device_kind}, {jnp.dtype(dtype).name}, microbatches of "
        f"{work.max_tokens} tokens: {rates.matmul_flops / 1e9:.0f} GFLOP/s matmul; load {load} "
        f"before, {roofline.machine_load()} after; medians of {repeats} repeats"
    )
    print_table(rows)
    if shape == "qwen3-0.6b":
        print(PRIME_RL)
    about_us = {"shape": shape, "load": load, "rates": dataclasses.asdict(rates), "torch": about}
    return about_us | {"rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="default: cpu")
    parser.add_argument("--shapes", nargs="+", choices=list(SIZES), help="default: 3m; gpu: qwen3")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape once")
    parser.add_argument("--repeats", type=int, default=5, help="default: 5")
    parser.add_argument("--torch-python", help="Python with torch and transformers; default: none")
    parser.add_argument("--json", type=Path, default=Path("train_step.json"), help="output file")
    arguments = parser.parse_args(argv)
    shapes = arguments.shapes or (["qwen3-0.6b"] if arguments.device == "gpu" else ["3m"])
    results = [run_shape(s, arguments) for s in (["smoke"] if arguments.smoke else shapes)]
    report = {"benchmark": "train_step", "device": arguments.device, "results": results}
    arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
