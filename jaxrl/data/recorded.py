"""The trajectories that a step was trained on, a file per step: the recorded batch of `replay`.

    <run folder>/rollouts/step_000012.npz

It holds the columns that `Trainer.rollouts` returned, as they were before rewards are shaped; all
that a step computes follows from them and from the state before it. Lists per token are one array
each, with the length of every row; what is not numbers is JSON. Nothing is pickled.

In a job of several processes each has the experts of the rows that it sampled. The first writes its
own into this file, and every other one those that it has into

    <run folder>/processes/<i>/rollouts/step_000012.npz

The first file has a digest of what is in each of these.
"""

import contextlib
import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from jaxrl.data.columns import NO_ROUTES, ROUTES, ROUTES_PROCESS, TOKEN_COLUMNS
from jaxrl.files import replaced
from jaxrl.types import GeneratorOutput, TrajectoryID

FORMAT = 1
_KEPT = "kept between steps: "
_NUMBER = -1  # in place of a length: the row is one number, a reward for the whole response
_PER_TOKEN = dict.fromkeys(("prompt_token_ids", "response_ids"), np.int32) | {
    column.name: column.stored for column in TOKEN_COLUMNS if column.stored
}
_PER_ROW = {
    "policy_versions": np.int32,
    "is_last_step": np.bool_,
    "demonstrated": np.bool_,
    "ledger_ids": np.int64,
    ROUTES_PROCESS: np.int32,
}
_DIGESTS = "digests of routes"  # by process


_DAMAGED = ValueError, KeyError, EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error


def rollouts_path(run_folder: Path, step: int) -> Path:
    """Return the path of the trajectories of a step."""
    return run_folder / "rollouts" / f"step_{step:06d}.npz"


def write_rollouts(
    path: Path,
    arrays: dict[str, np.ndarray],
    uids: Sequence[str],
    kept: Mapping[str, Mapping[str, np.ndarray]] = MappingProxyType({}),
    routes_digests: Sequence[str] = (),
) -> str:
    """Write trajectories and the prompt of each; returns the digest of the file.

    The file is on disk, whole, when it has its name.

    Args:
        arrays: of `to_arrays`.
        kept: what callbacks keep, "before" the step and "after" it, by name.
        routes_digests: of a job, `routes_digest` of each process.

    Raises:
        FolderError: it could not be written.
    """
    arrays = arrays | {
        f"{_KEPT}{when}.{name}": value for when in kept for name, value in kept[when].items()
    }
    about = {"uids": _json_array(json.dumps(list(uids))), "format": np.array(FORMAT, np.int32)}
    if routes_digests:
        about[_DIGESTS] = _json_array(json.dumps(list(routes_digests)))
    return _write(path, arrays | about)


def own_routes(output: GeneratorOutput, process: int) -> dict[str, np.ndarray]:
    """Return the experts that a process has, as the arrays of its file."""
    columns = zip(cast(dict, output)[ROUTES], cast(dict, output)[ROUTES_PROCESS], strict=True)
    rows = [routes for routes, at in columns if at == process] or [NO_ROUTES]
    return to_arrays(cast(GeneratorOutput, {ROUTES: rows}))


def routes_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the digest of what `own_routes` gave."""
    return _digest(arrays[f"{ROUTES}.lengths"].tobytes() + arrays[ROUTES].tobytes())


def write_routes(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write what `own_routes` gave; the file is on disk, whole, when it has its name.

    Raises:
        FolderError: it could not be written.
    """
    _write(path, arrays)


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    with replaced(path) as new:
        new.write_bytes(buffer.getbuffer())
    return _digest(buffer.getvalue())


def file_digest(path: Path) -> str:
    """Return what `write_rollouts` returned, if the file is as it was written."""
    return _digest(path.read_bytes())


def read_rollouts(path: Path, *, with_routes: bool = True) -> tuple[GeneratorOutput, list[str]]:
    """Read the trajectories of a step and the prompt of each.

    Args:
        with_routes: read the experts of tokens too, of which each process of a job has written a
            part.

    Raises:
        FileNotFoundError: no such file, or none of a process of its job.
        ValueError: it is damaged, or of another version.
    """
    left_out = (_DIGESTS,) if with_routes else (_DIGESTS, ROUTES, f"{ROUTES}.lengths")
    with _damage_named(path):
        with np.load(path, allow_pickle=False) as file:
            names = (n for n in file.files if n not in left_out and not n.startswith(_KEPT))
            arrays = {name: file[name] for name in names}
        written = int(arrays.pop("format"))
        uids = _from_json(arrays.pop("uids"))
        output = from_arrays(arrays)
    if written != FORMAT:
        raise ValueError(
            f"{path} has format {written}, this jaxrl reads {FORMAT}: read it with the version "
            "that wrote it"
        )
    processes = cast(dict, output).pop(ROUTES_PROCESS, None)
    if with_routes and processes is not None:
        for process, routes in routes_elsewhere(path).items():
            rows = [row for row, at in enumerate(processes) if at == process]
            for row, known in zip(rows, routes, strict=True):
                cast(dict, output)[ROUTES][row] = known
    return output, uids


def routes_elsewhere(path: Path) -> dict[int, list[np.ndarray]]:
    """Read the experts that processes other than the first have written, by process.

    Args:
        path: of the step's trajectories.

    Raises:
        FileNotFoundError: a file of one of them is not there.
        ValueError: one is damaged, or not what was written at that step.
    """
    with _damage_named(path), np.load(path, allow_pickle=False) as file:
        if _DIGESTS not in file.files:
            return {}
        digests, processes = _from_json(file[_DIGESTS]), set(file[ROUTES_PROCESS].tolist())
    from jaxrl.parallel import record_folder  # here: what one process has written needs no JAX

    found = {}
    for process in sorted(processes - {0}):
        own = record_folder(path.parents[1], process) / path.parent.name / path.name
        try:
            with _damage_named(own), np.load(own, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
                digest = routes_digest(arrays)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{own} is gone, the experts of the tokens that process {process} sampled for "
                f"{path}: copy it from the host of that process"
            ) from error
        if digest != digests[process]:
            raise ValueError(
                f"{own} is not what process {process} wrote beside {path}: its digest is {digest}, "
                f"{digests[process]} is recorded; copy it from the host of that process"
            )
        found[process] = cast(dict, from_arrays(arrays))[ROUTES]
    return found


def read_kept(path: Path, when: str) -> dict[str, np.ndarray]:
    """Return what callbacks kept, "before" the step or "after" it, by name."""
    begin = f"{_KEPT}{when}."
    with _damage_named(path), np.load(path, allow_pickle=False) as file:
        return {n.removeprefix(begin): file[n] for n in file.files if n.startswith(begin)}


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except _DAMAGED as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); nothing replaces it but a run "
            "that does the step again"
        ) from error


def to_arrays(output: GeneratorOutput) -> dict[str, np.ndarray]:
    """Turn columns into arrays, without loss; `from_arrays` undoes it.

    Raises:
        TypeError: a column of a custom generator or environment is not JSON.
    """
    arrays: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, column in output.items():
        if isinstance(column, list) and name in _PER_TOKEN:
            rows = [np.asarray(row, _PER_TOKEN[name]) for row in column]
            sizes = [row.size if row.ndim else _NUMBER for row in rows]
            arrays[f"{name}.lengths"] = np.array(sizes, np.int32)
            arrays[name] = np.concatenate([np.atleast_1d(row) for row in rows])
        elif isinstance(column, list) and name == ROUTES:
            arrays[f"{name}.lengths"] = np.array([len(row) for row in column], np.int32)
            known = [row for row in column if len(row)] or column[:1]
            arrays[name] = np.concatenate(known)
        elif isinstance(column, list) and name in _PER_ROW:
            arrays[name] = np.array(column, _PER_ROW[name])
        else:
            rest[name] = column
    texts = (f"{json.dumps(name)}: {_to_json(name, column)}" for name, column in rest.items())
    return arrays | {"json": _json_array(f"{{{', '.join(texts)}}}")}


def from_arrays(arrays: dict[str, np.ndarray]) -> GeneratorOutput:
    """Return the columns that `to_arrays` was given."""
    output: dict[str, Any] = _from_json(arrays["json"])
    for name, array in arrays.items():
        if name == "json" or name.endswith(".lengths"):
            continue
        lengths = arrays.get(f"{name}.lengths")
        if name == ROUTES:
            assert lengths is not None
            output[name] = np.split(array, np.cumsum(lengths)[:-1])
            continue
        output[name] = array.tolist() if lengths is None else _split(array.tolist(), lengths)
    if "trajectory_ids" in output:
        output["trajectory_ids"] = [TrajectoryID(*i) for i in output["trajectory_ids"]]
    if "kept" in output:
        output["kept"] = [[tuple(ids) for ids in row] for row in output["kept"]]
    return cast(GeneratorOutput, output)


def _split(values: list[Any], lengths: np.ndarray) -> list[Any]:
    ends = np.cumsum(np.where(lengths == _NUMBER, 1, lengths)).tolist()
    return [
        values[end - 1] if n == _NUMBER else values[end - n : end]
        for end, n in zip(ends, lengths.tolist(), strict=True)
    ]


def _json_array(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def _to_json(name: str, column: Any) -> str:
    try:
        return json.dumps(column, default=_plain)
    except TypeError as error:
        whose = f"the column {name!r} of the rollouts"
        if name == "measured":
            whose = f"what is measured in environment {', '.join(sorted({m[0] for m in column}))}"
        raise TypeError(f"{whose} {error}") from error


def _from_json(array: np.ndarray) -> Any:
    return json.loads(array.tobytes())


def _plain(value: Any) -> Any:
    """Turn numbers of numpy, which custom generators like to give, into plain ones."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"holds a {type(value).__name__}, which is not JSON: give numbers and text")


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
