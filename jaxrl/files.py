"""Folders that a run writes to, and files that are either the old or the new, never a half."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from etils import epath

SCHEMES = ("gs", "s3")
_OF_GOOGLE = "; for credentials, gcloud auth application-default login"


class FolderError(ValueError):
    """Say that this run cannot work in a folder: it is another run's, or its disk is full."""


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
            f"({type(error).__name__}: {error}). Choose another, or change its permissions"
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


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a path to write a local file to; after the block it replaces the old one at `path`."""
    new = path.with_name(f".{path.name}.new")
    yield new
    os.replace(new, path)


def replace_text(path: Path, text: str) -> None:
    """Write a local text file; whoever opens it sees the old content or the new, whole."""
    with replaced(path) as new:
        new.write_text(text, encoding="utf-8")
