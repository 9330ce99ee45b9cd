"""Whole runs whose disk is full, or read-only, from one of their writes on."""

import errno
import itertools
import re

import pytest

from jaxrl.records import lease
from jaxrl.train import BasePPOExp, exit_status, train
from tests.full_disk import Disk
from tests.test_train import assert_bitwise_equal, metric_lines, small

# What a run does without: pictures, loggers, lines that wait, the end of a lease.
NOT_NEEDED = re.compile(r"curve\.png|tensorboard|metrics\.jsonl$|/\.leases/")
STARTS = itertools.count()


def start(folder, first, error=errno.ENOSPC, **overrides):
    """Run to the end or until the disk refuses, as a process of its own would; status and disk."""
    number = next(STARTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "process_start", lambda pid: f"start {number}")
        disk = Disk(patch, folder, first, error)
        return exit_status(BasePPOExp, small(folder, **overrides)), disk


def refused(folder, capsys):
    """One line says what could not be written and what to do."""
    said = capsys.readouterr().err
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert f"{folder}/" in line or f"'{folder}" in line, line
    assert re.search("free space|mend the folder", line), line
    return line


def comes_back(folder, finished, capsys, first, error=errno.ENOSPC):
    """It ends in one line, so does another start, and with space it has the bits of `finished`."""
    whole, trainer = finished
    capsys.readouterr()
    status, disk = start(folder, first, error)
    assert disk.failed
    if status == 2:
        refused(folder, capsys)
    else:
        assert status == 0 and all(map(NOT_NEEDED.search, disk.failed)), (status, disk.failed)
    capsys.readouterr()
    assert start(folder, 1, error)[0] == 2
    refused(folder, capsys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "process_start", lambda pid: f"start {next(STARTS)}")
        again = train(small(folder))
    assert_bitwise_equal(again.state, trainer.state)
    assert metric_lines(folder) == metric_lines(whole)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "first",
    [
        "write quickstart/.latest_checkpoint.txt.new",
        "fsync checkpoints/..owner.json.new",
        "open checkpoints/.leases/.1.",
        "rename checkpoints/global_step_2.orbax-checkpoint-tmp",
        "mkdir exports/dumped_data",
        "replace quickstart/rollouts/.step_000003.npz.new",
        "mkdir exports/global_step_4",
    ],
)
def test_a_disk_that_is_full_from_a_write_on(finished, tmp_path, capsys, first):
    comes_back(tmp_path, finished, capsys, first)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "first",
    [
        "mkdir checkpoints/global_step_4.orbax-checkpoint-tmp",
        "open checkpoints/.leases/.1.",
        "open exports/dumped_data/.global_step_3_training_input.npz.new",
    ],
)
def test_a_disk_that_is_read_only_from_a_write_on(finished, tmp_path, capsys, first):
    comes_back(tmp_path, finished, capsys, first, errno.EROFS)


@pytest.mark.slow  # half an hour; the quick suite has one write of each kind, above
@pytest.mark.parametrize("part", range(8))
def test_a_disk_that_is_full_from_any_write_on(finished, tmp_path, capsys, part):
    status, disk = start(tmp_path / "all", 10**9)
    assert status == 0 and len(disk.writes) > 200
    for first in range(1 + part, len(disk.writes) + 1, 8):
        comes_back(tmp_path / str(first), finished, capsys, first)
