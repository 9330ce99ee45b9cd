"""Folders that a run writes to, and files replaced whole."""

import importlib.util

import fsspec
import pytest
from etils.epath.backend import fsspec_backend

from jaxrl.files import as_path, replace_text, writable_folder
from jaxrl.records.checkpoint import parse_resume_path


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


def test_a_bucket_is_written_through_fsspec(monkeypatch):
    """fsspec's own memory stands in for the bucket."""
    monkeypatch.setattr(fsspec_backend, "_get_filesystem", lambda name: fsspec.filesystem("memory"))
    folder = writable_folder("trainer.ckpt_path", "gs://bucket/run")
    (folder / "global_step_3").mkdir()
    assert [path.name for path in folder.iterdir()] == ["global_step_3"]
    step = "gs://bucket/run/global_step_3"
    assert parse_resume_path(step) == ("gs://bucket/run", 3)
    with pytest.raises(FileNotFoundError, match="global_step_4' does not exist"):
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
