"""Checkpoints: one orbax commit holds the whole state of a run."""

import fnmatch
import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl.types import TrainState

PREFIX = "global_step"


class Checkpointer:
    """Saves and restores `(TrainState, meta)` under `<folder>/global_step_<N>`.

    A save that did not finish is never seen by a restore: orbax writes into a temporary folder and
    renames it. `meta` is JSON: what the arrays cannot say (config, model, data position).
    """

    def __init__(self, folder: str, *, max_to_keep: int = -1) -> None:
        self.folder = Path(folder).expanduser().absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if max_to_keep == -1 else max_to_keep,
            step_prefix=PREFIX,
            enable_async_checkpointing=False,
            create=True,
        )
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def save(self, step: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Commit the state after `step` finished steps."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        if not self.manager.save(step, args=args):
            raise RuntimeError(f"orbax did not save step {step} to {self.folder}")
        self.manager.wait_until_finished()

    def refuse_later_than(self, step: int) -> None:
        """A run that starts at `step` must not mix its checkpoints with later ones of another.

        Raises:
            ValueError: the folder holds later steps.
        """
        later = sorted(s for s in self.manager.all_steps() if s > step)
        if later:
            raise ValueError(
                f"trainer.ckpt_path={str(self.folder)!r} holds the steps {later} of another run, "
                f"which this one, starting after step {step}, would overwrite. Choose another "
                "trainer.ckpt_path, or delete them, or set trainer.resume_mode=latest"
            )

    def read_meta(self, step: int) -> dict[str, Any]:
        """The JSON part alone."""
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        return self.manager.restore(step, args=args)["meta"]

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of `step`, with the shapes, dtypes and shardings of `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self.manager.restore(step, args=args)["state"]

    def close(self) -> None:
        """Wait for what is being written."""
        self.manager.close()


# What may change between a run and its continuation: where things go, how often, how far.
MAY_CHANGE = (
    "data.val_data",
    "trainer.*_interval",
    "trainer.ckpt_path",
    "trainer.dump_*",
    "trainer.epochs",
    "trainer.eval_*",
    "trainer.export_path",
    "trainer.log*",
    "trainer.max_ckpts_to_keep",
    "trainer.max_training_steps",
    "trainer.micro_*",
    "trainer.policy.model.path",  # the architecture is compared by itself
    "trainer.policy.model.random_init",
    "trainer.project_name",
    "trainer.resume_*",
    "trainer.run_name",
    "generator.eval_*",
    "generator.inference_engine.*",
)


def restore(
    folder: str, step: int, like: TrainState, model: dict[str, Any], config: dict[str, Any]
) -> TrainState:
    """The state of `folder/global_step_<step>`.

    Raises:
        ValueError: the checkpoint is of another model, or of a run with another config; the message
            shows the difference.
    """
    source = Checkpointer(folder)
    meta = source.read_meta(step)
    changed = {
        key: pair
        for key, pair in differences(meta["config"], config).items()
        if not any(fnmatch.fnmatch(key, pattern) for pattern in MAY_CHANGE)
    }
    for what, different in (("model", differences(meta["model"], model)), ("config", changed)):
        if different:
            raise ValueError(
                f"checkpoint {folder}/{PREFIX}_{step} is of another {what}; (saved, this run): "
                f"{different}. Choose another trainer.ckpt_path, or undo the change"
            )
    state = source.restore(step, like)
    source.close()
    return state


def differences(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ: (saved, now). Lists and tuples are the same."""
    left, right = (json.loads(json.dumps(_flat(values))) for values in (saved, now))
    return {
        key: (left.get(key), right.get(key))
        for key in sorted({*left, *right})
        if left.get(key) != right.get(key)
    }


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def locate(
    resume_mode: str | None, resume_path: str | None, ckpt_path: str
) -> tuple[str, int] | None:
    """Folder and step to resume from, or None to start afresh.

    Args:
        resume_mode: None or "none", "latest" (of `ckpt_path`), or "from_path".
        resume_path: `.../global_step_<N>` for "from_path".
        ckpt_path: where this run keeps its checkpoints.

    Raises:
        ValueError: resume_path does not end in global_step_<N>.
        FileNotFoundError: resume_path does not exist.
    """
    if resume_mode in (None, "none"):
        return None
    if resume_mode == "latest":
        folder = Path(ckpt_path).expanduser().absolute()
        steps = [int(p.name.split("_")[-1]) for p in folder.glob(f"{PREFIX}_*") if _complete(p)]
        return (str(folder), max(steps)) if steps else None
    path = Path(resume_path or "").expanduser().absolute()
    number = path.name.removeprefix(f"{PREFIX}_")
    if not path.name.startswith(PREFIX) or not number.isdigit():
        raise ValueError(f"trainer.resume_path={resume_path!r} must end in {PREFIX}_<N>")
    if not _complete(path):
        raise FileNotFoundError(
            f"trainer.resume_path={resume_path!r} does not exist or is not a whole checkpoint"
        )
    return str(path.parent), int(number)


def _complete(path: Path) -> bool:
    return path.name.removeprefix(f"{PREFIX}_").isdigit() and (path / "state").is_dir()
