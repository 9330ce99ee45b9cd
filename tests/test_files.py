"""Folders that a run writes to, and files replaced whole."""

import errno
import importlib.util
import json
import os
import stat

import fsspec
import pytest
from etils import epath
from etils.epath.backend import fsspec_backend

from jaxrl.cluster.supervise import newest_step
from jaxrl.config import TrainConfig
from jaxrl.files import (
    DamagedFile,
    FolderError,
    as_path,
    replace_text,
    sealed,
    sealed_text,
    unsealed,
    unsealed_text,
    writable_folder,
)
from jaxrl.records.checkpoint import CheckpointError, parse_resume_path, recorded_settings
from tests.full_disk import Disk


def test_plain_paths_and_file_urls_are_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(as_path("trainer.ckpt_path", "a/../b")) == f"{tmp_path}/b"
    assert str(as_path("trainer.ckpt_path", "file:///a/b")) == "/a/b"


def test_a_bucket_keeps_its_name():
    """pathlib would make "gs:/bucket" of it."""
    path = as_path("trainer.ckpt_path", "gs://bucket/run/checkpoints")
    assert str(path / "global_step_3") == "gs://bucket/run/checkpoints/global_step_3"
    assert str(path.parent) == "gs://bucket/run"


@pytest.mark.skipif(bool(importlib.util.find_spec("gcsfs")), reason="would ask the network")
def test_a_bucket_without_its_packages_says_what_to_install():
    message = r"trainer.ckpt_path='gs://bucket/x' needs a package .* pip install 'jaxrl\[gcs\]'"
    with pytest.raises(ValueError, match=message):
        writable_folder("trainer.ckpt_path", "gs://bucket/x")


@pytest.mark.skipif(bool(importlib.util.find_spec("gcsfs")), reason="would ask the network")
def test_the_first_look_for_a_checkpoint_names_the_field_of_a_bucket():
    """Of a run before its folders are made, and of the launcher."""
    trainer = TrainConfig().trainer
    trainer.ckpt_path = "gs://bucket/x"
    message = r"trainer.ckpt_path='gs://bucket/x' needs a package .* pip install 'jaxrl\[gcs\]'"
    with pytest.raises(ValueError, match=message):
        recorded_settings(trainer)
    with pytest.raises(ValueError, match=message):
        newest_step("gs://bucket/x")
    trainer.resume_mode, trainer.resume_path = "from_path", "gs://bucket/x/global_step_1"
    with pytest.raises(ValueError, match="trainer.resume_path='gs://bucket/x/global_step_1' needs"):
        recorded_settings(trainer)


@pytest.mark.skipif(bool(importlib.util.find_spec("s3fs")), reason="would ask the network")
def test_another_bucket_needs_another_package():
    with pytest.raises(
        ValueError, match=r"trainer.ckpt_path='s3://b/x' needs .*: pip install s3fs"
    ):
        writable_folder("trainer.ckpt_path", "s3://b/x")


def test_a_bucket_is_written_through_fsspec(monkeypatch):
    """fsspec's own memory stands in for the bucket."""
    monkeypatch.setattr(fsspec_backend, "_get_filesystem", lambda name: fsspec.filesystem("memory"))
    folder = writable_folder("trainer.ckpt_path", "gs://bucket/run")
    (folder / "global_step_3").mkdir()
    assert [path.name for path in folder.iterdir()] == ["global_step_3"]
    replace_text(folder / "owner.json", "{}")
    assert (folder / "owner.json").read_text() == "{}"
    (folder / "owner.json").unlink()
    step = "gs://bucket/run/global_step_3"
    assert parse_resume_path(step) == ("gs://bucket/run", 3)
    with pytest.raises(CheckpointError, match="global_step_4' does not exist; .*: \\[3\\]"):
        parse_resume_path("gs://bucket/run/global_step_4")


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match=r"trainer.ckpt_path='ftp://x/y': cannot write to ftp://"):
        as_path("trainer.ckpt_path", "ftp://x/y")


def test_a_writable_folder_is_created_and_left_empty(tmp_path):
    folder = writable_folder("trainer.log_path", tmp_path / "a" / "b")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_file_where_a_folder_should_be_is_refused(tmp_path, below):
    path = f"{tmp_path}/file{below}"
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=rf"trainer.log_path='{path}' is not a folder that .* can"):
        writable_folder("trainer.log_path", path)


def test_a_folder_without_write_permission_is_refused(tmp_path, monkeypatch):
    """Simulated: root may write everywhere."""

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("jaxrl.files.epath.Path.write_text", refuse)
    with pytest.raises(ValueError, match=r"trainer.export_path=.*PermissionError.*Choose another"):
        writable_folder("trainer.export_path", tmp_path)


def test_replace_text_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    replace_text(path, "old")
    replace_text(path, "new")
    assert path.read_text() == "new"
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "newer \ud800")  # cannot be written in the middle
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["config.yaml"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("write", ["open", "write", "fsync", "replace"])
def test_a_file_that_cannot_be_written_is_named_and_the_old_one_stays(tmp_path, write, error):
    path = tmp_path / "latest.txt"
    replace_text(path, "old")
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, tmp_path, f"{write} .latest.txt.new", error)
        with pytest.raises(FolderError) as refused:
            replace_text(path, "new")
    # what content finds is a full disk in either case
    word = os.strerror(errno.ENOSPC if write == "write" else error)
    assert str(refused.value) == (
        f"cannot write {path} ({word}): free space on its disk, or mend the permissions there, and "
        "start again"
    )
    assert path.read_text() == "old"
    if error == errno.ENOSPC:  # else nothing can be removed, either
        assert os.listdir(tmp_path) == ["latest.txt"]
    replace_text(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["latest.txt"]


def test_a_folder_that_cannot_be_made_is_named_with_the_file(tmp_path, monkeypatch):
    Disk(monkeypatch, tmp_path, "mkdir run")
    with pytest.raises(FolderError, match=f"cannot write {tmp_path}/run/latest.txt .No space left"):
        replace_text(tmp_path / "run" / "latest.txt", "new")


def test_a_bucket_that_cannot_be_written_is_named(monkeypatch):
    def full(path, *args, **kwargs):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    path = as_path("", "gs://bucket/run/owner.json")
    monkeypatch.setattr(type(path), "write_text", full)
    with pytest.raises(FolderError, match="cannot write gs://bucket/run/owner.json .Disk quota"):
        replace_text(path, "new")


def test_content_is_on_the_disk_before_its_name_and_the_name_at_the_end(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, tmp_path, 10**9)
    replace_text(epath.Path(tmp_path / "a" / "latest.txt"), "new")
    names = [f"{what} a/.latest.txt.new" for what in ("open", "write", "fsync", "replace")]
    assert disk.writes == ["mkdir a", *names, "fsync a"]


@pytest.mark.parametrize("where", ["open", "fsync"])
def test_a_disk_that_cannot_sync_names_is_written_to(tmp_path, monkeypatch, where):
    """Some say so in these words, and some do not let a folder be opened."""
    (path := tmp_path / "latest.txt").touch()
    call = getattr(os, where)
    for error in ("EINVAL", "EBADF", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EACCES", "EPERM"):

        def refuse(of, *args, error=error):
            folder = of == tmp_path if where == "open" else stat.S_ISDIR(os.fstat(of).st_mode)
            if folder:
                raise OSError(getattr(errno, error), error)
            return call(of, *args)

        monkeypatch.setattr(os, where, refuse)
        replace_text(path, error)
        assert path.read_text() == error
    monkeypatch.setattr(os, where, call)


def test_what_a_link_names_is_replaced_and_a_pipe_is_written_to(tmp_path):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    (tmp_path / "far").mkdir()
    for name in ("there", "not there"):
        file = tmp_path / "far" / name
        if name == "there":
            file.write_text("old")
        link.unlink(missing_ok=True)
        link.symlink_to(file)
        replace_text(link, "new")
        assert link.is_symlink() and file.read_text() == "new"
    assert sorted(os.listdir(tmp_path / "far")) == ["not there", "there"]
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace_text(pipe, "new")
        assert pipe.is_fifo() and os.read(reading, 9) == b"new"
    finally:
        os.close(reading)


# ------------------------------------------------------------------ sealed

CONTENT = {
    "position": 262,
    "rates": (1e-06, 0.9, float("inf")),
    "by number": {10: "ten", 2: None},
    "text": 'über \\ "',
    "on": True,
}


def flips(data: bytes):
    """Yield the data with each of its bits flipped."""
    for place in range(8 * len(data)):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        yield bytes(changed)


def test_any_bit_of_sealed_json_is_noticed_or_changes_nothing():
    text = json.dumps(sealed(CONTENT))
    right = json.loads(json.dumps(CONTENT))
    assert unsealed(text) == (right, True)
    assert unsealed(json.dumps(CONTENT)) == (right, False)  # of an earlier version
    noticed = 0
    for data in flips(text.encode()):
        try:
            found, checked = unsealed(data.decode())
        except ValueError:
            noticed += 1
            continue
        # the name of the checksum itself, which then is none of ours
        assert found == right or not checked and right.items() <= found.items()
    assert noticed > 0.9 * 8 * len(text)
    for text in ("", "[]", "{", '{"position": 1, "seal": 3}'):
        with pytest.raises(DamagedFile):
            unsealed(text)


def test_any_bit_of_sealed_text_is_noticed_or_changes_nothing():
    text = "trainer:\n  seed: 42\n  names: []\n"
    whole = sealed_text(text)
    assert unsealed_text(whole) == text and unsealed_text(text) == text
    for data in flips(whole.encode()):
        try:
            found = unsealed_text(data.decode())
        except ValueError:
            continue
        # the mark of the checksum is none any more: then it is read as the comment that it is
        assert found == text or found.startswith(text) and len(found) == len(whole)
    with pytest.raises(DamagedFile, match="whoever changed it on purpose deletes that line"):
        unsealed_text(whole.replace("42", "43"))
