"""Run folders of every kind: whole, going on, killed, damaged, without this or that."""

import json
import math
import shutil
import sqlite3
from pathlib import Path

import pytest

from jaxrl.records.alarms import REWARD
from jaxrl.tools.report.parts import about, manifest
from jaxrl.tools.report.run_files import RunFiles, read_run, run_folders
from jaxrl.tools.report.series import series
from jaxrl.tools.report.settings import changed, objective
from tests.records.ledger.scribe import Scribe
from tests.tools.report.made_run import make_run
from tests.tools.report.unpack import unpack


def test_a_whole_run(finished):
    run = read_run(finished[0] / "quickstart")
    assert list(run.rollouts) == [1, 2, 3, 4]
    assert run.ends == {"trained": 64}  # 4 steps x 4 prompts x 4 samples
    assert (run.last_step, run.total_steps) == (4, 4)
    assert run.attempts[0]["steps"] == 4
    assert run.attempts[0]["machine"]["devices"] == 8
    assert run.notes == []
    assert "4 prompts x 4 samples = 16 rows per step" in objective(run)
    fields = {name: (value, default) for name, value, default in changed(run)}
    assert fields["trainer.train_batch_size"] == ("4", "1024")
    assert "trainer.critic_mini_batch_size" not in fields
    assert not run.all_notes()


def test_attempts_of_a_run_that_crashed(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.begin()
    scribe.step(1)
    saved = scribe.ledger.position()
    scribe.step(2)
    scribe.ledger.close()
    scribe.begin(1, saved, first=2)
    scribe.step(2)
    scribe.ledger.submit(lambda db: None).result()
    run = read_run(tmp_path)  # while it is open
    scribe.ledger.close()
    figures = [(x["attempt"], x["from_step"], x["steps"], x["taken_back"]) for x in run.attempts]
    assert figures == [(1, 0, 2, 1), (2, 1, 1, 0)]
    assert run.ends == {"trained": 8}
    assert any("no metrics.jsonl" in note for note in run.notes)
    assert any("2 steps have no trajectories" in note for note in run.notes)


def test_a_line_that_is_not_whole(tmp_path):
    folder = make_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/av')
    run = read_run(folder)
    assert run.last_step == 3
    assert any("the last line of metrics.jsonl is not whole" in note for note in run.notes)


def test_lines_after_a_damaged_one_are_shown(tmp_path):
    folder = make_run(tmp_path / "run", metrics=lambda step: {"text": "no number", "x": None})
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    lines[1] = b"\xff\x00{"
    (folder / "metrics.jsonl").write_bytes(b"\n".join([*lines, b"[1]", b'{"step": 9}', b""]))
    run = read_run(folder)
    assert list(run.lines) == [1, 3, 9]
    assert any("2 damaged lines are left out (2, 4)" in note for note in run.notes)
    assert "text" not in run.lines[1]


@pytest.mark.parametrize(
    "odd",
    [
        '{"step": Infinity}',
        '{"step": NaN}',
        '{"step": -1}',
        '{"step": 4294967296}',  # 2**32
        '{"step": 1' + "0" * 400 + "}",
        '{"step": 4, "x": 1' + "0" * 400 + "}",
        "[" * 100_000,
    ],
)
def test_odd_numbers_are_notes(tmp_path, odd):
    folder = make_run(tmp_path / "run", max_training_steps=math.inf)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{odd}\n{{"step": 5}}\n')
    run = read_run(folder)
    assert list(run.lines) == [1, 2, 3, 5]
    assert "metrics.jsonl: 1 damaged lines are left out (4)" in run.notes
    run.facts = {"num_prompts": 10}
    assert "last_step" in manifest([about(run)])
    assert unpack(series(run))[0]["columns"] == [1, 2, 3]


@pytest.mark.parametrize("damage", ["", "no: {yaml", "- 1\n- 2"])
def test_a_config_that_is_none(tmp_path, damage):
    folder = make_run(tmp_path / "run")
    (folder / "config.yaml").write_text(damage)
    run = read_run(folder)
    assert run.settings == {}
    assert any("config.yaml" in note for note in run.notes)
    assert objective(run) == ""
    assert changed(run) == []


def test_a_config_of_another_version(tmp_path):
    folder = make_run(tmp_path / "run", a_field_of_the_future=1)
    run = read_run(folder)
    assert objective(run) == ""
    assert any("a_field_of_the_future" in note for note in run.notes)
    assert ("trainer.a_field_of_the_future", "1", "null") in changed(run)


def test_the_card_that_a_run_wrote(tmp_path):
    folder = make_run(tmp_path / "run", a_field_of_the_future=1)
    (folder / "objective_card.txt").write_text("the objective\n")
    run = read_run(folder)
    assert objective(run) == "the objective"
    assert not any("objective" in note for note in run.notes)


def test_a_supervised_run_has_no_card(tmp_path):
    run = read_run(make_run(tmp_path / "run", metrics=lambda step: {"train/loss": 1.0}))
    assert objective(run) == ""
    assert "no objective card: a supervised run has none in its folder" in run.notes


def test_a_damaged_ledger(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0] / "quickstart", folder)
    for beside in folder.glob("run.db-*"):
        beside.unlink()
    (folder / "run.db").write_bytes(b"not a database, but longer than a header is" * 100)
    run = read_run(folder)
    assert not run.has_ledger
    assert list(run.rollouts) == [1, 2, 3, 4]  # by their names
    assert any("run.db" in note and "damaged" in note for note in run.notes)


def test_rollouts_that_are_gone(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0] / "quickstart", folder)
    (folder / "rollouts" / "step_000002.npz").unlink()
    run = read_run(folder)
    assert list(run.rollouts) == [1, 3, 4]
    assert "the rollout files of 1 steps are gone, as that of 2" in run.notes


def test_what_is_no_run_folder(tmp_path):
    with pytest.raises(
        ValueError, match=r"none is not a folder: give a run folder, <trainer.log_p"
    ):
        read_run(tmp_path / "none")
    with pytest.raises(ValueError, match="holds none of metrics.jsonl, run.db, rollouts/"):
        read_run(tmp_path)
    (tmp_path / "run.db").write_bytes(b"")
    assert any("run.db" in note for note in read_run(tmp_path).notes)


def test_a_run_that_is_nearly_named_is_proposed(tmp_path):
    for name in ("quickstart", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
    (tmp_path / "quikstar").mkdir()  # no run
    with pytest.raises(ValueError) as raised:
        read_run(tmp_path / "quikstart")
    near = tmp_path / "quickstart"
    assert str(raised.value) == f"{tmp_path}/quikstart is not a folder: did you mean {near}?"


def test_the_number_of_steps_from_the_data(tmp_path):
    folder = make_run(tmp_path / "run", train_batch_size=4, epochs=3)
    facts = json.dumps({"num_prompts": 10})
    run = read_run(folder)
    assert run.total_steps is None
    run.facts = json.loads(facts)
    assert run.total_steps == 6  # 3 epochs of 10 // 4
    run.settings["trainer"]["max_training_steps"] = 5
    assert run.total_steps == 5
    run.settings["trainer"]["max_training_steps"] = math.inf
    assert run.total_steps == 6
    run.facts, run.settings["trainer"]["max_training_steps"] = {}, 1000
    assert run.total_steps is None  # 1000 may be more than the data have


def test_sums_are_over_all_lines_not_over_the_points_of_a_curve(tmp_path):
    lines = {step: {REWARD: float(step), "timing/wall": 0.5} for step in range(1, 10_001)}
    said = about(RunFiles(tmp_path, lines=lines))
    assert said["seconds"] == 5000.0  # 10,000 x 0.5
    assert said["recent_reward"] == 9995.5  # the mean of 9,991 to 10,000


def test_nothing_is_written_into_the_folder(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0] / "quickstart", folder)
    with sqlite3.connect(folder / "run.db") as db:
        db.execute("PRAGMA journal_mode=DELETE")
    before = {str(p): p.stat().st_mtime_ns for p in folder.rglob("*")}
    read_run(folder)
    assert {str(p): p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_the_runs_that_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name, steps=1)
    (tmp_path / "runs" / "cache").mkdir()
    named = [Path("runs/a"), Path("runs/b")]
    assert run_folders(["runs"]) == run_folders(["runs/*"]) == named
    assert run_folders(["runs/b", "runs"]) == [named[1], named[0]]  # each once
    with pytest.raises(ValueError, match=r"runs/x\* matches no run folder"):
        run_folders(["runs/x*"])
    assert run_folders(["runs/cache"]) == [Path("runs/cache")]  # reading it says what it lacks
