"""Training batches on disk, one `.npz` per step, for whoever wants to look at them later.

A file holds the arrays of the `TrainBatch` that a step trained, under its fields' names and with
their dtypes (`types.py` has shapes and meaning); a field that the run did not need is absent. Two
numbers beside them: `step`, and `format`, the version of this layout. Nothing is pickled.
"""

import dataclasses
import zipfile
from pathlib import Path

import numpy as np

from jaxrl.files import replaced
from jaxrl.types import TrainBatch

FORMAT = 1
_FIELDS = dataclasses.fields(TrainBatch)
_REQUIRED = {f.name for f in _FIELDS if f.default is dataclasses.MISSING} - {"rollout_log_probs"}


def batch_path(export_path: str | Path, step: int) -> Path:
    """Return where the batch of a step is.

    That is `dumped_data/global_step_<N>_training_input.npz`.
    """
    return Path(export_path) / "dumped_data" / f"global_step_{step}_training_input.npz"


def dump_batch(path: Path, batch: TrainBatch, step: int) -> None:
    """Write a batch; the file has its name only once it is whole.

    Raises:
        FolderError: it could not be written.
    """
    import jax  # here: a file is read without

    fields = {f.name: getattr(batch, f.name) for f in _FIELDS}
    arrays = jax.device_get({name: x for name, x in fields.items() if x is not None})
    with replaced(path) as new, new.open("wb") as file:
        np.savez(file, **arrays, step=np.int32(step), format=np.int32(FORMAT))


def load_batch(path: str | Path) -> TrainBatch:
    """Return the batch that a step trained, as host arrays.

    Raises:
        FileNotFoundError: no such file; says which steps are beside it.
        ValueError: not a file of `dump_batch`, a damaged one, or one of another version.
    """
    path = Path(path)
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*_training_input.npz"))
        raise FileNotFoundError(
            f"{path} does not exist; its folder holds {beside or 'no batch'}. A run writes them "
            "with trainer.dump_data_batch=true"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a whole .npz file ({error}); dump it again") from error
    if missing := sorted({"step", "format", *_REQUIRED} - set(arrays)):
        raise ValueError(f"{path} lacks {missing}: trainer.dump_data_batch did not write it")
    written, _ = int(arrays.pop("format")), arrays.pop("step")
    unknown = sorted(set(arrays) - {f.name for f in _FIELDS})
    if written != FORMAT or unknown:
        raise ValueError(
            f"{path} has format {written} and the unknown arrays {unknown}, this jaxrl reads "
            f"format {FORMAT}: read it with the version that wrote it, or dump it again"
        )
    arrays.setdefault("rollout_log_probs", None)
    return TrainBatch(**arrays)
