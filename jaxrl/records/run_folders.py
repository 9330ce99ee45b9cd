"""The folders that a run writes to: held by it alone while it goes on, and its own for good.

    <trainer.log_path>/<trainer.run_name>    its records
    <trainer.ckpt_path>, <trainer.export_path>    with <folder>/.owner.json: whose they are
    <run folder>/latest_checkpoint.txt    where its newest checkpoint is

`jaxrl.records.lease` says how a folder is held.
"""

import json
import os
import weakref
from pathlib import Path
from typing import Any

from etils import epath

from jaxrl import activity, config as cfg
from jaxrl.config.platform import KNOWN_IDS
from jaxrl.files import (
    DamagedFile,
    FolderError,
    as_path,
    missing_packages_named,
    replace_text,
    sealed,
    sealed_text,
    unsealed,
    unsealed_text,
    writable_folder,
    writing,
)
from jaxrl.parallel import agree, allgather, is_first, record_folder
from jaxrl.records.checkpoint_folders import PREFIX, checkpoint_steps, newest_config
from jaxrl.records.json_lines import lines_of
from jaxrl.records.lease import FolderLock
from jaxrl.records.resume_identity import OWN_FOLDERS, changed_fields
from jaxrl.records.run_config import CONFIG, read_config

OWNER, LATEST = ".owner.json", "latest_checkpoint.txt"
# Where every run saved, and kept its records, before each had folders of its own.
OLD_CHECKPOINTS, OLD_LOGS = "~/ckpts", "/tmp/skyrl-logs"


class RunFolders:
    """Hold the folders of a run until `close`; a collective, of which the first does most.

    Each process holds the folder of its own records, the first those of checkpoints and exports.
    A run of this process that was built and has not begun gives way; it asks again when it begins.

    Args:
        config: resolved.

    Attributes:
        closed: they are not held any more.

    Raises:
        FolderError: another run works in one of them, or it belongs to another run, or the
            checkpoints that the records speak of are not there. No record was touched.
        ValueError: one cannot be written to.
    """

    def __init__(self, config: cfg.TrainConfig) -> None:
        self._trainer, self._locks = config.trainer, list[FolderLock]()
        self._run = Path(os.path.realpath(cfg.run_folder(config.trainer)))
        self.closed = False
        for other in [waiting for waiting in _WAITING if waiting._places() & self._places()]:
            other.close()
        try:
            self._refuse_all(self._problem(self._hold_shared) if is_first() else None)
            self._refuse_all(self._problem(self._hold_records))
            refuse_records_of_another(config)
            self._refuse_all(self._problem(self._refuse_lost_checkpoints) if is_first() else None)
        except BaseException:
            self.close()
            raise
        _WAITING.add(self)

    def _places(self) -> set[str]:
        fields = (self._trainer.ckpt_path, self._trainer.export_path)
        return {str(self._run), *(str(as_path("", path)) for path in fields)}

    def _problem(self, hold: Any) -> str | None:
        try:
            hold()
        except ValueError as error:
            return str(error)
        return None

    def _refuse_all(self, problem: str | None) -> None:
        """End every process with what one of them met."""
        if found := [text for text in allgather(problem) if text]:
            raise FolderError(found[0])

    def _hold_shared(self) -> None:
        """Hold checkpoints and exports, and first: no run folder is made in vain."""
        for field in ("ckpt_path", "export_path"):
            folder = writable_folder(f"trainer.{field}", getattr(self._trainer, field))
            others = f"Give this one a trainer.{field} of its own (unset, it is in its run folder)"
            with missing_packages_named(f"trainer.{field}", str(folder)):
                self._hold(folder, f"{others}, or end the other")
            self._refuse_owned(field, folder)

    def _hold_records(self) -> None:
        folder = writable_folder("trainer.log_path", record_folder(self._run))
        self._hold(folder, "Give this one a trainer.run_name of its own, or end the other")

    def _hold(self, folder: epath.Path, fix: str) -> None:
        if all(lock.folder != folder for lock in self._locks):
            self._locks.append(FolderLock(folder, self._run, fix))

    # ---------------------------------------------------------------- while it goes on

    def check(self) -> None:
        """Refuse to go on in a folder that is not held any more; asked before it is written to.

        Raises:
            FolderError: a folder is not held any more.
        """
        problem = None
        try:
            for lock in self._locks:
                lock.check()
        except (FolderError, OSError) as error:
            problem = str(error)
        self._refuse_all(problem)

    def refuse_if_lost(self) -> None:
        """Refuse as `check` does, as far as the last beat knows.

        In this process alone and at no cost.
        """
        for lock in self._locks:
            if lock.lost:
                raise FolderError(lock.lost)

    def own(self, step: int) -> None:
        """Make the folders this run's from now on: it goes on from what is in them.

        Args:
            step: finished steps; 0 = there is no checkpoint of this run yet.

        Raises:
            FolderError: what says so cannot be written.
        """
        _WAITING.discard(self)
        if not is_first():
            return
        for field in ("ckpt_path", "export_path"):
            folder = as_path(f"trainer.{field}", getattr(self._trainer, field))
            replace_text(folder / OWNER, json.dumps(sealed(self._as_owner_of(folder))) + "\n")
        if step == 0:
            with writing(self._run / LATEST):
                (self._run / LATEST).unlink(missing_ok=True)

    def saved(self, checkpoint: str) -> None:
        """Note that a checkpoint is whole."""
        if is_first():
            replace_text(self._run / LATEST, sealed_text(f"{checkpoint}\n"))

    def close(self) -> None:
        """Let go of all folders of the run."""
        self.closed = True
        _WAITING.discard(self)
        for lock in self._locks:
            lock.close()

    # ---------------------------------------------------------------- whose they are

    def _as_owner_of(self, folder: epath.Path) -> dict[str, str]:
        """Return the run folder, and where it is from here: both may be moved together."""
        local = "://" not in str(folder)
        return {
            "run": str(self._run),
            "from_here": os.path.relpath(self._run, os.path.realpath(folder)) if local else "",
        }

    def _refuse_owned(self, field: str, folder: epath.Path) -> None:
        owner = self._owner(field, folder)
        mine = self._as_owner_of(folder)
        if owner is None or owner["run"] == mine["run"]:
            return
        if owner["from_here"] and owner["from_here"] == mine["from_here"]:
            return
        start = ""
        if field == "ckpt_path":
            start = (
                "; to start from one of its checkpoints, set trainer.resume_mode=from_path and "
                f"trainer.resume_path={folder}/{PREFIX}_<N> as well"
            )
        raise FolderError(
            f"trainer.{field}={str(folder)!r} belongs to the run {owner['run']}, and this is "
            f"{mine['run']}: leave trainer.{field} unset (it is then in the run folder), or choose "
            f"another{start}. If that run was moved and is this one, delete {folder / OWNER}"
        )

    def _owner(self, field: str, folder: epath.Path) -> dict[str, str] | None:
        """Tell whose folder it is; None: nobody's, or that of an older run which this may be."""
        if all(path.name.startswith(".") for path in folder.iterdir()):
            return None
        damage = None
        if (folder / OWNER).exists():
            try:
                found, _ = unsealed((folder / OWNER).read_text(encoding="utf-8"))
                return {name: str(found[name]) for name in ("run", "from_here")}
            except (ValueError, LookupError) as error:
                damage = error
        within = self._as_owner_of(folder)["from_here"] in ("..", ".")  # of the run folder
        saved = _saved_by(folder) if field == "ckpt_path" and not (damage and within) else None
        if damage and not (within or saved):
            raise FolderError(
                f"{folder / OWNER} is damaged ({damage}), and nothing else says which run "
                f"trainer.{field}={str(folder)!r} belongs to: delete that file if it is this one, "
                f"{self._run}; else choose another trainer.{field}"
            ) from damage
        if damage:
            activity.warn(
                f"{folder / OWNER} is damaged ({damage}): whose folder it is follows from "
                f"{'where it is' if within else 'its checkpoints'}, and it is written anew"
            )
        if saved is None or saved["run_name"] == self._trainer.run_name:
            return None  # an older version's, or nobody's
        return {"run": f"{saved['log_path']}/{saved['run_name']}", "from_here": ""}

    # ---------------------------------------------------------------- checkpoints that are gone

    def _refuse_lost_checkpoints(self) -> None:
        """Refuse to start over unasked where the run has trained and finds no checkpoint."""
        trainer = self._trainer
        folder = as_path("trainer.ckpt_path", trainer.ckpt_path)
        records = self._run / "metrics.jsonl"
        if trainer.resume_mode != "latest" or checkpoint_steps(folder):
            return
        if not records.exists():
            self._refuse_old_default(folder)
            return
        steps = _last_step(records)
        before, newest = self._recorded_places()
        again = (
            f"to train its {steps} steps again from the start, which replaces their records in "
            f"{self._run}, set trainer.resume_mode=none"
        )
        if before and before != folder and (found := checkpoint_steps(before)):
            raise FolderError(
                f"the checkpoints of this run are in {before}, and trainer.ckpt_path={folder} "
                f"holds none: to go on after step {found[-1]}, set trainer.ckpt_path={before}; "
                f"{again}; or choose another trainer.run_name"
            )
        if newest or steps > 2 * trainer.ckpt_interval > 0:  # a save waits for the one before
            what = f"the newest was {newest}" if newest else f"{folder} holds none"
            raise FolderError(
                f"{self._run} holds the records of {steps} steps, and its checkpoints are gone "
                f"({what}): put them back to go on; or, {again}; or choose another "
                "trainer.run_name"
            )
        if steps:
            activity.say(
                f"{self._run} holds the records of {steps} steps and {folder} no checkpoint: they "
                "are trained again from the start, and their records replaced"
            )

    def _refuse_old_default(self, folder: epath.Path) -> None:
        """Refuse to start over where an earlier version saved this run in its default folder."""
        trainer, old = self._trainer, epath.Path(os.path.expanduser(OLD_CHECKPOINTS))
        unset = os.path.realpath(trainer.ckpt_path) == str(self._run / "checkpoints")
        if not unset or not (found := checkpoint_steps(old)):
            return
        saved = _saved_by(old)
        if saved is None or saved["run_name"] != trainer.run_name:
            return
        raise FolderError(
            f"a run named {trainer.run_name!r} has a checkpoint in {old}, where earlier versions "
            f"saved by default, and trainer.ckpt_path={folder} holds none: to go on after step "
            f"{found[-1]}, set trainer.ckpt_path={old} (and trainer.log_path={OLD_LOGS}, if its "
            "records are still there); to start afresh, set trainer.resume_mode=none or choose "
            "another trainer.run_name"
        )

    def _recorded_places(self) -> tuple[epath.Path | None, str]:
        """Read from its records where the run has its checkpoints, and its newest one."""
        newest, path = "", self._run / LATEST
        if path.exists():
            try:
                newest = unsealed_text(path.read_text(encoding="utf-8")).strip()
            except ValueError:
                newest = f"named by {path}, which is damaged"
        try:
            old = read_config(self._run)
            place = as_path("trainer.ckpt_path", old["trainer"]["ckpt_path"])
        except (OSError, ValueError, LookupError, TypeError):
            return None, newest
        return place, newest


def refuse_records_of_another(config: cfg.TrainConfig) -> None:
    """Refuse to write over the steps of another run in the run folder; a collective.

    The same config may start again there: the run was killed before its first checkpoint, or is
    done once more. Where `config.yaml` is damaged the newest checkpoint says what it was.

    Raises:
        FolderError: the run folder holds steps of a run with another config, or of one whose
            config cannot be read; names the folder, the fields and both values.
    """
    folder = cfg.run_folder(config.trainer)
    problem = _other_records(folder, config) if is_first() else None
    if problem := agree(problem):
        whose, way_back = problem
        raise FolderError(
            f"the run folder {str(folder)!r} holds the steps of {whose}. This run would write over "
            f"them: {OWN_FOLDERS}, or {way_back}"
        )


def _other_records(folder: Path, config: cfg.TrainConfig) -> tuple[str, str] | None:
    """Return whose steps the folder holds, and what else helps; None: this config's, or none."""
    lines, rollouts = folder / "metrics.jsonl", (folder / "rollouts").glob("step_*.npz")
    if not (lines.exists() and lines.stat().st_size) and not any(rollouts):
        return None
    try:
        old = read_config(folder)
    except OSError as error:
        put_back = f"put {CONFIG} back"
        return f"a run whose {CONFIG} cannot be read ({type(error).__name__})", put_back
    except DamagedFile as error:
        found = newest_config(as_path("trainer.ckpt_path", config.trainer.ckpt_path))
        if found is None:
            return f"a run of which no checkpoint is left, and {error}", f"put {CONFIG} back"
        old, checkpoint = found
        activity.warn(f"{error}; {checkpoint} says what it was, and a run that goes on writes it")
    changed = changed_fields(old, cfg.get_config_as_dict(config))
    if "known_ids" not in old.get("trainer", {}).get("policy", {}):
        changed.pop(KNOWN_IDS, None)  # of a version without: nothing of that run goes on here
    if not changed:
        return None
    return f"a run with another config; (there, this run): {changed}", "undo the change"


_WAITING: "weakref.WeakSet[RunFolders]" = weakref.WeakSet()


def _saved_by(folder: epath.Path) -> dict[str, str] | None:
    """Return `run_name` and `log_path` of the run whose checkpoints a folder has; None: unknown."""
    try:
        config, _ = newest_config(folder) or ({}, None)
        return {name: config["trainer"][name] for name in ("run_name", "log_path")}
    except (LookupError, TypeError):
        return None


def _last_step(records: Path) -> int:
    """Return the step of the last whole line of metrics.jsonl; 0 without one."""
    step = 0
    for line in lines_of(records):
        step = int(line["step"])
    return step
