"""The records of a run: metrics.jsonl, config.yaml, curve.png, and the loggers that it chose."""

import json
import os
import resource
import sys
import threading

import matplotlib
import numpy as np
import pytest

from jaxrl.files import sealed_text
from jaxrl.records import loggers, run_logger
from jaxrl.records.json_lines import JsonLines, read_lines
from jaxrl.records.run_logger import RunLogger


def write_run(folder, steps, *, finished=0, loggers=(), plot=False, offset=0.0):
    logger = RunLogger(folder, loggers, finished)
    for step in steps:
        logger.log(step, {"reward/avg_raw_reward": np.float32(step + offset)})
    if plot:
        logger.plot()
    logger.close()


def test_a_line_per_step(tmp_path):
    write_run(tmp_path / "new" / "run", [1, 2])
    text = (tmp_path / "new" / "run" / "metrics.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == [
        {"step": 1, "reward/avg_raw_reward": 1.0},
        {"step": 2, "reward/avg_raw_reward": 2.0},
    ]


def test_drawing_leaves_the_backend_of_a_notebook_alone(tmp_path):
    before = matplotlib.get_backend()
    try:
        matplotlib.use("svg")
        write_run(tmp_path, [1, 2], plot=True)
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use(before)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    logger = RunLogger(tmp_path, [], 0)
    logger.log(1, {"x": 1})
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 1.0}]
    logger.close()


def test_what_was_flushed_is_on_disk(tmp_path, monkeypatch):
    """A checkpoint is committed behind it."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file)))
    logger = RunLogger(tmp_path, [], 0)
    logger.log(1, {"x": 1})
    logger.flush()
    logger.close()
    lines = (tmp_path / "metrics.jsonl").stat()
    assert (synced[-1].st_ino, synced[-1].st_size) == (lines.st_ino, lines.st_size)


def test_resuming_cuts_the_steps_of_the_earlier_attempt(tmp_path):
    write_run(tmp_path, [1, 2, 3, 4])
    write_run(tmp_path, [3], finished=2, offset=0.5)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(x["step"], x["reward/avg_raw_reward"]) for x in lines] == [(1, 1), (2, 2), (3, 3.5)]


def test_a_fresh_start_cuts_everything(tmp_path):
    write_run(tmp_path, [0, 1, 2])
    write_run(tmp_path, [], finished=0)
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_a_last_line_cut_off_by_a_crash_is_left_out(tmp_path):
    write_run(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-10])
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    write_run(tmp_path, [3], finished=2)  # the new line does not continue the broken one
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "change", "left_out"),
    [
        (4, (b'"step"', b'#step"'), [4]),
        (4, (b'"step"', b'"stfp"'), [4]),
        (4, (b'"x"', b'"\xf8"'), [4]),
        (4, (b": 4.0", b": 4,0"), [4]),
        (4, (b": 4.0", b": [4]"), [4]),
        (4, (b"\n", b"J"), [4, 5]),
        (4, (b": 4,", b": 8,"), [4]),
        (4, (b": 4,", b": 0,"), [4]),
        (4, (b": 4,", b": -4,"), [4]),
        (4, (b": 4,", b": 4.5,"), [4]),
        (4, (b": 4,", b": true,"), [4]),
        (4, (b": 4,", b": 5,"), [4, 5]),  # which of the two it was nobody knows
        (4, (b": 4,", b": 3,"), [3, 4]),
        (1, (b": 1,", b": 9,"), [1]),
        (10, (b"}", b"]"), []),  # it would be cut anyway
    ],
)
def test_a_damaged_line_costs_no_other(tmp_path, capsys, line, change, left_out):
    path, aside, told = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.damaged", []
    lines = JsonLines(path, 0)
    for step in range(1, 11):
        lines.log(step, {"x": float(step)})
    lines.close()
    texts = path.read_bytes().splitlines(keepends=True)
    texts[line - 1] = texts[line - 1].replace(*change)
    path.write_bytes(b"".join(texts))
    JsonLines(path, 8, told.append).close()
    kept = [step for step in range(1, 9) if step not in left_out]
    assert [(line["step"], line["x"]) for line in told] == [(step, step) for step in kept]
    assert read_lines(path) == told
    said = capsys.readouterr().err
    assert f"not as they were written: they are left out, and kept in {aside}" in said
    assert said.count("\n") == 1
    assert texts[line - 1] in aside.read_bytes()
    JsonLines(path, 8).close()  # they are gone
    assert read_lines(path) == told and capsys.readouterr().err == ""


def test_a_resumed_run_that_cannot_write_leaves_the_lines_as_they_were(tmp_path, monkeypatch):
    """The new file takes the name of the old one in one step, or not at all."""
    write_run(tmp_path, [1, 2, 3])
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxrl.files.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        RunLogger(tmp_path, [], 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_the_config_is_written_as_yaml(tmp_path):
    config = {"trainer": {"seed": 1, "betas": (0.9, 0.99), "path": None}}
    RunLogger(tmp_path, [], 0, config=config).close()
    text = (tmp_path / "config.yaml").read_text()
    assert text == sealed_text("trainer:\n  seed: 1\n  betas:\n  - 0.9\n  - 0.99\n  path: null\n")


def test_read_lines_of_no_file(tmp_path):
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_plot_writes_a_png(tmp_path):
    write_run(tmp_path, [1, 2, 3], plot=True)
    data = (tmp_path / "curve.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 5000


def read_events(folder):
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.iterdir()
    data = path.read_bytes()
    while data:  # length, its checksum, record, its checksum
        length = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(tmp_path):
    from tensorboardX.proto.event_pb2 import SessionLog

    RunLogger(tmp_path, ["tensorboard"], 7).close()
    version, start = read_events(tmp_path / "tensorboard")
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (8, SessionLog.START)


def test_tensorboard_gets_the_same_numbers(tmp_path):
    logger = RunLogger(tmp_path, ["console", "tensorboard"], 0)
    for step in (1, 2):
        logger.log(step, {"reward/avg_raw_reward": step})
    logger.flush()  # a kill from here on loses nothing
    found = [
        (event.step, value.tag, value.simple_value)
        for event in read_events(tmp_path / "tensorboard")
        for value in event.summary.value
    ]
    assert found == [(1, "reward/avg_raw_reward", 1.0), (2, "reward/avg_raw_reward", 2.0)]
    logger.close()


def test_no_tensorboard_unless_asked(tmp_path):
    write_run(tmp_path, [1], loggers=["console"])
    assert not (tmp_path / "tensorboard").exists()


# ------------------------------------------------------------------ what fails


@pytest.fixture(name="full_disk")
def full_disk_fixture():
    """Makes files of this process end at so many bytes, as a full disk would: EFBIG for ENOSPC."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_lines_wait_while_the_disk_is_full_and_it_is_said_once(tmp_path, full_disk, capsys):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, 0)
    lines.log(1, {"x": 1.0})
    size = path.stat().st_size
    full_disk(size + 5)  # the beginning of the next line goes in
    for step in (2, 3):
        lines.log(step, {"x": float(step)})
        assert path.stat().st_size == size  # and out again
        lines.flush()
    full_disk(resource.RLIM_INFINITY)
    lines.log(4, {"x": 4.0})
    lines.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4]
    said = capsys.readouterr()
    (warning,) = said.err.splitlines()
    assert warning.startswith(f"warning: step 2: cannot write {path}")
    assert "File too large" in warning
    assert said.out == f"step 4: {path} has all lines again, 3 of them\n"


class Broken:
    """Fails from the second step on."""

    def __init__(self):
        self.steps = []

    def log(self, step, numbers):
        self.steps.append(step)
        if step > 1:
            raise OSError("no space left")

    def flush(self):
        pass

    def close(self):
        raise AssertionError("it was left out")


def test_a_logger_that_fails_is_named_once_and_left_out(tmp_path, monkeypatch, capsys):
    broken = Broken()
    monkeypatch.setattr(run_logger, "open_logger", lambda name, run: broken)
    logger = RunLogger(tmp_path, ["mine"], 0)
    for step in (1, 2, 3):
        logger.log(step, {"x": step})
    logger.flush()
    logger.close()
    assert broken.steps == [1, 2]
    assert capsys.readouterr().err.count("logger 'mine' failed") == 1
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 3


def test_a_logger_that_cannot_be_opened_is_named_and_left_out(tmp_path, monkeypatch, capsys):
    def refuse(name, run):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(run_logger, "open_logger", refuse)
    logger = RunLogger(tmp_path, ["mine"], 0)
    logger.log(1, {"x": 1})
    logger.close()
    assert "logger 'mine' failed and gets nothing more (ConnectionError" in capsys.readouterr().err


def test_the_run_does_not_wait_for_a_server(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loggers, "CLOSE_SECONDS", 0.05)
    answered = threading.Event()
    background = loggers.Background(lambda: answered.wait() and Broken())
    monkeypatch.setattr(run_logger, "open_logger", lambda name, run: background)
    logger = RunLogger(tmp_path, ["slow"], 0)
    logger.log(1, {"x": 1})
    logger.close()
    assert "TimeoutError: its server did not take everything within 0.05 s" in (
        capsys.readouterr().err
    )
    answered.set()
    background.thread.join()


def test_an_error_in_the_thread_of_a_logger_is_told_by_the_next_call():
    background = loggers.Background(Broken)
    background.log(1, {})
    background.log(2, {})
    background.thread.join()
    with pytest.raises(OSError, match="no space left"):
        background.log(3, {})


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_whose_package_is_missing_is_refused(monkeypatch, name):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=rf"logger='{name}' needs .*pip install 'jaxrl\[{name}\]'"):
        loggers.check_installed([name])
    loggers.check_installed(["console", "jsonl"])


def test_no_logger_is_imported_unless_it_is_chosen(tmp_path):
    write_run(tmp_path, [1], loggers=["console", "jsonl"])
    assert not {"wandb", "mlflow"} & set(sys.modules)


def test_the_id_of_a_run_is_that_of_the_run_it_resumes(tmp_path):
    loggers.RunInfo(tmp_path, 0).keep_run_id("wandb", "abc")
    assert loggers.RunInfo(tmp_path, 5).run_id("wandb") == "abc"
    assert loggers.RunInfo(tmp_path, 5).run_id("mlflow") is None
    assert loggers.RunInfo(tmp_path, 0).run_id("wandb") is None  # a fresh start is another run
