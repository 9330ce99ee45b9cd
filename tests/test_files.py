"""Folders that a run writes to, and files replaced whole."""

import importlib.util

import fsspec
import pytest
from etils.epath.backend import fsspec_backend

from jaxrl.cluster.supervise import newest_step
from jaxrl.config import TrainConfig
from jaxrl.files import as_path, replace_text, writable_folder
from jaxrl.records.checkpoint import CheckpointError, parse_resume_path, recorded_settings


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
