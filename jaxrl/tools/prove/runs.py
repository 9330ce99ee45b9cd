"""Whole runs: the quickstart to its reward, and one that is killed and goes on."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from jaxrl import config as cfg
from jaxrl.records.checkpoint import Checkpointer
from jaxrl.records.checkpoint_folders import checkpoint_steps
from jaxrl.records.json_lines import read_lines
from jaxrl.tools.prove.section import Result, Row, Task
from jaxrl.train import train

REWARD = "eval/all/mean_positive_reward"
CURVE = 10  # steps between two rows of the table
STEPS, INTERVAL = 6, 2  # of the run that is killed, and between its checkpoints
SECONDS = 1200  # after which it hangs
COMPARED = "reward/", "loss/", "policy/", "generate/"  # metrics; of these not those in
RATE = "per_second"  # which says how long it took


def quickstart(task: Task) -> Result:
    """Train the model of configs/quickstart.py; its held-out prompts must earn enough."""
    steps, wanted = task.work.steps, task.work.reward
    settings = _folders(task.folder, "quickstart") | {
        "trainer.max_training_steps": steps,
        "trainer.eval_interval": steps,
        "trainer.ckpt_interval": -1,
    }
    train(cfg.apply_overrides(cfg.load_config_file("configs/quickstart.py"), settings))
    lines = _metrics(task.folder, "quickstart")
    reached = lines[-1][REWARD]
    rows: list[Row] = [
        {
            "step": line["step"],
            "reward": line["reward/avg_raw_reward"],
            "held_out": line.get(REWARD),
            "step_s": line["timing/step"],
            "sampler_minus_trainer": line["policy/rollout_train_logprobs_abs_diff_max"],
        }
        for line in lines
        if int(line["step"]) % CURVE == 0
    ]
    seconds = sum(line["timing/step"] for line in lines)
    figure = f"reward {reached:.3f} of 1 on held-out prompts, {steps} steps in {seconds:.0f} s"
    reason = "" if reached >= wanted else f"at least {wanted} was expected"
    return Result(not reason, figure, reason, rows)


def resume(task: Task) -> Result:
    """Kill a run by SIGKILL at its first checkpoint, let it go on, compare it with another one.

    Both must have the same metrics, but for times, and the same bits in all arrays of the state.
    On accelerators a third run is left alone like the first: where these two differ, it is not the
    resume. This process uses no device before the runs are done.
    """
    whole, killed, third = (task.folder / name for name in ("whole", "killed", "third"))
    _finish(whole)
    process = _start(killed)
    deadline = time.monotonic() + SECONDS
    while not (saved := checkpoint_steps(epath.Path(killed / "checkpoints"))):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run ended before its first checkpoint: {_last(killed)}")
        time.sleep(0.02)
    process.kill()
    process.wait()
    if max(saved) >= STEPS:
        raise RuntimeError("the run was done before it could be killed")
    _finish(killed)
    alone = task.machine.platform != "cpu"
    if alone:
        _finish(third)
    different = {"killed and resumed": _differences(whole, killed)}
    if alone:
        different["left alone, again"] = _differences(whole, third)
    rows: list[Row] = [
        {"run": name, "different": len(found), "such_as": ", ".join(found[:5])}
        for name, found in different.items()
    ]
    return compared(f"killed after the checkpoint of step {max(saved)} of {STEPS}", task.mode, rows)


def compared(what: str, mode: str, rows: list[Row]) -> Result:
    """Judge a resume by how many arrays and metrics differ from those of the undisturbed run.

    Args:
        mode: of the proof: the command that repeats this section names it.
        rows: of the killed run, and of one that was left alone, if there was one.
    """
    killed, *others = rows
    if not killed["different"]:
        return Result(True, f"{what}: state and metrics are equal, bit for bit", rows=rows)
    if any(row["different"] for row in others):
        command = "jaxrl prove" + ("" if mode == "whole" else f" --{mode}") + " --again=resume"
        return Result(
            None,
            what,
            "two runs that nobody disturbed differ, too, so nothing can be said of the resume: "
            "this platform adds in another order each time. Where XLA_FLAGS has "
            f"--xla_gpu_deterministic_ops=true, `{command}` compares them",
            rows,
        )
    return Result(False, what, f"different after the resume: {killed['such_as']}", rows)


def _folders(folder: Path, name: str) -> dict[str, Any]:
    """Return the settings of a quiet run that writes under a folder alone."""
    return {
        "trainer.run_name": name,
        "trainer.log_path": str(folder),
        "trainer.ckpt_path": str(folder / "checkpoints"),
        "trainer.export_path": str(folder / "exports"),
        "trainer.logger": [],
        "trainer.hf_save_interval": -1,
        "trainer.print_example_interval": -1,
    }


def _start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the run that is killed, in a process of its own; a checkpoint is gone on from."""
    settings = _folders(folder, "run") | {
        "trainer.max_training_steps": STEPS,
        "trainer.ckpt_interval": INTERVAL,
        "trainer.eval_interval": -1,
    }
    words = [f"--config.{name}={value}" for name, value in settings.items()]
    folder.mkdir(exist_ok=True)
    with (folder / "output").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxrl.train", "--config=configs/quickstart.py", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _finish(folder: Path) -> None:
    if _start(folder).wait(SECONDS) != 0:
        raise RuntimeError(f"the run failed: {_last(folder)}")


def _last(folder: Path) -> str:
    """Return the last line that a run printed."""
    lines = (folder / "output").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def _metrics(folder: Path, name: str) -> list[dict[str, float]]:
    lines = read_lines(folder / name / "metrics.jsonl")
    return [line for line in lines if "reward/avg_raw_reward" in line]


def _differences(one: Path, two: Path) -> list[str]:
    """Return the arrays, and the steps' metrics but for times, that are not equal in two runs."""
    same, other = _state(one), _state(two)
    found = sorted(x for x in same.keys() | other.keys() if same.get(x) != other.get(x))
    ours, theirs = _metrics(one, "run"), _metrics(two, "run")
    for a, b in zip(ours, theirs, strict=True):
        names = {x for x in a.keys() | b.keys() if x.startswith(COMPARED) and RATE not in x}
        differ = sorted(x for x in names if a.get(x) != b.get(x))
        found += [f"step {a['step']:.0f} {name}" for name in differ]
    return found


def _state(folder: Path) -> dict[str, bytes]:
    """Return the bits of each array of the last checkpoint."""
    files = Checkpointer(str(folder / "checkpoints"), read_only=True).files
    leaves, _ = jax.tree_util.tree_flatten_with_path(files.restore(STEPS, "state"))
    return {jax.tree_util.keystr(path): np.asarray(x).tobytes() for path, x in leaves}
