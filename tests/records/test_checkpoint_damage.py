"""Checkpoints with missing, cut or changed files."""

import contextlib
import json
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxrl.files import DamagedFile, sealed, unsealed
from jaxrl.records.checkpoint import Checkpointer, DamagedCheckpoint, UnreadableCheckpoint, resume
from jaxrl.records.checkpoint_folders import newest_config
from tests.jobs import run
from tests.records.test_checkpoint import META, SMALL, save, steps_in

NOISE = {"noise": np.random.default_rng(0).standard_normal((300, 100)).astype(np.float32)}


def cut_data_files(folder):
    """Halve the files that hold array data (orbax keeps some of it twice)."""
    for path in (folder / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(name):
    def damage(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def write_meta(text):
    def damage(folder):
        (folder / "meta" / "metadata").write_text(text)

    return damage


DAMAGES = {
    "cut": (cut_data_files, ""),
    "no arrays": (remove("state"), ""),
    "no data": (remove("state/d"), ""),
    "no manifest": (remove("state/manifest.ocdbt"), ""),
    "no meta": (remove("meta"), ""),
    "empty meta": (write_meta(""), "JSON"),
    "meta of nothing": (
        write_meta("{}"),
        "meta lacks .'checksums', 'config', 'functions', 'model'",
    ),
    "half a meta": (write_meta('{"model": {"hidden'), "JSON"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path, damage):
    save(tmp_path, 5, 7, state=NOISE)
    break_it, reason = DAMAGES[damage]
    break_it(tmp_path / "global_step_7")
    with pytest.raises(DamagedCheckpoint, match=rf"global_step_7 is damaged .*{reason}"):
        path = str(tmp_path / "global_step_7")
        resume(Checkpointer(str(tmp_path)), "from_path", path, NOISE, META)
    own = Checkpointer(str(tmp_path))
    message = (
        rf"(?s)global_step_7 is damaged .*{reason}.*Falling back to step 5.*global_step_7.damaged"
    )
    with pytest.warns(UserWarning, match=message):
        restored = resume(own, "latest", None, NOISE, META)
    np.testing.assert_array_equal(restored["noise"], NOISE["noise"])
    assert steps_in(tmp_path) == ["global_step_5", "global_step_7.damaged"]
    own.save(7, NOISE, META)  # the name is free again
    own.close()
    assert Checkpointer(str(tmp_path)).restore_latest(NOISE, META)[0] == 7


def test_a_flipped_bit_is_found(tmp_path):
    """The array data has no checksum of its own: orbax alone restores the wrong number."""
    save(tmp_path, 1, state=NOISE)
    path = max((tmp_path / "global_step_1" / "state").rglob("d/*"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())

    def wrong_numbers(place):
        """After flipping a bit there; the data is compressed, so one bit may change several."""
        path.write_bytes(bytes(b ^ (i == place) for i, b in enumerate(data)))
        files = Checkpointer(str(tmp_path)).files
        return (files.restore(1, "state", NOISE)["noise"] != NOISE["noise"]).sum()

    middle = len(data) // 2
    assert any(wrong_numbers(place) == 1 for place in range(middle, middle + 8))
    checkpointer = Checkpointer(str(tmp_path))
    with pytest.raises(DamagedCheckpoint, match=r"the values of .*noise.* are not those that were"):
        checkpointer.restore(1, NOISE, META)


STAGE1 = Path(__file__).parents[1] / "data" / "stage1" / "runs"


@pytest.mark.parametrize("kind", ["full", "lockstep"])
def test_any_digit_of_the_metadata_that_flips_is_damage(tmp_path, kind):
    """Position, next_ordinal, data, mesh, config, checksums: of the metadata of a real run."""
    (old,) = (STAGE1 / kind / "checkpoints").glob("*/meta/metadata")
    meta, checked = unsealed(old.read_text())
    assert not checked  # of a version before
    path = tmp_path / "global_step_2" / "meta" / "metadata"
    path.parent.mkdir(parents=True)
    text = json.dumps(sealed(meta))
    path.write_text(text)
    source = Checkpointer(str(tmp_path), read_only=True)
    assert source.read_meta(2) == meta
    digits = [place for place, sign in enumerate(text) if sign.isdigit()]
    assert len(digits) > 900
    for place in digits:
        path.write_text(f"{text[:place]}{int(text[place]) ^ 1}{text[place + 1 :]}")
        with pytest.raises(DamagedFile):
            source.read_meta(2)
    source.close()


@pytest.mark.parametrize("name", ["epochs", "hidden_size", "checksums"])
def test_a_digit_of_the_metadata_costs_the_newest_checkpoint_alone(tmp_path, name):
    """And is not called another config or model."""
    save(tmp_path, 5, 7)
    path = tmp_path / "global_step_7" / "meta" / "metadata"
    text = path.read_text()
    place = next(i for i in range(text.index(f'"{name}"'), len(text)) if text[i].isdigit())
    path.write_text(f"{text[:place]}{int(text[place]) ^ 1}{text[place + 1 :]}")
    assert newest_config(Checkpointer(str(tmp_path)).folder)[1].name == "global_step_5"
    message = r"global_step_7 is damaged \(DamagedFile: meta/metadata: .*Falling back to step 5"
    with pytest.warns(UserWarning, match=message):
        found, _ = Checkpointer(str(tmp_path)).restore_latest(SMALL, META)
    assert found == 5 and steps_in(tmp_path) == ["global_step_5", "global_step_7.damaged"]


def test_a_checkpoint_of_an_earlier_version_is_read_with_one_line(tmp_path, capsys):
    save(tmp_path, 5)
    path = tmp_path / "global_step_5" / "meta" / "metadata"
    path.write_text(json.dumps(unsealed(path.read_text())[0]))
    assert Checkpointer(str(tmp_path)).restore_latest(SMALL, META)[0] == 5
    said = f"{tmp_path}/global_step_5 is of an earlier version: its metadata has no checksum"
    assert capsys.readouterr().out.count(said) == 1


def test_a_note_of_a_commit_that_fails_is_told_once(tmp_path):
    """The clean-up waits for the same save again."""
    own = Checkpointer(str(tmp_path))
    told = []

    def full(path):
        told.append(path)
        raise OSError(28, "No space left on device")

    own.on_commit = full
    own.save(1, SMALL, META)
    with pytest.raises(OSError, match="No space left"):
        own.wait()
    own.close()
    assert told == [str(tmp_path / "global_step_1")]


def test_a_step_may_be_damaged_twice(tmp_path):
    save(tmp_path, 1)
    for _ in range(2):
        save(tmp_path, 2)
        cut_data_files(tmp_path / "global_step_2")
        with pytest.warns(UserWarning, match="Falling back to step 1"):
            Checkpointer(str(tmp_path)).restore_latest(SMALL, META)
    assert steps_in(tmp_path) == [
        "global_step_1",
        "global_step_2.damaged",
        "global_step_2.damaged_2",
    ]


def test_nothing_is_moved_when_every_checkpoint_is_damaged(tmp_path):
    """What looks like damage may be this machine's fault."""
    save(tmp_path, 1, 2)
    for step in (1, 2):
        cut_data_files(tmp_path / f"global_step_{step}")
    message = r"(?s)holds no whole checkpoint: .*_2 is damaged .*_1 is damaged .*choose another"
    with pytest.raises(ValueError, match=message):
        Checkpointer(str(tmp_path)).restore_latest(SMALL, META)
    assert steps_in(tmp_path) == ["global_step_1", "global_step_2"]


# ------------------------------------------------------------------ errors that may pass

PASSING = {
    "descriptors": lambda: OSError(24, "Too many open files"),
    "disk": lambda: OSError(5, "Input/output error"),
    "server gone": lambda: OSError(116, "Stale file handle"),
    "permissions": lambda: PermissionError(13, "Permission denied"),
    "memory": MemoryError,
    "device memory": lambda: RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4 bytes"),
    "tensorstore": lambda: ValueError('UNAVAILABLE: Error opening "zarr" driver: 503'),
    "several": lambda: ExceptionGroup("reads", [KeyError("x"), OSError(5, "Input/output error")]),
}


def fail(monkeypatch, errors):
    """Reading the state meets these errors first."""
    restore = ocp.CheckpointManager.restore

    def failing(self, step, args):
        if "state" in args.keys() and errors:  # noqa: SIM118
            raise errors.pop()
        return restore(self, step, args=args)

    monkeypatch.setattr(ocp.CheckpointManager, "restore", failing)
    monkeypatch.setattr("jaxrl.records.checkpoint.PAUSES", (0.0, 0.0))


@pytest.mark.parametrize("error", PASSING)
@pytest.mark.filterwarnings("ignore:.*trying again")
def test_an_error_that_passes_costs_nothing(tmp_path, monkeypatch, error):
    save(tmp_path, 1, 2)
    fail(monkeypatch, [PASSING[error]() for _ in range(2)])
    assert Checkpointer(str(tmp_path)).restore_latest(SMALL, META)[0] == 2
    assert steps_in(tmp_path) == ["global_step_1", "global_step_2"]


@pytest.mark.parametrize("error", PASSING)
@pytest.mark.filterwarnings("ignore:.*trying again")
def test_an_error_that_does_not_pass_leaves_the_folder_as_it_is(tmp_path, monkeypatch, error):
    save(tmp_path, 1, 2)
    fail(monkeypatch, [PASSING[error]() for _ in range(3)])
    message = r"global_step_2 cannot be read now \(.*, tried 3 times .* it is left as it is. Mend"
    with pytest.raises(UnreadableCheckpoint, match=message):
        Checkpointer(str(tmp_path)).restore_latest(SMALL, META)
    assert steps_in(tmp_path) == ["global_step_1", "global_step_2"]
    assert Checkpointer(str(tmp_path)).restore_latest(SMALL, META)[0] == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_process_without_descriptors_sets_nothing_aside(tmp_path, monkeypatch):
    """The real thing: the limit of the system."""
    save(tmp_path, 1, 2)
    own = Checkpointer(str(tmp_path))
    monkeypatch.setattr("jaxrl.records.checkpoint.PAUSES", ())
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 50, before[1]))
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(open(os.devnull))  # noqa: SIM115
        with pytest.raises(UnreadableCheckpoint, match="cannot be read now .*Too many open files"):
            own.restore_latest(SMALL, META)
    finally:
        for file in held:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert steps_in(tmp_path) == ["global_step_1", "global_step_2"]
    assert own.restore_latest(SMALL, META)[0] == 2


def test_a_file_that_the_system_cannot_read_is_not_damage(tmp_path, monkeypatch):
    """tensorstore's own words for an error of the system that is no missing file."""
    monkeypatch.setattr("jaxrl.records.checkpoint.PAUSES", ())
    save(tmp_path, 1, 2)
    for path in (tmp_path / "global_step_2" / "state").rglob("d/*"):
        path.unlink()
        path.symlink_to(path.name)  # ELOOP
    with pytest.raises(UnreadableCheckpoint, match="cannot be read now .ValueError: UNKNOWN: "):
        Checkpointer(str(tmp_path)).restore_latest(SMALL, META)
    assert steps_in(tmp_path) == ["global_step_1", "global_step_2"]


# ------------------------------------------------------------------ a buffer beside the state

BUFFER = {"units": np.frombuffer(NOISE["noise"].tobytes(), np.uint8)}


def save_with_buffer(folder, step):
    checkpointer = Checkpointer(str(folder))
    checkpointer.save(step, SMALL, META, BUFFER)
    checkpointer.close()


def test_a_buffer_comes_back_with_its_state(tmp_path):
    save(tmp_path, 1)
    save_with_buffer(tmp_path, 2)
    own = Checkpointer(str(tmp_path))
    resume(own, "latest", None, SMALL, META)
    assert own.restored_buffer.keys() == BUFFER.keys()
    np.testing.assert_array_equal(own.restored_buffer["units"], BUFFER["units"])
    own.restore(1, SMALL, META)
    assert own.restored_buffer is None  # there was none
    other = Checkpointer(str(tmp_path / "other"))
    resume(other, "from_path", str(tmp_path / "global_step_2"), SMALL, META)
    np.testing.assert_array_equal(other.restored_buffer["units"], BUFFER["units"])


def change_buffer(folder):
    """Another buffer, whole in itself, in the place of the one that was saved."""
    others = folder.parent / "others"
    checkpointer = Checkpointer(str(others))
    checkpointer.save(7, SMALL, META, {"units": BUFFER["units"][::-1].copy()})
    checkpointer.close()
    shutil.rmtree(folder / "buffer")
    shutil.move(others / "global_step_7" / "buffer", folder / "buffer")
    shutil.rmtree(others)


@pytest.mark.parametrize("break_it", [remove("buffer"), change_buffer], ids=["gone", "changed"])
def test_a_damaged_buffer_is_a_damaged_checkpoint(tmp_path, break_it):
    save(tmp_path, 5)
    save_with_buffer(tmp_path, 7)
    break_it(tmp_path / "global_step_7")
    own = Checkpointer(str(tmp_path))
    with pytest.warns(UserWarning, match="(?s)global_step_7 is damaged.*Falling back to step 5"):
        resume(own, "latest", None, SMALL, META)
    assert own.restored_buffer is None


@pytest.mark.slow
def test_what_one_process_cannot_read_all_processes_refuse(tmp_path):
    """With one reason, which names that process; within orbax the others would wait for it."""
    for ended in run(["-m", "tests.records.one_cannot_read_job", str(tmp_path)], 2, devices=1):
        assert ended.status == 0, ended.error[-3000:]
