"""What of a process grows with the steps of a run: memory, files, threads, its database.

    python -m benchmarks.steady_memory [--steps=2000] [--every=100] [--save-every=40] [--json=FILE]
    python -m benchmarks.steady_memory trainer.logger='["tensorboard"]'    # any field of the config

Claim: a run does not grow with its steps, but for what it writes to disk.

The quickstart with steps of 2 prompts and 2 samples, no evaluation, its checkpoints and pictures,
which come at the end of each epoch of 32 steps, too.
A line every so many steps: resident memory and its anonymous part (MB), what malloc has given out
and what it holds free (MB, Linux with glibc), memory maps, open files, threads, JAX's arrays, the
objects that Python's collector walks, and the size of run.db, its log and metrics.jsonl (kB). The
last line is the growth a step, by least squares over the second half.
"""

import argparse
import ctypes
import gc
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from jaxrl import config as cfg
from jaxrl.records.callbacks import CallbackInput, TrainingCallback, TrainingControl
from jaxrl.records.ledger import FILE
from jaxrl.train import train
from jaxrl.trainer import Trainer

ROOT = Path(__file__).parent.parent
FILES = FILE, f"{FILE}-wal", "metrics.jsonl"


class Allocated(ctypes.Structure):
    """glibc's mallinfo2."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    ]


def measured(folder: Path) -> dict[str, float]:
    """What this process has now; `folder` is the run's."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    sizes = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Allocated
    malloc = mallinfo2()
    found = {
        "rss": sizes["Rss:"] / 1024,
        "anonymous": sizes["Anonymous:"] / 1024,
        "used": (malloc.uordblks + malloc.hblkhd) / 2**20,
        "free": malloc.fordblks / 2**20,
        "maps": len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "arrays": len(jax.live_arrays()),
        "objects": len(gc.get_objects()),
    }
    paths = {name: folder / name for name in FILES}
    return found | {n: path.stat().st_size / 1024 for n, path in paths.items() if path.exists()}


class Watch(TrainingCallback):
    """Measures every so many steps, and prints it."""

    def __init__(self, every: int) -> None:
        self.every, self.rows = every, list[dict[str, float]]()

    def on_step_end(
        self, trainer: Trainer, callback_input: CallbackInput, control: TrainingControl
    ) -> None:
        """Print a line."""
        step = callback_input.global_step
        if step % self.every == 0:
            row = {"step": step, **measured(trainer.recorder.folder)}
            print(", ".join(f"{name} {value:,.0f}" for name, value in row.items()), flush=True)
            self.rows.append(row)


def load_config(folder: str, steps: int, save_every: int, fields: Sequence[str]) -> cfg.TrainConfig:
    """The quickstart in tiny steps."""
    changes: dict[str, Any] = {
        "data.train_data": ["jaxrl.envs.toys.sort_digits:prompts(size=64, seed=0)"],
        "data.val_data": [],
        "generator.n_samples_per_prompt": 2,
        "trainer.train_batch_size": 2,
        "trainer.policy_mini_batch_size": 2,
        "trainer.micro_train_batch_size_per_gpu": 4,
        "trainer.micro_forward_batch_size_per_gpu": 4,
        "trainer.epochs": steps,
        "trainer.max_training_steps": steps,
        "trainer.ckpt_interval": save_every,
        "trainer.logger": [],
        "trainer.resume_mode": "none",
        **{f"trainer.{x}_interval": -1 for x in ("eval", "hf_save", "print_example")},
        **{f"trainer.{x}_path": folder for x in ("log", "ckpt", "export")},
    }
    for field in fields:
        name, _, value = field.partition("=")
        changes[name] = json.loads(value)
    return cfg.apply_overrides(
        cfg.load_config_file(str(ROOT / "configs" / "quickstart.py")), changes
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and write what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100, help="steps between measurements")
    parser.add_argument("--save-every", type=int, default=40, help="steps between checkpoints")
    parser.add_argument("--smoke", action="store_true", help="8 steps, measured every 2nd")
    parser.add_argument("--json", type=Path)
    parser.add_argument("fields", nargs="*", metavar="FIELD=JSON", help="of the config")
    given = parser.parse_args(argv)
    if given.smoke:
        given.steps, given.every, given.save_every = 8, 2, 4
    watch = Watch(given.every)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("jaxrl.train.load_callbacks", lambda names: [watch]),
    ):
        train(load_config(folder, given.steps, given.save_every, given.fields))
    later = watch.rows[len(watch.rows) // 2 :]
    growth = {
        name: float(np.polyfit([r["step"] for r in later], [r[name] for r in later], 1)[0])
        for name in later[-1]
        if name != "step" and all(name in row for row in later)
    }
    print("a step: " + ", ".join(f"{name} {slope:+.4f}" for name, slope in growth.items()))
    if given.json:
        given.json.write_text(json.dumps({"rows": watch.rows, "growth a step": growth}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
