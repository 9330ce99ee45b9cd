"""Checkpoints: one orbax commit holds the whole state of a run."""

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
        """Commit the state after `step` finished steps; a step that is saved already stays."""
        if step in self.manager.all_steps():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        self.manager.save(step, args=args)
        self.manager.wait_until_finished()

    def latest_step(self) -> int | None:
        """Finished steps of the newest checkpoint; None without one."""
        return self.manager.latest_step()

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


def restore(folder: str, step: int, like: TrainState, model: dict[str, Any]) -> TrainState:
    """The state of `folder/global_step_<step>`.

    Raises:
        ValueError: the checkpoint is of another model; the message shows the difference.
    """
    source = Checkpointer(folder)
    saved = source.read_meta(step)["model"]
    different = {k: (saved.get(k), v) for k, v in model.items() if saved.get(k) != v}
    if different:
        raise ValueError(
            f"checkpoint {folder}/{PREFIX}_{step} is of another model; (saved, this run): "
            f"{different}. Set trainer.resume_mode=none or another trainer.ckpt_path"
        )
    state = source.restore(step, like)
    source.close()
    return state


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
    if not path.is_dir():
        raise FileNotFoundError(f"trainer.resume_path={resume_path!r} does not exist")
    return str(path.parent), int(number)


def _complete(path: Path) -> bool:
    return path.name.removeprefix(f"{PREFIX}_").isdigit() and (path / "state").is_dir()
