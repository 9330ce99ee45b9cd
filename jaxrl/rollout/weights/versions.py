"""The files of a version of the weights: all of them, or what changed since the version before.

    version-7/index.json                   the version it stands on, and what each file holds
    version-7/9f3c01aa-00000.safetensors   a group: its pieces, or places and values of its changes

Of every tensor of a file the index has the checksum of its bytes, which finds a damaged file; of
every piece that of what it is in this version, which finds changes of another base.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors
from etils import epath
from safetensors.numpy import save

from jaxrl.files import FolderError, sealed, unsealed
from jaxrl.models.export import whole_folder
from jaxrl.parallel.checksums import host_checksums
from jaxrl.rollout.weights.changes import PLACE, Changes, changed
from jaxrl.rollout.weights.groups import Piece
from jaxrl.rollout.weights.incoming import DTYPES
from jaxrl.rollout.weights.share import Held

INDEX, FORMAT = "index.json", 1
FIX = (
    "the trainer then writes the version whole, once; if that is refused, too, see that trainer "
    "and server have the same files there"
)


class VersionDamaged(RuntimeError):
    """Signal that a version is not as it was written, or not there; names file, tensor and fix."""


class GroupFile(NamedTuple):
    """Describe a file.

    Attributes:
        name: in the folder of the version.
        pieces: of the group.
        checksums: of the pieces as they are in this version, see `groups.sums`.
        stored: name and CRC-32 of each tensor of the file.
    """

    name: str
    pieces: tuple[Piece, ...]
    checksums: tuple[int, ...]
    stored: Mapping[str, int]


@dataclass(frozen=True)
class Index:
    """Describe a version.

    Attributes:
        base: the version whose changes some groups are; None = it is whole.
        dtype: of the sampler.
        keep: remember the version, as later ones may be changes of it.
    """

    version: int
    base: int | None
    dtype: str
    keep: bool
    files: tuple[GroupFile, ...]

    @classmethod
    def read(cls, folder: epath.Path) -> "Index":
        """Read the index of a version.

        Raises:
            VersionDamaged: it is not there, or not whole.
        """
        path = folder / INDEX
        try:
            body, _ = unsealed(_content(path).decode())
            if body["format"] != FORMAT:
                raise ValueError(f"format={body['format']!r}, and this jaxrl reads {FORMAT}")
            version, base = int(body["version"]), body["base"]
            files = tuple(_group_file(file) for file in body["files"])
            index = cls(version, base, str(body["dtype"]), bool(body["keep"]), files)
            if index.dtype not in DTYPES or not (base is None or int(base) < version):
                raise ValueError(f"dtype={index.dtype!r}, version={version}, base={base!r}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise VersionDamaged(f"{path} is no index of weights ({error!r}); {FIX}") from error
        return index

    def write(self, folder: epath.Path) -> None:
        """Write the index: with it the version is there."""
        files = [
            file._asdict() | {"pieces": [piece._asdict() for piece in file.pieces]}
            for file in self.files
        ]
        body = {"format": FORMAT, **asdict(self), "files": files}
        text = json.dumps(sealed(body), indent=1) + "\n"
        (folder / INDEX).write_text(text, encoding="utf-8")


def _group_file(body: Any) -> GroupFile:
    pieces = tuple(
        Piece(str(p["name"]), tuple(p["starts"]), tuple(p["shape"]), str(p["dtype"]))
        for p in body["pieces"]
    )
    file = GroupFile(body["name"], pieces, tuple(body["checksums"]), dict(body["stored"]))
    if Path(file.name).name != file.name or len(file.checksums) != len(pieces):
        raise ValueError(f"name={file.name!r}, {len(file.checksums)} checksums")
    return file


def version_folder(root: epath.Path, version: int) -> epath.Path:
    """Return the folder of a version."""
    return root / f"version-{version}"


@contextlib.contextmanager
def new_version(folder: epath.Path) -> Iterator[epath.Path]:
    """Hold the place for the files of a version, of which the block writes the index last.

    On a disk it becomes `folder` then. In a bucket, which renames nothing, it is `folder`: an older
    version of that name stays until the new index takes the place of its own.

    Raises:
        FolderError: something could not be written.
    """
    if "://" not in str(folder):
        with whole_folder(Path(folder), overwrite=True) as new:
            yield epath.Path(new)
        return
    try:
        old = [path.name for path in folder.iterdir()] if folder.exists() else []
        yield folder
        for name in set(old) - {INDEX}:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise FolderError(
            f"could not write {folder} ({error}); see that this run may write there, then start it "
            "again: it goes on from its newest checkpoint"
        ) from error


def delete_version(folder: epath.Path) -> None:
    """Delete a version, its index first; what cannot be deleted is left."""
    with contextlib.suppress(OSError):
        (folder / INDEX).unlink(missing_ok=True)
        folder.rmtree(missing_ok=True)


def _key(number: int, piece: Piece, of: str = "") -> str:
    return f"{number} {piece.name}{of}"


PLACES, VALUES = " places", " values"


def write_group(path: epath.Path, held: Held, base: int | None) -> GroupFile:
    """Write a group: its changes if they are those of `base`, else its pieces."""
    stored: dict[str, np.ndarray] = {}
    for number, piece in enumerate(held.pieces):
        if base is not None and held.base == base:
            made = held.changes[number]
            stored[_key(number, piece, PLACES)] = made.places
            stored[_key(number, piece, VALUES)] = made.values
        else:
            stored[_key(number, piece)] = held.arrays[number]
    path.write_bytes(save(stored))
    return GroupFile(path.name, held.pieces, held.checksums, host_checksums(stored))


def read_group(
    path: epath.Path, file: GroupFile, before: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    """Return the pieces of a group.

    Args:
        before: all arrays of the version before, where the file has changes.

    Raises:
        VersionDamaged: the file is not there, or not as it was written.
    """
    try:
        found = {
            name: np.frombuffer(tensor["data"], np.uint8)
            for name, tensor in safetensors.deserialize(_content(path))
        }
    except safetensors.SafetensorError as error:
        raise VersionDamaged(f"{path} is cut off, or damaged ({error}); {FIX}") from error
    sums = host_checksums(found)
    if sums != file.stored:
        names = sums.keys() | file.stored.keys()
        wrong = sorted(name for name in names if sums.get(name) != file.stored.get(name))
        raise VersionDamaged(
            f"{path} has other bits than were written: tensors {', '.join(wrong)}; {FIX}"
        )
    pieces = []
    for number, piece in enumerate(file.pieces):
        dtype = jnp.dtype(piece.dtype)
        try:
            if (whole := found.get(_key(number, piece))) is not None:
                pieces.append(whole.view(dtype).reshape(piece.shape))
                continue
            places, values = (found[_key(number, piece, of)] for of in (PLACES, VALUES))
            made = Changes(places.view(PLACE), values.view(dtype))
            pieces.append(changed(before[piece.name][piece.box], made))
        except (KeyError, ValueError) as error:
            raise VersionDamaged(f"{path}: {piece.name} is wrong ({error!r}); {FIX}") from error
    return pieces


def _content(path: epath.Path) -> bytes:
    try:
        if os.path.islink(path) or os.path.islink(path.parent):
            raise OSError("it is a link, which may lead elsewhere")
        return path.read_bytes()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        what = "is missing" if missing else f"cannot be read ({error})"
        raise VersionDamaged(f"{path} {what}; {FIX}") from error
