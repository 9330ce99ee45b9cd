"""Read a run as its folder recorded it, and put its trainer back to before a recorded step.

Nothing in the folder is written to.
"""

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.extend
import numpy as np

from jaxrl import config as cfg
from jaxrl.data.recorded import file_digest, read_kept, routes_elsewhere
from jaxrl.parallel import agree
from jaxrl.records.callbacks import TrainingCallback
from jaxrl.records.checkpoint import Checkpointer, parse_resume_path
from jaxrl.records.checkpoint_folders import PREFIX
from jaxrl.records.ledger import FILE, read_rollouts
from jaxrl.tools.audit.lineage import REMEDY, open_run
from jaxrl.train import BasePPOExp, meshes
from jaxrl.trainer import Trainer
from jaxrl.types import GeneratorOutput, Prompt

START = "start"  # in place of a checkpoint: the models that the run began with


class CorruptedRollouts(ValueError):
    """Say that a file of recorded rollouts is not as the run wrote it."""


@dataclass(frozen=True)
class RecordedStep:
    """Hold a finished step of the surviving lineage.

    Attributes:
        file: of its rollouts, under the run folder; None = not recorded.
        checksums: array -> number, see `ledger.writer.step_checksums`; empty = not recorded.
        draws: batches of prompts, several with dynamic sampling.
        machine: what it ran on, see `ledger.writer.machine_of`.
    """

    step: int
    file: str | None
    digest: str | None
    checksums: dict[str, int]
    draws: int
    machine: dict[str, Any]


class RecordedRun:
    """Read what a run folder holds.

    Args:
        folder: with config.yaml and run.db.

    Attributes:
        config: resolved, as the run wrote it.
        steps: by number.
        facts: of the ledger; `uids`: of the training prompts.
        origin: "", or the checkpoint of another run that it went on from; `origin_run`: its run_id.
        from_step: finished steps of that; 0 without.

    Raises:
        ValueError: it is no run folder, its database cannot be read or is damaged, or it did no
            step.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        with open_run(self.folder) as run:
            if run.damage:  # else another checksum would be the machine's fault
                raise ValueError(f"{self.folder / FILE} is damaged: {run.damage}. {REMEDY}")
            self.run_id, self.facts, self.uids = run.run_id, run.facts, run.data
            self.origin, _, self.origin_run = run.origin.rpartition(" of run ")
            self.from_step = run.from_step
            self.config = cfg.to_train_config(run.settings)
            machines = {
                attempt: json.loads(machine)
                for attempt, machine in run.rows("SELECT attempt, machine FROM attempts")
            }
            query = "SELECT step + 1, COUNT(*) FROM live_groups GROUP BY step"
            if self.facts.get("carries"):  # a group ends in the step that draws it, whenever begun
                query = (
                    "SELECT e.step, COUNT(DISTINCT t.group_id) FROM live_ends e "
                    "JOIN live_trajectories t ON t.id = e.trajectory_id GROUP BY 1"
                )
            handed_out = {step: count for step, count in run.rows(query)}
            query = "SELECT step, file, file_digest, checksums, attempt FROM live_steps"
            steps = run.rows(f"{query} ORDER BY step")
            # only dynamic sampling draws more than once for a step, and never ahead of it
            several = self.facts["dynamic_sampling"] is not None
            size = self.facts["train_batch_size"]
            self.steps = {
                step: RecordedStep(
                    step,
                    file,
                    digest,
                    dict(json.loads(numbers)),
                    handed_out.get(step, 0) // size if several else 1,
                    {"platform": "?", "devices": None} | machines[attempt],
                )
                for step, file, digest, numbers, attempt in steps
            }
        if not self.steps:
            raise ValueError(f"{self.folder / FILE} has no finished step; let the run do one")

    def rollouts(self, step: int) -> tuple[GeneratorOutput, list[str]]:
        """Return the trajectories of a step, and their uids; `check_files` compares the digest.

        Raises:
            ValueError, FileNotFoundError: they were not recorded, are gone, or cannot be read.
        """
        return read_rollouts(self.path(step))

    def kept(self, step: int, when: str) -> dict[str, np.ndarray]:
        """Return what callbacks kept "before" or "after" a step, by name; see `rollouts`."""
        return read_kept(self.path(step), when)

    def step(self, number: int) -> RecordedStep:
        """Return a finished step.

        Raises:
            ValueError: the surviving run has no such step.
        """
        if number not in self.steps:
            raise ValueError(
                f"step {number} is not in {self.folder / FILE}, which has the steps "
                f"{min(self.steps)} to {max(self.steps)} of the surviving run; take one of those"
            )
        return self.steps[number]

    def checksums(self, step: int) -> dict[str, int]:
        """Return the checksums of the arrays of a step.

        Raises:
            ValueError: there is no such step, or they were not recorded.
        """
        if not (found := self.step(step).checksums):
            raise ValueError(
                f"step {step} of {self.folder} has no checksums: it ran with "
                "trainer.ledger.record_checksums=false; there is nothing to compare it with"
            )
        return found

    def path(self, step: int) -> Path:
        """Return the file of a step's trajectories.

        Raises:
            ValueError: there is no such step, or its trajectories were not recorded.
            FileNotFoundError: the file is gone.
        """
        if (file := self.step(step).file) is None:
            raise ValueError(
                f"step {step} of {self.folder} has no rollouts: it ran with "
                "trainer.ledger.record_rollouts=false; take a step that has them"
            )
        if not (path := self.folder / file).is_file():
            raise FileNotFoundError(
                f"{path}, the rollouts of step {step}, is gone; copy it back, or begin after it "
                "with a later --checkpoint"
            )
        return path

    def check_files(self, steps: Iterable[int]) -> None:
        """Compare the rollout files of steps with the digests that were recorded.

        Raises:
            CorruptedRollouts: one is not as the run wrote it.
            ValueError, FileNotFoundError: see `path`.
        """
        for step in steps:
            path, digest = self.path(step), self.steps[step].digest
            if (found := file_digest(path)) != digest:
                raise CorruptedRollouts(
                    f"step {step}: {path} is not the file that the run wrote: its digest is "
                    f"{found}, run.db has {digest}"
                )
            try:
                routes_elsewhere(path)
            except ValueError as error:
                raise CorruptedRollouts(f"step {step}: {error}") from error

    def find_checkpoint(self, step: int | None, asked: str | None = None) -> str | None:
        """Return where to start: a checkpoint's folder; None: the models that the run began with.

        A run that went on from a checkpoint of another one begins with that.

        Args:
            step: the newest before it; None: the oldest there is.
            asked: for by the user, a checkpoint or "start".

        Raises:
            ValueError: there is none to start from.
        """
        if asked is not None and asked != START:
            number = parse_resume_path(asked, "--checkpoint")[1]
            if step is not None and number >= step:
                raise ValueError(
                    f"--checkpoint={asked!r} is not before step {step}; take an earlier one"
                )
            return asked
        folder = self.config.trainer.ckpt_path
        held = [] if asked == START else self._checkpoints(folder)
        if step is not None:
            held = [number for number in held if number < step]
        if held:
            return os.path.join(folder, f"{PREFIX}_{min(held) if step is None else max(held)}")
        if not self.origin:
            return None
        try:
            parse_resume_path(self.origin)
        except ValueError as error:
            last = max(self.steps) if step is None else step
            raise ValueError(
                f"{folder} has no checkpoint of {self.folder} before step {last}, and the one that "
                f"it went on from, {self.origin} of run {self.origin_run}, is not there; where it "
                "was moved, name it with --checkpoint"
            ) from error
        return self.origin

    def described(self, checkpoint: str | None) -> str:
        """Say where a replay starts, in words."""
        if checkpoint:
            return checkpoint
        folder = self.config.trainer.ckpt_path
        gone = "" if _exists(folder) else f"; the folder of checkpoints, {folder}, is not there"
        return f"the models that the run began with{gone}"

    def _checkpoints(self, folder: str) -> list[int]:
        if not _exists(folder):
            return []
        source = Checkpointer(folder, read_only=True)
        try:
            held = range(self.from_step, max(self.steps))  # those before are another run's
            return [step for step in source.files.steps() if step in held]
        finally:
            source.close()


def _exists(folder: str) -> bool:
    """Return whether a folder of checkpoints is there; one in a bucket is taken for granted."""
    return "://" in folder or os.path.isdir(os.path.expanduser(folder))


def step_of(checkpoint: str | None) -> int:
    """Return the finished steps of a checkpoint; 0 for the models that a run began with."""
    return parse_resume_path(checkpoint)[1] if checkpoint else 0


# ---------------------------------------------------------------- its trainer


@contextlib.contextmanager
def restored(
    run: RecordedRun,
    checkpoint: str | None,
    *,
    run_class: type[BasePPOExp] = BasePPOExp,
) -> Iterator[Trainer]:
    """Yield the trainer of the run, without an engine, as it was at a checkpoint.

    Its `train_step` takes the recorded rollouts of the step; what it would write goes to a
    temporary folder.

    In a job of several processes it is a collective, and all must see that folder: TMPDIR.

    Args:
        checkpoint: of `RecordedRun.find_checkpoint`.
        run_class: whose `get_` methods give model, tokenizer and trainer.

    Raises:
        ValueError, OSError: the config does not fit this machine, the model is not there, or the
            checkpoint is of another run or damaged.
    """
    with contextlib.ExitStack() as stack:
        own = tempfile.TemporaryDirectory(prefix="jaxrl_replay_", ignore_cleanup_errors=True)
        folder = agree(stack.enter_context(own))  # one for all processes of a job
        trainer = _trainer(run, _config_of_replay(run.config, checkpoint, folder), run_class)
        with contextlib.closing(trainer.checkpointer):
            trainer.state = trainer.restore_or_init()
            saved = (trainer.checkpointer.restored_meta or {}).get("ledger") or {}
            saver, step = saved.get("run_id"), int(trainer.state.step)
            # without a ledger it has no run_id, and the run wrote "?"
            began = run.origin and (saver or "?", step) == (run.origin_run, run.from_step)
            if checkpoint and saver != run.run_id and not began:
                raise ValueError(
                    f"{checkpoint} was saved by run {saver}, and {run.folder} is "
                    f"{run.run_id}; name a checkpoint of it with --checkpoint"
                )
            trainer.batches_drawn = int(trainer.state.batches_drawn)
            trainer.load_reference(trainer.state.ref_params)
            yield trainer


def _trainer(run: RecordedRun, config: cfg.TrainConfig, run_class: type[BasePPOExp]) -> Trainer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run has said what is odd about its config
        experiment = run_class(config)
    experiment.tokenizer = experiment.get_tokenizer()
    trainer = experiment.get_trainer(
        experiment.config,
        tokenizer=experiment.tokenizer,
        model=experiment.get_model(),
        mesh=meshes(experiment.config)[0],
        engine=None,
        generator=None,
        train_prompts=[Prompt(uid, [], (), "") for uid in run.uids],  # counted, never read
        eval_prompts=(),
        callbacks=[_Kept(run)],
    )
    # what is compared with that of the checkpoint is the run's
    trainer.checkpoint_meta["config"] = cfg.get_config_as_dict(run.config)
    for name in ("data", "mesh", "total_steps"):  # the prompts are not read, and one step is done
        del trainer.checkpoint_meta[name]

    def rollouts(step: int) -> tuple[GeneratorOutput, list[str]]:
        trainer.remember(**run.kept(step, "before"))
        trainer.batches_drawn += run.steps[step].draws
        return run.rollouts(step)

    def end_step(step: int) -> None:
        trainer.remember(**run.kept(step, "after"))

    vars(trainer).update(rollouts=rollouts, sync_weights=end_step)
    return trainer


class _Kept(TrainingCallback):
    """Declare what the callbacks of a run kept: they are not called again."""

    def __init__(self, run: RecordedRun) -> None:
        paths = [run.folder / step.file for step in run.steps.values() if step.file]
        found = next((path for path in paths if path.is_file()), None)
        self.initial_state = read_kept(found, "before") if found else {}


def _config_of_replay(
    config: cfg.TrainConfig, checkpoint: str | None, folder: str
) -> cfg.TrainConfig:
    """Return the run's config, changed to write elsewhere and to sample nothing."""
    intervals = ("eval_interval", "ckpt_interval", "hf_save_interval", "print_example_interval")
    changes = {
        **{f"trainer.{name}": -1 for name in intervals},
        "trainer.run_name": "replay",
        "trainer.log_path": folder,
        "trainer.ckpt_path": os.path.join(folder, "checkpoints"),
        "trainer.export_path": folder,
        "trainer.dump_data_batch": False,
        "trainer.logger": "console",
        "trainer.fully_async.enabled": False,
        "trainer.resume_mode": "from_path" if checkpoint else "none",
        "trainer.resume_path": checkpoint,
        "environment": cfg.EnvironmentConfig(),  # judges are not called, and may be of a notebook
    }
    return cfg.apply_overrides(config, changes)


def use_devices(run: RecordedRun, count: int | None) -> None:
    """Take as many devices of the CPU as the run had; call it before there is any array.

    Args:
        count: instead of the run's number.

    Raises:
        ValueError: there are other devices here, XLA_FLAGS says another number, or it is none.
    """
    if count is not None and count < 1:
        raise ValueError(f"--device-count={count}: there is at least 1; take that or more")
    machine, here = run.steps[max(run.steps)].machine, jax.default_backend()
    if count is not None and here != "cpu":
        raise ValueError(f"--device-count={count}: is for the CPU, and this is a {here}; leave it")
    wanted = count or machine["devices"]
    on_cpu = count is not None or machine["platform"] == "cpu"
    if here != "cpu" or not on_cpu or wanted == len(jax.devices()):
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if (processes := jax.process_count()) > 1:
        raise ValueError(
            f"{wanted} devices of the CPU are wanted, and the {processes} processes of this job "
            f"have {len(jax.devices())}, with XLA_FLAGS={flags!r}; set it to "
            f"--xla_force_host_platform_device_count={wanted} for the launcher, which divides them"
        )
    if "host_platform_device_count" in flags:
        raise ValueError(
            f"{wanted} devices of the CPU are wanted, and XLA_FLAGS={flags!r}; unset it"
        )
    jax.extend.backend.clear_backends()  # asking for the platform has made one
    jax.config.update("jax_num_cpu_devices", wanted)
