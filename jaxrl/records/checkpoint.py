"""Checkpoints: one orbax commit holds the whole state of a run.

    <ckpt_path>/global_step_<N>/state    the TrainState, sharded arrays
    <ckpt_path>/global_step_<N>/meta     JSON: model, config, user functions, checksums
    <ckpt_path>/global_step_<N>/buffer   what an asynchronous run had sampled and not yet trained

Nothing in it is pickled. Orbax writes into a temporary folder and renames it, so that a save that
did not finish is never seen by a restore.
"""

import contextlib
import itertools
import json
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxrl.config.platform import ON_CPU
from jaxrl.config.trainer import TrainerConfig
from jaxrl.files import as_path, missing_packages_named, writable_folder
from jaxrl.parallel import agree, allgather, is_first
from jaxrl.parallel.checksums import checksums, host_checksums
from jaxrl.records.resume_identity import OWN_FOLDERS, changed_fields, differences
from jaxrl.types import TrainState

PREFIX = "global_step"
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

Buffer = dict[str, np.ndarray]  # what waits to be trained
T = TypeVar("T")


class CheckpointError(ValueError):
    """Say that this run cannot go on from the checkpoint that it was pointed to."""


class DamagedCheckpoint(CheckpointError):
    """Say that files of a checkpoint are missing, cut, or not what was saved."""


class UnreadableCheckpoint(CheckpointError):
    """Say that a checkpoint cannot be read now, and may be another time."""


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
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if max_to_keep == -1 else max_to_keep,
            step_prefix=PREFIX,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=not read_only,  # of a run that was killed in a save
            create=False,
            lightweight_initialize=True,  # a damaged checkpoint must not keep others from loading
        )
        with missing_packages_named(field, folder):
            self.manager = ocp.CheckpointManager(
                self.folder, options=options, item_handlers=item_handlers()
            )
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
            meta: JSON, what the arrays cannot say: "model", "config", "functions".
            buffer: not empty, nor are its arrays; None = there is none.

        Raises:
            RuntimeError: this save, or the one before, which ended in the meantime, failed.
        """
        self.wait()
        self._saving = self._uncommitted = step
        meta = {**meta, "checksums": checksums(state)}
        items: dict[str, Any] = {"state": ocp.args.PyTreeSave(state)}
        if buffer is not None:
            meta["buffer_checksums"] = host_checksums(buffer)
            items["buffer"] = ocp.args.PyTreeSave(buffer)
        args = ocp.args.Composite(**items, meta=ocp.args.JsonSave(meta))
        with self._named_failure():
            if not self.manager.save(step, args=args):
                raise ValueError(f"the folder already holds a step after {step}")
        return str(self.folder / f"{PREFIX}_{step}")

    def wait(self) -> None:
        """Wait until the last save is committed.

        Raises:
            RuntimeError: it failed.
        """
        with self._named_failure():
            self.manager.wait_until_finished()
        if self._uncommitted is not None:
            self.on_commit(str(self.folder / f"{PREFIX}_{self._uncommitted}"))
            self._uncommitted = None

    def close(self) -> None:
        """Wait, then stop the threads that write."""
        self.wait()
        self.manager.close()

    @contextlib.contextmanager
    def _named_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._uncommitted = None
            raise RuntimeError(
                f"could not save step {self._saving} to trainer.ckpt_path={str(self.folder)!r}: "
                f"{type(error).__name__}: {error}. Its earlier checkpoints are whole: mend the "
                "folder (space, permissions), start again with trainer.resume_mode=latest"
            ) from error

    # ---------------------------------------------------------------- restore

    def refuse_later_than(self, step: int) -> None:
        """Refuse to start at `step` in a folder that holds later checkpoints of another run.

        Raises:
            CheckpointError: the folder holds later steps.
        """
        later = sorted(s for s in self.manager.all_steps() if s > step)
        if later:
            raise CheckpointError(
                f"trainer.ckpt_path={str(self.folder)!r} holds the steps {later} of another run, "
                f"which this one, starting after step {step}, would overwrite. To start another "
                f"run, {OWN_FOLDERS}; or delete them, or set trainer.resume_mode=latest"
            )

    def read_meta(self, step: int) -> dict[str, Any]:
        """Return the JSON part of a checkpoint alone."""
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta = self.manager.restore(step, args=args)["meta"]
        if missing := META_KEYS - set(meta or {}):
            raise ValueError(f"meta lacks {sorted(missing)}")
        return meta

    def restore(self, step: int, abstract_state: TrainState, meta: dict[str, Any]) -> TrainState:
        """Return the state of a step, with the shapes, dtypes and shardings of `abstract_state`.

        What else was saved is then in `restored_meta` and `restored_buffer`.

        Args:
            meta: what this run would save; a changed source of a user function is warned of.

        Raises:
            DamagedCheckpoint: files are missing or not what was saved.
            UnreadableCheckpoint: they cannot be read now, though tried several times.
            CheckpointError: the checkpoint is of another model, or of a run with another config;
                the message shows the difference.
        """
        path = self.folder / f"{PREFIX}_{step}"
        saved = _read(path, lambda: self.read_meta(step))
        refuse_other(str(path), saved, meta)
        warn_of_changed_functions(str(path), saved["functions"], meta["functions"])
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, abstract_state)
        targets = ocp.checkpoint_utils.construct_restore_args(abstract)
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(abstract, restore_args=targets))

        def read() -> tuple[TrainState, Buffer | None]:
            state = self.manager.restore(step, args=args)["state"]
            if different := differences(saved["checksums"], checksums(state)):
                raise ValueError(f"the values of {sorted(different)} are not those that were saved")
            return state, self._read_buffer(step, saved.get("buffer_checksums"))

        state, buffer = _read(path, read)
        self.restored_meta, self.restored_buffer = saved, buffer
        return state

    def _read_buffer(self, step: int, saved: dict[str, int] | None) -> Buffer | None:
        if saved is None:
            return None
        args = ocp.args.Composite(buffer=ocp.args.PyTreeRestore())
        found = self.manager.restore(step, args=args)["buffer"]
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
        steps = _read(self.folder, self.manager.all_steps)
        for step in sorted(steps, reverse=True):
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
            path.rename(target)
        allgather(None)  # it is there
        self.manager.reload()
        warnings.warn(
            f"{error}. Falling back to step {older}; the damaged one is kept as {target.name}",
            stacklevel=3,
        )


def checkpoint_steps(folder: epath.Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, in order."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    numbers = [n.removeprefix(f"{PREFIX}_") for n in names if n.startswith(f"{PREFIX}_")]
    return sorted(int(number) for number in numbers if number.isdigit())


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
        FileNotFoundError: resume_path does not exist.
    """
    found = None
    if resume_mode == "latest":
        found = checkpointer.restore_latest(abstract_state, meta)
    elif resume_mode == "from_path":
        folder, step = parse_resume_path(resume_path or "")
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


def parse_resume_path(resume_path: str, field: str = "trainer.resume_path") -> tuple[str, int]:
    """Return folder and step of `.../global_step_<N>`.

    Args:
        field: what the user calls it.

    Raises:
        CheckpointError: resume_path does not end so.
        FileNotFoundError: it does not exist.
    """
    path = as_path(field, resume_path)
    number = path.name.removeprefix(f"{PREFIX}_")
    if not path.name.startswith(PREFIX) or not number.isdigit():
        raise CheckpointError(f"{field}={resume_path!r} must end in {PREFIX}_<N>")
    with missing_packages_named(field, resume_path):
        found = path.exists()
    if not found:
        raise FileNotFoundError(f"{field}={resume_path!r} does not exist")
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
            problem = may_pass(error), f"{type(error).__name__}: {error}"
            cause = error if pause is None or not problem[0] else None  # it holds what was read
        problems = [one for one in allgather(problem) if one]
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


def refuse_other(path: str, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare "model", "config" and, where both have it, "data" of two metas.

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
        probe.write_text("")
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


def item_handlers() -> dict[str, Any]:
    """Return orbax's handlers of the items state, meta and buffer."""
    return {
        "state": array_handler(),
        "meta": ocp.JsonCheckpointHandler(),
        "buffer": ocp.PyTreeCheckpointHandler(),
    }


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """Return the handler of the state, which writes the first copy of a replicated array.

    Orbax's own way, a slice of every copy, compiles a program for each slice in the first save.
    """
    handlers = ocp.type_handlers
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=handlers.create_type_handler_registry(
            (jax.Array, handlers.ArrayHandler(use_replica_parallel=False)),
            (np.ndarray, handlers.NumpyHandler()),
        )
    )


def recorded_settings(trainer: TrainerConfig) -> tuple[dict[str, Any], str]:
    """Return what the checkpoint that a config points to made of "auto", and its path."""
    for path in _checkpoints(trainer):
        try:
            meta = json.loads((path / "meta" / "metadata").read_text())
            return {name: _value(meta["config"], name) for name in ON_CPU}, str(path)
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
