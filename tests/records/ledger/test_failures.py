"""The database is full, locked, slow, deleted, damaged, or a kill cut its log."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import threading

import pytest

from jaxrl import config as cfg
from jaxrl.audit import audit
from jaxrl.records.callbacks import TrainingCallback
from jaxrl.records.lease import FolderLock
from jaxrl.records.ledger import FILE, Ledger, LedgerError
from jaxrl.train import main, train
from tests.full_disk import Disk
from tests.records.ledger.scribe import Scribe, failed
from tests.test_train import assert_bitwise_equal, metric_lines, small


@pytest.fixture
def scribe(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.begin()
    yield scribe
    scribe.ledger.close()


def again(scribe, step, saved, **kwargs):
    """A new process goes on from the checkpoint of `step`."""
    scribe.ledger.close()
    scribe.begin(step, saved, first=2 * step, **kwargs)


# ------------------------------------------------------------------ full


def fill(ledger):
    """The disk has no room beyond what the database has now."""

    def work(db):
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages}")

    ledger.submit(work).result()


def test_full(scribe):
    scribe.step(1)
    saved = scribe.ledger.position()
    fill(scribe.ledger)
    with pytest.raises(
        LedgerError, match=r"database or disk is full\): free space on its disk, an"
    ):
        for step in range(2, 200):
            scribe.step(step)
            scribe.ledger.submit(lambda db: None).result()  # the writing thread has caught up
    with pytest.raises(LedgerError, match="disk is full"):
        scribe.ledger.position()  # and nothing can be committed
    again(scribe, 1, saved)
    for step in (2, 3):
        scribe.step(step)
    assert not failed(scribe.checks())


def test_a_rollout_file_that_finds_no_room(scribe):
    def make():
        raise OSError(28, "No space left on device")

    with pytest.raises(LedgerError, match=r"No space left on device\): free space on its disk"):
        scribe.ledger.add_made("steps", make).result()
    with pytest.raises(LedgerError, match="free space"):
        scribe.hand_out(0, 0)


def test_what_python_refuses_is_named_with_a_fix(scribe):
    fix = r"TypeError: no number\): a generator .*cannot be stored, .*goes on from its last check"

    def make():
        raise TypeError("no number")

    with pytest.raises(LedgerError, match=fix):
        scribe.ledger.add_made("steps", make).result()
    with pytest.raises(LedgerError, match=fix):
        scribe.ledger.position()
    again(scribe, 0, None)
    scribe.ledger.add("groups", [(0, {"no": "text"}, 0)])
    with pytest.raises(LedgerError, match=r"'dict' is not supported\): a generator .*be stored"):
        scribe.ledger.position()


class After(TrainingCallback):
    """Does something when a step is finished, before it is recorded."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, trainer, callback_input, control):
        if callback_input.global_step == self.step:
            self.action(trainer)


def run(folder, monkeypatch, *callbacks, **overrides):
    """`python -m jaxrl.train` in this process; its exit code."""
    recipe = folder / "recipe.py"
    values = cfg.get_config_as_dict(small(folder, **overrides))
    recipe.write_text(f"def get_config():\n    return {values!r}\n")
    monkeypatch.setattr("jaxrl.train.load_callbacks", lambda names: list(callbacks))
    return main([f"--config={recipe}"])


@pytest.mark.slow
def test_a_run_whose_disk_is_full_stops_and_goes_on_when_it_is_not(
    finished, tmp_path, monkeypatch, capsys
):
    folder, whole = finished
    full = After(3, lambda trainer: fill(trainer.ledger.database))
    assert run(tmp_path, monkeypatch, full) == 2
    assert "database or disk is full): free space on its disk" in capsys.readouterr().err
    monkeypatch.undo()
    assert_bitwise_equal(train(small(tmp_path)).state, whole.state)  # from step 2
    assert metric_lines(tmp_path) == metric_lines(folder)
    checks = {check.name: check for check in audit(tmp_path / "quickstart")}
    assert not failed(checks) and checks["history"].figures["resumed"] == 1


def test_a_run_that_starts_on_a_full_disk_is_refused(tmp_path, monkeypatch, capsys):
    config = tmp_path / "quickstart" / "config.yaml"
    Disk(monkeypatch, tmp_path, f"fsync quickstart/.{config.name}.new")
    assert run(tmp_path, monkeypatch) == 2
    message = f"error: cannot write {config} (No space left on device): free space on its disk, or"
    assert message in capsys.readouterr().err


def test_a_run_whose_last_rollouts_cannot_be_written_says_so(tmp_path, monkeypatch, capsys):
    in_the_way = After(1, lambda trainer: (trainer.ledger.folder / "rollouts").write_text(""))
    settings = {"max_training_steps": 1, "eval_interval": -1, "ckpt_interval": -1}
    settings = {f"trainer.{name}": x for name, x in {**settings, "hf_save_interval": -1}.items()}
    assert run(tmp_path, monkeypatch, in_the_way, **settings) == 2
    said = capsys.readouterr().err
    path = tmp_path / "quickstart" / "rollouts" / "step_000001.npz"
    assert f"cannot write {path} (File exists): free space on its disk, or mend the permis" in said


def test_a_disk_without_shared_memory_is_refused(tmp_path, monkeypatch):
    connect = sqlite3.connect

    def without(path, **kwargs):
        return connect(f"file:{path}?vfs=unix-dotfile", uri=True, **kwargs)

    monkeypatch.setattr("jaxrl.records.ledger.database.sqlite3.connect", without)
    with pytest.raises(LedgerError, match=r"no write-ahead log there \(journal_mode='delete'\)"):
        Ledger(tmp_path / FILE)


# ------------------------------------------------------------------ locked


LOCKER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
input()
db.execute("ROLLBACK")
"""


@contextlib.contextmanager
def locked(folder):
    """By another process; gives a function that lets go."""
    command = [sys.executable, "-c", LOCKER, str(folder / FILE)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"locked\n"
    try:
        yield lambda: process.communicate(b"\n")
    finally:
        process.kill()
        process.communicate()


def test_a_lock_is_waited_out(scribe):
    with locked(scribe.folder) as unlock:
        scribe.step(1)  # nobody is held up
        rows = scribe.ledger.submit(lambda db: db.execute("SELECT * FROM groups").fetchall())
        assert not rows.done()
        unlock()
        assert len(rows.result()) == 2
    assert not failed(scribe.checks())


def test_a_lock_that_stays_ends_the_run(scribe):
    scribe.step(1)
    saved = scribe.ledger.position()
    again(scribe, 1, saved, lock_timeout=0.2)
    with locked(scribe.folder):
        scribe.step(2)
        with pytest.raises(LedgerError, match="it was locked for 0.2 s, end the process that hold"):
            scribe.ledger.position()
        with pytest.raises(LedgerError, match="database is locked"):
            Ledger(scribe.folder / FILE, lock_timeout=0.2)
    again(scribe, 1, saved)
    scribe.step(2)
    assert not failed(scribe.checks())


@pytest.mark.slow
def test_a_run_whose_database_stays_locked_stops_with_the_code_2(
    finished, tmp_path, monkeypatch, capsys
):
    with contextlib.ExitStack() as stack:
        lock = After(3, lambda _: stack.enter_context(locked(tmp_path / "quickstart")))
        settings = {"trainer.ledger.lock_timeout_seconds": 0.5}
        assert run(tmp_path, monkeypatch, lock, **settings) == 2
    assert "it was locked for 0.5 s" in capsys.readouterr().err
    assert run(tmp_path, monkeypatch) == 0
    assert metric_lines(tmp_path) == metric_lines(finished[0])
    assert not failed({check.name: check for check in audit(tmp_path / "quickstart")})


# ------------------------------------------------------------------ slow


def test_a_slow_disk_holds_up_commits_alone(scribe):
    slow = threading.Event()
    scribe.ledger.submit(lambda db: slow.wait())
    scribe.step(1)
    scribe.step(2)
    positions = []
    commit = threading.Thread(target=lambda: positions.append(scribe.ledger.position()))
    commit.start()
    scribe.hand_out(2, 4, 5)
    assert commit.is_alive() and not positions
    slow.set()
    commit.join()
    assert positions[0]["position"] in (22, 24)  # 2 x (2 + 4 + 4 + 1) rows, perhaps the 2
    assert not failed(scribe.checks())


# ------------------------------------------------------------------ deleted


@pytest.mark.parametrize("names", [("",), ("-wal",), ("-wal", "-shm"), ("", "-wal", "-shm")])
def test_what_is_deleted_while_the_run_goes_on_is_written_anew(scribe, capsys, names):
    scribe.step(1)
    saved = scribe.ledger.position()
    for name in names:
        (scribe.folder / f"{FILE}{name}").unlink()
    scribe.step(2)
    checks = scribe.checks()
    assert not failed(checks) and checks["steps"].figures["finished"] == 2
    assert capsys.readouterr().err.count("written anew") == 1
    scribe.step(3)
    again(scribe, 1, saved)
    scribe.step(2)
    checks = scribe.checks()
    assert not failed(checks) and checks["history"].figures["attempts"] == 2


def test_what_was_written_anew_when_a_kill_came_is_found(scribe, monkeypatch):
    def kill(ledger):
        raise KeyboardInterrupt

    scribe.step(1)
    saved = scribe.ledger.position()
    (scribe.folder / FILE).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_put_in_place", kill)
        scribe.ledger.add("groups", [])
        scribe.ledger.close()
    assert not (scribe.folder / FILE).exists() and (scribe.folder / f"{FILE}.new").exists()
    again(scribe, 1, saved)
    scribe.step(2)
    checks = scribe.checks()
    assert not failed(checks) and checks["history"].figures["attempts"] == 2


@pytest.mark.slow
def test_a_run_whose_database_is_deleted_meanwhile_goes_on(finished, tmp_path, monkeypatch):
    delete = After(2, lambda _: (tmp_path / "quickstart" / FILE).unlink())
    assert run(tmp_path, monkeypatch, delete) == 0
    checks = {check.name: check for check in audit(tmp_path / "quickstart")}
    assert not failed(checks) and checks["none trained twice"].figures["trained"] == 64


@pytest.mark.slow
def test_a_run_whose_database_is_deleted_before_it_goes_on(finished, tmp_path, monkeypatch):
    assert run(tmp_path, monkeypatch, **{"trainer.max_training_steps": 2}) == 0
    for path in (tmp_path / "quickstart").glob(f"{FILE}*"):
        path.unlink()
    assert run(tmp_path, monkeypatch) == 0
    assert metric_lines(tmp_path) == metric_lines(finished[0])
    checks = {check.name: check for check in audit(tmp_path / "quickstart")}
    assert failed(checks).keys() == {"history"}
    assert "global_step_2 of run" in checks["history"].failures[0]
    assert checks["no prompt skipped"].figures["from"] == 8
    assert checks["checkpoints"].figures == {"checkpoints": 1, "newest": 4, "others": 1}


# ------------------------------------------------------------------ damaged, or not ours


def test_a_damaged_database_is_named(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.begin()
    for step in range(1, 60):
        scribe.step(step)
    scribe.ledger.close()
    path = tmp_path / FILE
    data = bytearray(path.read_bytes())
    data[8192:12288] = b"\xff" * 4096
    path.write_bytes(data)
    with pytest.raises(
        LedgerError, match=r"run.db \(DatabaseError.*\): move it away: the run then"
    ):
        Ledger(path)


def test_what_is_no_ledger_is_left_alone(tmp_path):
    path = tmp_path / FILE
    path.write_text("my notes" * 999)
    with pytest.raises(LedgerError, match="file is not a database.*move it away"):
        Ledger(path)
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE mine (a)")
    with pytest.raises(LedgerError, match=r"it is no ledger, its tables are \['mine'\]"):
        Ledger(path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("mine",)]


def test_rows_that_a_disk_lost_are_missed(scribe):
    """The machine lost power, and its disk what it had said to have written; or it is a copy."""
    scribe.step(1)
    scribe.ledger.position()
    files = {p: p.read_bytes() for p in scribe.folder.glob(f"{FILE}*") if "shm" not in p.name}
    scribe.step(2)
    saved = scribe.ledger.position()
    scribe.ledger.close()
    for path, content in files.items():
        path.write_bytes(content)
    what = rf"rows are lost: it ends with row 11, step_2 knows {saved['position']}\): move it away"
    with pytest.raises(LedgerError, match=what):
        scribe.begin(2, saved, first=4, path="step_2")
    scribe.ledger.close()
    (scribe.folder / FILE).unlink()
    scribe.begin(2, saved, first=4, path=str(scribe.folder / "checkpoints" / "global_step_2"))
    scribe.step(3)
    assert failed(scribe.checks()).keys() == {"history"}


def test_a_log_that_a_kill_cut_holds_the_rows_before(tmp_path):
    """SIGKILL leaves the first of SQLite's writes: some bytes of the log, wherever it ends."""
    scribe = Scribe(tmp_path / "whole")
    scribe.begin()
    scribe.step(1)
    saved = scribe.ledger.position()
    size = (scribe.folder / f"{FILE}-wal").stat().st_size
    scribe.step(2)
    scribe.step(3)
    scribe.ledger.position()
    log = (scribe.folder / f"{FILE}-wal").read_bytes()
    for end in range(size, len(log), len(log) // 37):
        cut = tmp_path / str(end)
        shutil.copytree(scribe.folder, cut)
        (cut / f"{FILE}-shm").unlink()
        (cut / f"{FILE}-wal").write_bytes(log[:end])
        assert not failed({check.name: check for check in audit(cut)})
        resumed = Scribe(cut)
        resumed.begin(1, saved, first=2)
        resumed.step(2)
        checks = resumed.checks()
        assert not failed(checks) and checks["steps"].figures["finished"] == 2
        resumed.ledger.close()
    scribe.ledger.close()


# ------------------------------------------------------------------ a second run


def test_a_second_run_is_refused_before_it_touches_anything(tmp_path, monkeypatch, capsys):
    folder, checkpoints = tmp_path / "quickstart", tmp_path / "checkpoints"
    lock = FolderLock(folder)
    (folder / "metrics.jsonl").write_text("the first run's")
    saving = checkpoints / "global_step_2.orbax-checkpoint-tmp-1"
    saving.mkdir(parents=True)
    assert run(tmp_path, monkeypatch) == 2
    said = capsys.readouterr().err
    assert f"another run goes on in {folder}: the run {folder} (process {os.getpid()} on " in said
    assert "UTC). Give this one a trainer.run_name of its own, or end the other" in said
    assert saving.exists() and (folder / "metrics.jsonl").read_text() == "the first run's"
    assert not (folder / FILE).exists()
    lock.close()
    FolderLock(folder).close()
