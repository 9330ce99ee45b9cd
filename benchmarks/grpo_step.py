"""Seconds of one GRPO step and its phases, ours beside Tunix and TRL.

    python -m benchmarks.grpo_step --trl-python=VENV/bin/python --tunix-python=VENV/bin/python
    python -m benchmarks.grpo_step --device=gpu     # jaxrl alone, Qwen2.5-0.5B and 1.5B shapes

The peers, each in an environment of its own: `pip install trl==1.16.0 torch==2.13.0` and `pip
install google-tunix==0.1.7 jax==0.10.2 flax==0.12.8`. A peer that is not given is left out.

Claim: a GRPO step of the 3M-parameter shape (2 layers, d 256, vocabulary 4096, float32, 4 prompts x
8 samples, 64 + 128 tokens, KL to a reference, AdamW) takes jaxrl less time than Tunix and TRL on
the same CPU, at equal and at skewed response lengths.

The systems run in turns, a peer's step next to one of ours, each in a process of its own. "full":
every response has 128 tokens. "skewed": lengths are the quantiles of an exponential distribution
cut at 128, mean 39, in an order drawn once. Each system is kept to these lengths: ours by a limit
for each row, TRL and Tunix by forcing the end-of-sequence token. Fractions of the matmul rate count
useful FLOPs only (see `roofline.py`). A dash: the system has no such phase. "cpu s" is the time of
all cores; on a machine with other work it says more than the wall clock.
"""

import argparse
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from benchmarks import roofline
from benchmarks.shapes import (
    GENERATION_PROMPT,
    characters,
    transformer_config,
    write_model_folder,
)
from benchmarks.systems.worker import MARK, Workload

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROOT = Path(__file__).parent.parent
PHASES = ("generation", "reference", "old", "update", "total")  # seconds; and "cpu"
WARMUP_STEPS = 2  # the second runs with the layout that the first compiled for
STEP_BATCHES = 16  # distinct batches of prompts
SIZES: dict[str, dict[str, Any]] = {
    "smoke": dict(prompts=2, samples=4, prompt_length=8, max_tokens=8, micro_batch_rows=8),
    "3m": dict(prompts=4, samples=8, prompt_length=64, max_tokens=128, micro_batch_rows=8),
    "qwen2.5-0.5b": dict(
        prompts=16, samples=8, prompt_length=256, max_tokens=512, micro_batch_rows=8
    ),
    "qwen2.5-1.5b": dict(
        prompts=16, samples=8, prompt_length=256, max_tokens=512, micro_batch_rows=8
    ),
}


def skewed_lengths(rows: int, max_tokens: int, scale: float = 0.32) -> list[int]:
    """Quantiles of an exponential distribution, cut at max_tokens, in a fixed random order.

    The scale 0.32 max_tokens makes the mean 39 for 32 rows of at most 128 tokens; 0.45 makes it 40
    % of max_tokens.
    """
    quantiles = [-scale * max_tokens * math.log(1 - (i + 0.5) / rows) for i in range(rows)]
    lengths = [max(1, min(max_tokens, round(q))) for q in quantiles]
    random.Random(0).shuffle(lengths)
    return lengths


def make_workload(folder: Path, shape: str, *, bf16: bool = False) -> Workload:
    """Write the model folder and the prompts of a shape."""
    write_model_folder(folder, shape)
    size = SIZES[shape]
    rows, draw, alphabet = size["prompts"] * size["samples"], random.Random(1), characters(shape)
    with open(folder / "prompts.jsonl", "w", encoding="utf-8") as lines:
        for _ in range(STEP_BATCHES * size["prompts"]):
            prompt = "".join(draw.choices(alphabet, k=size["prompt_length"] - 1))
            text = (
                prompt + GENERATION_PROMPT
            )  # as the chat template has it, for systems that use none
            lines.write(json.dumps({"prompt": prompt, "text": text}) + "\n")
    lengths = {
        "full": [size["max_tokens"]] * rows,
        "skewed": skewed_lengths(rows, size["max_tokens"]),
    }
    return Workload(
        folder=str(folder),
        lengths=lengths,
        kl_coef=0.04,
        learning_rate=1e-6,
        bf16=bf16,
        **size,
    )


# ---- the systems ---------------------------------------------------------------------------------


class System:
    """The process of one system."""

    def __init__(self, name: str, process: subprocess.Popen, log: IO[str]) -> None:
        self.name, self.process, self.log = name, process, log
        self.about = self._read()

    def step(self, workload: str) -> dict[str, float]:
        """Seconds by phase of one more step."""
        assert self.process.stdin is not None
        self.process.stdin.write(workload + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        self.log.seek(0)
        raise RuntimeError(f"{self.name} ended:\n{self.log.read()[-4000:]}")


@contextmanager
def start(name: str, python: str, work: "DataclassInstance") -> Iterator[System]:
    """Run benchmarks/systems/<name>_step.py on `work` under `python` until the block ends."""
    command = [python, "-m", f"benchmarks.systems.{name}_step", json.dumps(asdict(work))]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
        )
        try:
            yield System(name, process, log)
        finally:
            process.kill()
            process.wait()


def peers(arguments: argparse.Namespace) -> dict[str, str]:
    """The peers that can be run, and their Python: as given, else ours if it can import them."""
    found = {}
    for name, module in (("trl", "trl"), ("tunix", "tunix")):
        python = getattr(arguments, f"{name}_python")
        if python is None and importlib.util.find_spec(module) is not None:
            python = sys.executable
        if python is not None:
            found[name] = python
    return found


def measure(systems: Sequence[System], repeats: int) -> list[dict[str, Any]]:
    """Steps in turns: for each workload and repeat, ours before each peer.

    Returns:
        One record per step: workload, system, pair (number of ours and the peer's step after it),
        seconds by phase.
    """
    ours, *others = systems
    for system in systems:
        for workload in ("full", "skewed"):
            for _ in range(WARMUP_STEPS):
                system.step(workload)
    records = []
    for repeat in range(repeats):
        for workload in ("full", "skewed"):
            for peer in others or [None]:
                for system in (ours, peer) if peer else (ours,):
                    record = {"workload": workload, "system": system.name}
                    pair = f"{repeat}/{peer.name if peer else ''}"
                    records.append(record | {"pair": pair, "seconds": system.step(workload)})
    return records


# ---- the report ----------------------------------------------------------------------------------


def summarise(
    records: Sequence[Mapping[str, Any]], work: Workload, shape: str, rates: roofline.Rates
) -> list[dict[str, Any]]:
    """Medians of each system and workload, useful tokens/s, fractions of the matmul rate."""
    rows = []
    for workload, lengths in work.lengths.items():
        flops = roofline.step_flops(
            transformer_config(shape), work.prompts, work.prompt_length, lengths
        )
        here = [r for r in records if r["workload"] == workload]
        for name in dict.fromkeys(r["system"] for r in here):
            steps = [r["seconds"] for r in here if r["system"] == name]
            seconds = {
                phase: statistics.median(step[phase] for step in steps) for phase in steps[0]
            }
            rows.append(
                {
                    "shape": shape,
                    "workload": workload,
                    "system": name,
                    "steps": len(steps),
                    "seconds": seconds,
                    "least_total": min(step["total"] for step in steps),
                    "useful_tokens_per_second": sum(lengths) / seconds["total"],
                    "fraction_of_matmul_rate": {
                        phase: flops[phase] / seconds[phase] / rates.matmul_flops
                        for phase in PHASES
                        if phase in seconds
                    },
                    "times_ours": times_ours(here, name),
                }
            )
    return rows


def times_ours(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """Median over adjacent pairs of a system's total over ours."""
    ours = {r["pair"]: r["seconds"]["total"] for r in records if r["system"] == "jaxrl"}
    theirs = [r for r in records if r["system"] == name]
    return statistics.median(r["seconds"]["total"] / ours[r["pair"]] for r in theirs)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Seconds and, in brackets, per cent of the matmul rate."""
    heads = "".join(f"{phase + ' s (%)':>17}" for phase in PHASES)
    print(f"{'shape':14}{'lengths':9}{'system':8}{heads}{'cpu s':>8}{'tokens/s':>10}{'x ours':>8}")
    for row in rows:
        seconds, fraction = row["seconds"], row["fraction_of_matmul_rate"]
        cells = [
            f"{seconds[p]:.3f} ({100 * fraction[p]:.1f})" if p in seconds else "-" for p in PHASES
        ]
        print(
            f"{row['shape']:14}{row['workload']:9}{row['system']:8}"
            + "".join(f"{cell:>17}" for cell in cells)
            + f"{seconds['cpu']:>8.2f}{row['useful_tokens_per_second']:>10.0f}"
            + f"{row['times_ours']:>8.2f}"
        )


def run_shape(shape: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All systems on one shape."""
    load = roofline.machine_load()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work = make_workload(folder, shape, bf16=arguments.device == "gpu")
        wanted = {} if arguments.device == "gpu" or arguments.smoke else peers(arguments)
        systems = [
            stack.enter_context(start(name, python, work))
            for name, python in ({"jaxrl": sys.executable} | wanted).items()
        ]
        records = measure(systems, 1 if arguments.smoke else arguments.repeats)
        about = {system.name: system.about for system in systems}
    rates = roofline.Rates(**about["jaxrl"].pop("rates"))
    rows = summarise(records, work, shape, rates)
    print(
        f"\n{about['jaxrl']['device']}: {rates.matmul_flops / 1e9:.0f} GFLOP/s "
        f"{'bfloat16' if work.bf16 else 'float32'} matmul, {rates.bandwidth / 1e9:.1f} GB/s; load "
        f"{load} before, {roofline.machine_load()} after; medians of {arguments.repeats} repeats"
    )
    print_table(rows)
    return {"load": load, "rates": asdict(rates), "about": about, "rows": rows, "steps": records}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="default: cpu")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape once, without peers")
    parser.add_argument("--repeats", type=int, default=5, help="default: 5")
    parser.add_argument("--trl-python", help="Python with trl; default: this one if it has it")
    parser.add_argument("--tunix-python", help="Python with google-tunix; default as above")
    parser.add_argument("--json", type=Path, default=Path("grpo_step.json"), help="output file")
    arguments = parser.parse_args(argv)
    wanted = ("qwen2.5-0.5b", "qwen2.5-1.5b") if arguments.device == "gpu" else ("3m",)
    results = [run_shape(s, arguments) for s in (("smoke",) if arguments.smoke else wanted)]
    arguments.json.write_text(
        json.dumps(
            {"benchmark": "grpo_step", "device": arguments.device, "results": results}, indent=1
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
