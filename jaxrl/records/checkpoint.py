"""Checkpoints: one orbax commit holds the whole state of a run.

    <ckpt_path>/global_step_<N>/state    the TrainState, sharded arrays
    <ckpt_path>/global_step_<N>/meta     JSON: model, config, user functions, checksums; its own too
    <ckpt_path>/global_step_<N>/buffer   what an asynchronous run had sampled and not yet trained

Nothing in it is pickled. `records.orbax_files` has the calls of orbax.
"""

import contextlib
import gc
import itertools
import os
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import jax
import numpy as np
from etils import epath

from jaxrl import activity, envs
from jaxrl.config.model import DECAYING
from jaxrl.config.platform import ENGINE_SIZES, EVAL_PROMPTS, KNOWN_IDS, ON_CPU
from jaxrl.config.trainer import TrainerConfig
from jaxrl.files import (
    FolderError,
    as_path,
    missing_packages_named,
    sealed,
    writable_folder,
    writing,
)
from jaxrl.functions import import_call
from jaxrl.parallel import agree, allgather, is_first
from jaxrl.parallel.checksums import checksums, host_checksums
from jaxrl.records.checkpoint_folders import PREFIX, checkpoint_steps, read_metadata
from jaxrl.records.orbax_files import StepFiles
from jaxrl.records.resume_identity import OWN_FOLDERS, changed_fields, differences
from jaxrl.registry.pickling import source_hash
from jaxrl.types import TrainState

META_KEYS = {"model", "config", "functions", "checksums"}
PAUSES = 1.0, 5.0, 15.0  # seconds before a checkpoint that could not be read is read again
PASSING = (  # codes of errors that say nothing of what is in the files
    "ABORTED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNKNOWN",
)

# What does not pass by itself, in the system's words: tensorstore's errors have no number.
LASTING = "No space left on device", "Disk quota exceeded", "Read-only file system"

Buffer = dict[str, np.ndarray]  # what waits to be trained
T = TypeVar("T")


class CheckpointError(ValueError):
    """Say that this run cannot go on from the checkpoint that it was pointed to."""


class DamagedCheckpoint(CheckpointError):
    """Say that files of a checkpoint are missing, cut, or not what was saved."""


class UnreadableCheckpoint(CheckpointError):
    """Say that a checkpoint cannot be read now, and may be another time."""


class UnsavedCheckpoint(CheckpointError):
    """Say that a checkpoint cannot be written now, and may be another time."""


class Checkpointer:
    """Saves and restores `(TrainState, meta)` under `<folder>/global_step_<N>`.

    Args:
        folder: local, "file://", or in a bucket ("gs://", with the packages of `jaxrl[gcs]`).
        max_to_keep: the latest ones; -1 = all.
        read_only: of another run; nothing in the folder is touched.

    Raises:
        ValueError: the folder cannot be written to, or is not the same for all processes.
    """

    def __init__(self, folder: str, *, max_to_keep: int = -1, read_only: bool = False) -> None:
        field = "trainer.resume_path" if read_only else "trainer.ckpt_path"
        self.folder = (as_path if read_only else shared_folder)(field, folder)
        keep = None if max_to_keep == -1 else max_to_keep
        with missing_packages_named(field, folder):
            self.files = StepFiles(self.folder, max_to_keep=keep, read_only=read_only)
        self.on_commit: Callable[[str], None] = lambda path: None  # told of each whole checkpoint
        self._saving: int | None = None
        self._uncommitted: int | None = None
        self.restored_meta: dict[str, Any] | None = None  # of what the run goes on from
        self.restored_buffer: Buffer | None = None

    # ---------------------------------------------------------------- save

    def save(
        self, step: int, state: TrainState, meta: dict[str, Any], buffer: Buffer | None = None
    ) -> str:
        """Start to write the state after `step` finished steps, and say where.

        The state may be donated at once.

        Args:
            meta: JSON, what the arrays cannot say: "model", "config", "functions"; of runs also
                "mesh", "total_steps".
            buffer: not empty, nor are its arrays; None = there is none.

        Raises:
            FolderError, UnsavedCheckpoint: this save, or the one before, which ended in the
                meantime, failed.
        """
        self.wait()
        self._saving = step
        meta = {**meta, "checksums": checksums(state)}
        arrays: dict[str, Any] = {"state": as_saved(state)}
        if buffer is not None:
            meta["buffer_checksums"] = host_checksums(buffer)
            arrays["buffer"] = buffer

        def begun() -> None:
            self._uncommitted = step
            _SAVING.add(self)

        with self._named_failure():
            self.files.save(step, arrays, sealed(meta), begun)
        return str(self.folder / f"{PREFIX}_{step}")

    def wait(self) -> None:
        """Wait until the last save is committed.

        Raises:
            FolderError: it failed, as on a full disk.
            UnsavedCheckpoint: it failed in a way that may pass.
        """
        with self._named_failure():
            self.files.wait()
        _SAVING.discard(self)
        step, self._uncommitted = self._uncommitted, None  # told once, also where that fails
        if step is not None:
            self.on_commit(str(self.folder / f"{PREFIX}_{step}"))

    def close(self) -> None:
        """Wait, then stop the threads that write."""
        self.wait()
        self.files.close()

    @contextlib.contextmanager
    def _named_failure(self) -> Iterator[None]:
        failure = None
        try:
            yield
        except Exception as error:
            reason = in_short(error)
            kind = UnsavedCheckpoint if may_pass(error) and reason not in LASTING else FolderError
            failure = kind(
                f"could not save step {self._saving} to trainer.ckpt_path={str(self.folder)!r}: "
                f"{reason}. Its earlier checkpoints are whole: mend the folder (space, "
                "permissions), start again with trainer.resume_mode=latest"
            )
        if failure is not None:
            self._uncommitted = None
            _SAVING.discard(self)
            gc.collect()  # the coroutines of the failed save, which complain when Python ends
            raise failure

    # ---------------------------------------------------------------- restore

    def refuse_later_than(self, step: int) -> None:
        """Refuse to start at `step` in a folder that holds later checkpoints of another run.

        A collective.

        Raises:
            CheckpointError: the folder holds later steps.
        """
        later = sorted(s for s in self._steps() if s > step)
        if later:
            raise CheckpointError(
                f"trainer.ckpt_path={str(self.folder)!r} holds the steps {later} of another run, "
                f"which this one, starting after step {step}, would overwrite. To start another "
                f"run, {OWN_FOLDERS}; or delete them, or set trainer.resume_mode=latest"
            )

    def _steps(self) -> set[int]:
        """Return the steps that any process of the job sees; a collective."""
        return set().union(*allgather(_read(self.folder, self.files.steps)))

    def read_meta(self, step: int) -> dict[str, Any]:
        """Return the JSON part of a checkpoint alone.

        Raises:
            OSError: it is not there, or cannot be read now.
            ValueError: it is damaged.
        """
        path = self.folder / f"{PREFIX}_{step}"
        meta, checked = read_metadata(path)
        if missing := META_KEYS - set(meta):
            raise ValueError(f"meta lacks {sorted(missing)}")
        if not checked:
            activity.say(f"{path} is of an earlier version: its metadata has no checksum")
        return meta

    def restore(self, step: int, abstract_state: TrainState, meta: dict[str, Any]) -> TrainState:
        """Return the state of a step, with the shapes, dtypes and shardings of `abstract_state`.

        What else was saved is then in `restored_meta` and `restored_buffer`. A collective: where
        one process cannot read it, all raise the same error, which names that process.

        Args:
            meta: what this run would save; a changed source of a user function, another mesh, and
                another end of the learning rate are warned of.

        Raises:
            DamagedCheckpoint: files are missing or not what was saved.
            UnreadableCheckpoint: they cannot be read now, though tried several times.
            CheckpointError: the checkpoint is of another model, or of a run with another config;
                the message shows the difference.
        """
        path = self.folder / f"{PREFIX}_{step}"
        saved = agree(_read(path, lambda: self.read_meta(step)))
        refuse_other(str(path), saved, meta)
        warn_of_changed_functions(str(path), saved["functions"], meta["functions"])
        if meta.get("total_steps", step + 1) > step:  # else nothing follows
            warn_of_another_course(str(path), saved, meta)

        def read() -> tuple[Any, Buffer | None]:
            state = self.files.restore(step, "state", as_saved(abstract_state))
            return state, self._read_buffer(step, saved.get("buffer_checksums"))

        def compare() -> None:
            if different := differences(saved["checksums"], checksums(state)):
                raise ValueError(f"the values of {sorted(different)} are not those that were saved")

        state, buffer = _read(path, read)
        if isinstance(state, dict) and isinstance(abstract_state, TrainState):  # `as_saved`
            state = abstract_state.replace(**state)
        _read(path, compare)  # a collective: it begins when all have read
        self.restored_meta, self.restored_buffer = saved, buffer
        return cast(TrainState, state)

    def _read_buffer(self, step: int, saved: dict[str, int] | None) -> Buffer | None:
        if saved is None:
            return None
        found = self.files.restore(step, "buffer")
        buffer = {name: np.asarray(array) for name, array in found.items()}
        if different := differences(saved, host_checksums(buffer)):
            raise ValueError(f"{sorted(different)} of the buffer are not what was saved")
        return buffer

    def restore_latest(
        self, abstract_state: TrainState, meta: dict[str, Any]
    ) -> tuple[int, TrainState] | None:
        """Return step and state of the newest whole checkpoint, or None if there is none at all.

        Newer ones that are damaged are renamed to `<name>.damaged`, with a warning.

        Raises:
            CheckpointError: all are damaged, or the newest whole one is of another run.
            UnreadableCheckpoint: one cannot be read now; nothing is renamed.
        """
        damaged: dict[int, DamagedCheckpoint] = {}
        for step in sorted(self._steps(), reverse=True):
            try:
                state = self.restore(step, abstract_state, meta)
            except DamagedCheckpoint as error:
                damaged[step] = error
            else:
                for number, error in damaged.items():
                    self._set_aside(number, error, step)
                return step, state
        if damaged:
            reasons = "; ".join(str(error) for error in damaged.values())
            raise CheckpointError(
                f"trainer.ckpt_path={str(self.folder)!r} holds no whole checkpoint: {reasons}. "
                f"To start afresh, {OWN_FOLDERS}"
            )
        return None

    def _set_aside(self, step: int, error: DamagedCheckpoint, older: int) -> None:
        path = self.folder / f"{PREFIX}_{step}"
        names = itertools.chain(("damaged",), (f"damaged_{n}" for n in itertools.count(2)))
        targets = (path.with_name(f"{path.name}.{name}") for name in names)
        target = agree(next(target for target in targets if not target.exists()))
        if is_first():
            with writing(target):
                path.rename(target)
        allgather(None)  # it is there
        self.files.reload()
        warnings.warn(
            f"{error}. Falling back to step {older}; the damaged one is kept as {target.name}",
            stacklevel=3,
        )


_SAVING: set[Checkpointer] = set()  # kept until what they have begun is whole


def _wait_for_all() -> None:
    """Wait, at the end of Python, for what scripts have saved and not closed.

    Nobody else does: the threads that write are daemons.
    """
    for checkpointer in list(_SAVING):
        try:
            checkpointer.wait()
        except ValueError as error:  # nobody is left to catch it
            activity.warn(str(error))


# atexit would be too late: the executors that orbax writes with take nothing any more
threading._register_atexit(_wait_for_all)  # pyright: ignore
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SAVING.clear)  # it is its parent's


def resume(
    checkpointer: Checkpointer,
    resume_mode: str | None,
    resume_path: str | None,
    abstract_state: TrainState,
    meta: dict[str, Any],
) -> TrainState | None:
    """Return the state to go on from, or None to start afresh.

    Args:
        checkpointer: of this run.
        resume_mode: None or "none", "latest" (of `checkpointer`), or "from_path".
        resume_path: `.../global_step_<N>` for "from_path".
        abstract_state, meta: see `Checkpointer.restore`.

    Raises:
        CheckpointError: resume_path is no checkpoint, the checkpoint is damaged or of another run,
            or `checkpointer` holds later steps of another run.
    """
    found = None
    if resume_mode == "latest":
        found = checkpointer.restore_latest(abstract_state, meta)
    elif resume_mode == "from_path":
        folder, step = _in_all(lambda: parse_resume_path(resume_path or ""))
        checkpointer.refuse_later_than(step)
        source = Checkpointer(folder, read_only=True)
        found = step, source.restore(step, abstract_state, meta)
        checkpointer.restored_meta, checkpointer.restored_buffer = (
            source.restored_meta,
            source.restored_buffer,
        )
        source.close()
    checkpointer.refuse_later_than(found[0] if found else 0)
    return found[1] if found else None


def where_it_resumes(trainer: TrainerConfig) -> str:
    """Say what the command of a run that was interrupted does when it is given again."""
    try:
        steps = checkpoint_steps(as_path("trainer.ckpt_path", trainer.ckpt_path))
    except Exception:  # of a bucket, for instance, that does not answer
        return "the same command resumes from the last checkpoint, if there is one"
    if not steps:
        start = trainer.resume_path if trainer.resume_mode == "from_path" else "the beginning"
        return f"there is no checkpoint yet: the same command starts again from {start}"
    latest = "" if trainer.resume_mode == "latest" else "with trainer.resume_mode=latest "
    return f"{latest}the same command resumes after step {steps[-1]}"


def parse_resume_path(resume_path: str, field: str = "trainer.resume_path") -> tuple[str, int]:
    """Return folder and step of `.../global_step_<N>`.

    Args:
        field: what the user calls it.

    Raises:
        CheckpointError: resume_path does not end so, or does not exist.
    """
    path = as_path(field, resume_path)
    number = path.name.removeprefix(f"{PREFIX}_")
    if not path.name.startswith(PREFIX) or not number.isdigit():
        raise CheckpointError(f"{field}={resume_path!r} must end in {PREFIX}_<N>")
    with missing_packages_named(field, resume_path):
        found = path.exists()
    if not found:
        steps = checkpoint_steps(path.parent) or "none"
        raise CheckpointError(
            f"{field}={resume_path!r} does not exist; the steps in {path.parent}: {steps}"
        )
    return str(path.parent), int(number)


def _read(path: Any, read: Callable[[], T]) -> T:
    """Return what a reader gives, in every process of the job; try again what may pass.

    Raises:
        UnreadableCheckpoint: it did not pass.
        DamagedCheckpoint: anything else went wrong.
    """
    for pause in (*PAUSES, None):
        problem = found = cause = None
        try:
            found = read()
        except Exception as error:
            problem = may_pass(error), in_short(error)
            cause = error if pause is None or not problem[0] else None  # it holds what was read
        problems = _problems_of_job(problem)
        if not problems:
            return cast(T, found)
        passing = [text for passes, text in problems if passes]
        if not passing:
            raise DamagedCheckpoint(f"{path} is damaged ({problems[0][1]})") from cause
        if pause is None:
            raise UnreadableCheckpoint(
                f"{path} cannot be read now ({passing[0]}), tried {len(PAUSES) + 1} times in "
                f"{sum(PAUSES):g} s; it is left as it is. Mend what keeps it from being read (open "
                "files, memory, permissions, the disk or bucket), and start again"
            ) from cause
        warnings.warn(
            f"{path} cannot be read ({passing[0]}); trying again in {pause:g} s", stacklevel=4
        )
        time.sleep(pause)
    raise AssertionError


def _in_all(find: Callable[[], T]) -> T:
    """Return what is found, in every process of the job.

    Raises:
        CheckpointError: that of one process, in all.
    """
    found = problem = None
    try:
        found = find()
    except CheckpointError as error:
        problem = False, str(error)
    if problems := _problems_of_job(problem):
        raise CheckpointError(problems[0][1])
    return cast(T, found)


def _problems_of_job(problem: tuple[bool, str] | None) -> list[tuple[bool, str]]:
    """Return the problems of all processes; where some have none, with who has them."""
    found = allgather((problem, socket.gethostname()))
    if all(one for one, _ in found):
        return [one for one, _ in found if one]
    return [
        (one[0], f"in process {process} on {host}: {one[1]}")
        for process, (one, host) in enumerate(found)
        if one
    ]


def in_short(error: BaseException) -> str:
    """Say an error in one line, without tensorstore's description of its drivers."""
    text = str(error).partition(" [tensorstore_spec")[0]
    for words in LASTING:
        if words in text:
            return words
    return f"{type(error).__name__}: {' '.join(text.split())}"


def may_pass(error: BaseException | None) -> bool:
    """Tell whether an error is of machine, disk or network, and not of what was read.

    A file that is missing or too short is damage. tensorstore raises ValueErrors that begin with
    the code of a status; it has a code for each (NOT_FOUND, OUT_OF_RANGE, DATA_LOSS, ...).
    """
    while error is not None:
        if isinstance(error, BaseExceptionGroup) and any(map(may_pass, error.exceptions)):
            return True
        about_files = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        if isinstance(error, OSError | MemoryError) and not about_files:
            return True
        if str(error).startswith(PASSING):
            return True
        code = getattr(error, "code", None)  # of a bucket's client
        if isinstance(code, int) and (code == 429 or code >= 500):
            return True
        error = error.__cause__ or error.__context__
    return False


# ---------------------------------------------------------------- what must be the same


def as_saved(state: Any) -> Any:
    """Return a state as checkpoints have it: without `algorithm_state` where nothing is kept.

    So have those of versions that knew no such field, and orbax compares the names.
    """
    if not isinstance(state, TrainState) or state.algorithm_state is not None:
        return state
    return {name: part for name, part in vars(state).items() if name != "algorithm_state"}


def refuse_other(path: str, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare "model", "config", "algorithm_state" and, where both have it, "data" of two metas.

    Raises:
        CheckpointError: they differ in more than may change, see `changed_fields`.
    """
    changed = changed_fields(saved["config"], now["config"])
    data = [{"train_data": meta["data"]} for meta in (saved, now) if "data" in meta]
    for what, different in (
        ("model", differences(saved["model"], now["model"])),
        ("config", changed),
        (
            "data set, or one whose rows have changed",
            differences(data[0], data[-1]) if data else {},
        ),
    ):
        if different:
            raise CheckpointError(
                f"checkpoint {path} is of another {what}; (saved, this run): "
                f"{different}. To start another run, {OWN_FOLDERS}; or undo the change"
            )
    kept = differences(*(meta.get("algorithm_state", {}) for meta in (saved, now)))
    if kept:
        raise CheckpointError(
            f"checkpoint {path} and this run keep different things between steps, by name (saved, "
            f"this run): {kept}. Bring the estimator, callback or trainer back that declared them; "
            f"or, to start another run, {OWN_FOLDERS}"
        )


def sources_of_rewards(functions: Iterable[str], env_classes: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the source of each reward function and environment of the user's.

    Of themselves, not of what they call; see `registry.source_hashes`.

    Args:
        functions: `environment.reward_functions`.
        env_classes: of the prompts.
    """
    found = {}
    for path in functions:
        if not path.startswith("jaxrl."):
            with contextlib.suppress(ValueError):  # it is not here: a replay of another's run
                hashed = source_hash(import_call(path, "reward function"))
                found[f"reward function '{path}'"] = hashed
    for name in dict.fromkeys(env_classes):
        if not envs.is_ours(name):
            with contextlib.suppress(ValueError, ImportError):
                found[f"environment '{name}'"] = source_hash(envs.load(name))
    return found


def warn_of_changed_functions(path: str, saved: dict[str, str], now: dict[str, str]) -> None:
    """Warn of user functions whose source has changed; it may be meant, so go on.

    Their names are in the config and compared there.
    """
    changed = [name for name in saved if name in now and saved[name] != now[name]]
    if changed:
        warnings.warn(
            f"the source of {', '.join(changed)} has changed since {path} was saved; the run goes "
            "on with the new one, and will differ from one that was not interrupted",
            stacklevel=4,
        )


def warn_of_another_course(path: str, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Warn of what may change and yet makes other numbers: the last step, and the mesh.

    A checkpoint of an older version says neither.
    """
    odd = []
    before, after = (meta.get("total_steps") for meta in (saved, now))
    trainer = now["config"]["trainer"] if before and after and before != after else {}
    decaying = [
        f"trainer.{role}.optimizer_config.scheduler={scheduler!r}"
        for role in ("policy", "critic")
        if role in trainer
        and trainer[role]["model"]["path"] is not None  # there is a critic
        and (scheduler := trainer[role]["optimizer_config"]["scheduler"]) in DECAYING
    ]
    if decaying:
        odd.append(
            f"{path} is of a run to step {before}, and this one goes to step {after} "
            f"(trainer.max_training_steps, trainer.epochs), where {' and '.join(decaying)} now "
            "ends: the learning rate jumps, and the run differs from one that had this length from "
            "its start"
        )
    before, after = (meta.get("mesh") for meta in (saved, now))
    if before and after and before != after:
        odd.append(
            f"{path} was saved on the mesh {before}, and this run has {after}: it goes on with the "
            "same numbers up to rounding, not bit for bit"
        )
    for text in odd:
        warnings.warn(text, stacklevel=4)


def shared_folder(field: str, path: str) -> epath.Path:
    """Return `writable_folder`, if all processes of the job see the same one; a collective.

    On hosts with folders of their own each would hold a part of a checkpoint.

    Raises:
        ValueError: it cannot be written to, or process 0 wrote a file into it that another process
            does not see; the message names the config field.
    """
    folder = writable_folder(field, path)
    if jax.process_count() == 1:
        return folder
    probe = folder / f".jaxrl_shared_test_{agree(uuid.uuid4().hex)}"
    if is_first():
        probe.write_text("", encoding="utf-8")
    allgather(None)  # it is there
    seen = allgather((probe.exists(), socket.gethostname()))
    if is_first():
        probe.unlink()
    for process, (sees, host) in enumerate(seen):
        if not sees:
            raise ValueError(
                f"{field}={str(folder)!r} is not one folder for all processes: process {process} "
                f"on {host} does not see what process 0 on {seen[0][1]} writes there. Choose one "
                "that all hosts share, or a bucket"
            )
    return folder


def recorded_settings(trainer: TrainerConfig) -> tuple[dict[str, Any], str]:
    """Return what the checkpoint that a config points to chose by itself, and its path.

    Raises:
        ValueError: it is in a bucket, and a package for that is missing.
    """
    field = "resume_path" if trainer.resume_mode == "from_path" else "ckpt_path"
    if "://" in str(getattr(trainer, field)):  # where it does not answer this takes minutes
        activity.say(f"looking for a checkpoint in {getattr(trainer, field)}")
    with missing_packages_named(f"trainer.{field}", getattr(trainer, field)):
        for path in _checkpoints(trainer):
            try:
                meta, _ = read_metadata(path)
                names = *ON_CPU, *ENGINE_SIZES, KNOWN_IDS, EVAL_PROMPTS, "trainer.eval_batch_size"
                return {name: _value(meta["config"], name) for name in names}, str(path)
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                continue  # damaged: restoring will say so, and fall back in the same order
    return {}, ""


def _checkpoints(trainer: TrainerConfig) -> Iterator[Any]:
    """Yield the folders of checkpoints in the order in which restoring tries them."""
    if trainer.resume_mode == "from_path" and trainer.resume_path:
        yield as_path("trainer.resume_path", trainer.resume_path)
    if trainer.resume_mode != "latest":
        return
    folder = as_path("trainer.ckpt_path", trainer.ckpt_path)
    for step in reversed(checkpoint_steps(folder)):
        yield folder / f"{PREFIX}_{step}"


def _value(settings: Any, name: str) -> Any:
    """Return a field of a nested config; "auto" where an older one does not have it."""
    for key in name.split("."):
        settings = settings.get(key, "auto")
        if not isinstance(settings, dict):
            break
    return settings
