"""Folders that a run writes to, and its small files: whole, on disk, and with a checksum.

A file is either the old or the new, never a half, and where it cannot be written an error names it.
What steers a run that goes on has a checksum in it, its seal: JSON under a key of its own, text
that takes comments in its last line.
"""

import contextlib
import errno
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

SCHEMES = ("gs", "s3")
_OF_GOOGLE = "; for credentials, gcloud auth application-default login"


SEAL, SEAL_LINE = "seal", "# sha256: "
NO_SYNC = (  # what disks say that cannot sync a folder, or let nobody open it
    errno.EBADF,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EACCES,
    errno.EPERM,
)


class FolderError(ValueError):
    """Say that this run cannot work in a folder: it is another run's, or its disk is full."""


class DamagedFile(ValueError):
    """Say that a file is not as it was written."""


def as_path(field: str, path: str) -> epath.Path:
    """Return a local path ("file://" or plain) made absolute, or a path in a bucket.

    Raises:
        ValueError: another scheme; the message names the config field.
    """
    plain = path.removeprefix("file://")
    scheme, separator, _ = plain.partition("://")
    if not separator:
        return epath.Path(os.path.abspath(plain))
    if scheme not in SCHEMES:
        raise ValueError(
            f"{field}={path!r}: cannot write to {scheme}://; give a local folder, or one that "
            f"starts with {' or '.join(f'{name}://' for name in SCHEMES)}"
        )
    return epath.Path(plain)


def writable_folder(field: str, path: str | os.PathLike[str]) -> epath.Path:
    """Return the folder, created if need be, after a file was written to it and removed.

    Raises:
        ValueError: it cannot be, so that a run stops before its first step; the message names the
            config field.
    """
    folder = as_path(field, os.fspath(path))
    try:
        with missing_packages_named(field, os.fspath(path)):
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".jaxrl_write_test_{uuid.uuid4().hex}"  # of this process alone
            probe.write_text("", encoding="utf-8")
            probe.unlink()
    except OSError as error:
        raise ValueError(
            f"{field}={os.fspath(path)!r} is not a folder that this run can write to "
            f"({type(error).__name__}: {error}). Choose another, or free space there, or change "
            f"its permissions"
            f"{_OF_GOOGLE if os.fspath(path).startswith('gs://') else ''}"
        ) from error
    return folder


@contextlib.contextmanager
def missing_packages_named(field: str, path: str) -> Iterator[None]:
    """Turn an ImportError of the block into an error that says what to install.

    Paths in buckets need packages that a local run does not.

    Raises:
        ValueError: one is missing; the message says how to get it.
    """
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"{field}={path!r} needs a package that is not installed ({error}): pip install "
            f"{'s3fs' if path.startswith('s3://') else repr('jaxrl[gcs]')}"
        ) from error


def check_file(flag: str, path: Path | None) -> None:
    """Check that a local file can be written, before the work whose results go there.

    Raises:
        ValueError: it cannot; the message names the option of the command.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{flag}={path} is a folder; add the name of a file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(
            f"{flag}={path}: {path.parent} is not a folder that can be written to; make it, or "
            "choose another"
        )


# ---------------------------------------------------------------- whole or not at all


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError of the block, which writes to `path`, into one that names it and the fix.

    Raises:
        FolderError: in place of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise FolderError(
            f"cannot write {os.fspath(path)} ({error.strerror or error}): free space on its disk, "
            "or mend the permissions there, and start again"
        ) from error


@contextlib.contextmanager
def replaced(path: Path, *, part: str = "new", sync: bool = True) -> Iterator[Path]:
    """Yield a path to write a local file to; after the block it replaces the old one at `path`.

    Its folder is made if need be. After a power cut, too, there is the old file or the new, whole.
    A link stays, and what it names is replaced. What is no file, as /dev/stdout, is written to.

    Args:
        part: ends the name that the file has until then; of each process that may write it another.
        sync: False where it may be lost, as when the process that wrote it is.

    Raises:
        FolderError: it could not be written; the old one is as it was.
    """
    with writing(path):
        if path.exists() and not path.is_file():
            yield path
            return
        target = Path(os.path.realpath(path))
        new = target.with_name(f".{target.name}.{part}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            yield new
            if sync:
                sync_file(new)
            os.replace(new, target)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        if sync:
            sync_names(target.parent)


def replace_text(path: Path | epath.Path, text: str) -> None:
    """Write a text file, on a disk or in a bucket; whoever opens it sees the old or the new, whole.

    Raises:
        FolderError: it could not be written; the old one is as it was.
    """
    if "://" in str(path):  # an object is there when all of it is
        with writing(path):
            path.write_text(text, encoding="utf-8")
        return
    with replaced(Path(path)) as new:
        new.write_text(text, encoding="utf-8")


def sync_file(path: Path) -> None:
    """Wait until what is in a file is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_names(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        opened = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


# ---------------------------------------------------------------- sealed


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON with a checksum of all of it, which `unsealed` compares."""
    return {**content, SEAL: _digest_of_json(content)}


def unsealed(text: str) -> tuple[dict[str, Any], bool]:
    """Return the JSON that `sealed` was given, and whether there was a checksum.

    Versions of jaxrl before 2026-11-28 wrote none.

    Raises:
        DamagedFile: it is no JSON of that kind, or not what was written.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DamagedFile(f"it is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise DamagedFile(f"it is JSON of another kind, a {type(content).__name__}")
    seal = content.pop(SEAL, None)
    if seal is not None and seal != _digest_of_json(content):
        raise DamagedFile("its checksum is that of another content")
    return content, seal is not None


def sealed_text(text: str) -> str:
    """Return lines that take comments with a checksum of them, which `unsealed_text` compares."""
    return f"{text}{SEAL_LINE}{hashlib.sha256(text.encode()).hexdigest()}\n"


def unsealed_text(text: str) -> str:
    """Return the text that `sealed_text` was given; one without a checksum as it is.

    Raises:
        DamagedFile: it is not what was written.
    """
    before, line, digest = text.rpartition(SEAL_LINE)
    if not line:
        return text
    if digest.strip() != hashlib.sha256(before.encode()).hexdigest():
        raise DamagedFile(
            "its last line is the checksum of another text; whoever changed it on purpose deletes "
            "that line"
        )
    return before


def _digest_of_json(content: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(content))  # tuples, and keys that are numbers
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
