"""A bit of run.db, or of its log, is another: no row is read that is not the one written."""

import contextlib
import json
import random
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from jaxrl.audit import audit, main
from jaxrl.records.ledger import FILE, Ledger, LedgerError
from jaxrl.records.ledger.database import SEALED
from jaxrl.tools.audit.lineage import NothingToAudit, open_run
from jaxrl.tools.audit.lineage_checks import rows
from jaxrl.tools.replay.recorded_run import RecordedRun
from tests.records.ledger.scribe import Scribe, failed

STAGE1 = Path(__file__).parents[2] / "data" / "stage1" / "runs"


def all_rows(path, position=2**63 - 1):
    """What is read of a database up to a position; None = it cannot be."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            db.text_factory = bytes
            found = {name: db.execute(f"SELECT * FROM {name}").fetchall() for name in SEALED}
    except (sqlite3.Error, UnicodeDecodeError):
        return None
    ids = ("groups", "trajectories", "ends", "steps")
    return {k: [r for r in x if k not in ids or r[0] <= position] for k, x in found.items()}


def resumed(folder, saved):
    """Whether a run goes on with the database; what it is told where it does not."""
    try:
        ledger = Ledger(folder / FILE)
        try:
            given = {"first_ordinal": 0, "facts": {}, "machine": {}, "uids": [], "path": "saved"}
            ledger.begin(saved["step"], saved if saved["step"] else None, **given)
        finally:
            ledger.close()
    except LedgerError as error:
        assert FILE in str(error) and "move it away: the run then goes on" in str(error)
        return False
    return True


def audited(folder):
    """Whether the audit takes the rows for those that were written."""
    try:
        with open_run(folder) as run:
            return rows(run).result == "passed"
    except NothingToAudit as error:
        return not ("it is damaged" in str(error) or "has format" in str(error))


def flipped(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_200_bits_of_a_real_run(finished, tmp_path):
    """Each that changes a row is refused by the next start and by the audit."""
    source = finished[0] / "quickstart"
    meta = finished[0] / "checkpoints" / "global_step_4" / "meta" / "metadata"
    saved = {"step": 4, **json.loads(meta.read_text())["ledger"]}
    whole = all_rows(source / FILE)
    assert saved["position"] == max(row[0] for row in whole["steps"])
    bits = random.Random(0).sample(range(8 * (source / FILE).stat().st_size), 200)
    kinds = Counter()
    run = tmp_path / "run"
    run.mkdir()
    shutil.copyfile(source / "config.yaml", run / "config.yaml")
    for bit in bits:
        for path in run.glob(f"{FILE}*"):
            path.unlink()
        shutil.copyfile(source / FILE, run / FILE)
        flipped(run / FILE, bit)
        changed = all_rows(run / FILE) != whole
        passed = audited(run)
        accepted = resumed(run, saved)
        kinds[changed, accepted, passed] += 1
        assert not (changed and (accepted or passed)), bit
    assert sum(n for (changed, *_), n in kinds.items() if changed) > 50
    assert sum(n for (_, accepted, _), n in kinds.items() if accepted) > 50


def test_a_bit_of_the_log_that_a_kill_left(tmp_path, capsys):
    """SQLite takes a log to its first damaged frame: the rows after it are missed.

    Where that is the first of all, the ledger is a new one, and says that it knows nothing.
    """
    whole = Scribe(tmp_path / "whole")
    whole.begin()
    for step in (1, 2, 3):
        whole.step(step)
    saved = {"step": 3, **whole.ledger.position()}
    size = (whole.folder / f"{FILE}-wal").stat().st_size
    expected = all_rows(whole.folder / FILE, saved["position"])
    kinds = Counter()
    for bit in random.Random(0).sample(range(8 * size), 40):
        run = tmp_path / str(bit)
        shutil.copytree(whole.folder, run)
        (run / f"{FILE}-shm").unlink()
        flipped(run / f"{FILE}-wal", bit)
        copy = tmp_path / f"copy{bit}"
        shutil.copytree(run, copy)
        changed = all_rows(copy / FILE, saved["position"]) != expected
        accepted = resumed(run, saved)
        anew = "knows nothing of the steps up to 3, of saved of run" in capsys.readouterr().err
        kinds[changed, accepted, anew] += 1
        assert not (changed and accepted) or anew, bit
    whole.ledger.close()
    assert (
        kinds[True, False, False] > 10 and kinds[True, True, True] and not kinds[False, True, True]
    )


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM ends WHERE id = (SELECT MAX(id) FROM ends)",
        "DELETE FROM attempts",
        "INSERT INTO groups VALUES (900, 1, 0, 'a', 0, NULL)",
        "UPDATE trajectories SET stop_reason = 'lengti' WHERE id = 3",
        "UPDATE trajectories SET superseded = 0 WHERE id = 3",
        "UPDATE steps SET checksums = '[]'",
        "UPDATE runs SET run_id = 'other'",
        "UPDATE data SET uid = 'other' WHERE row = 0",
        "DELETE FROM seals WHERE name = 'ends'; DELETE FROM ends",
        "DROP TABLE seals; DELETE FROM ends",
        "PRAGMA user_version = 0; DELETE FROM ends",
        "ALTER TABLE ends RENAME COLUMN reason TO reasom",
    ],
)
def test_a_row_too_many_too_few_or_another_is_damage(tmp_path, capsys, change):
    scribe = Scribe(tmp_path)
    scribe.begin()
    scribe.step(1)
    saved = {"step": 1, **scribe.ledger.position()}
    scribe.ledger.close()
    assert audited(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.executescript(change)
    assert main([str(tmp_path)]) in (1, 2)
    printed = capsys.readouterr()
    assert "damaged" in printed.out + printed.err
    with pytest.raises(ValueError, match=r"run\.db is damaged|it is damaged, or no ledger"):
        RecordedRun(tmp_path)  # for replay and compare
    assert not resumed(tmp_path, saved)


def test_every_value_of_a_column_is_sealed_as_it_is_stored(tmp_path):
    """SQLite stores NaN as NULL, 1 in a column of reals as 1.0, and a text of digits as a number"""
    scribe = Scribe(tmp_path)
    scribe.begin()
    (group,) = scribe.hand_out(0, 0).values()
    rows = [
        (group, sample, reward, True, stopped, "7", 1)
        for sample, (reward, stopped) in enumerate(
            [(float("nan"), None), (1, 5), (-0.0, "é\u2028\U0001fae8"), (float("inf"), b"\xff")]
        )
    ]
    scribe.ledger.add("trajectories", rows)
    scribe.ledger.position()
    scribe.ledger.close()
    assert audited(tmp_path) and resumed(tmp_path, {"step": 0})


def test_what_is_taken_back_and_written_anew_is_sealed(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.begin()
    scribe.step(1)
    saved = scribe.ledger.position()
    scribe.step(2)
    scribe.ledger.close()
    scribe.begin(1, saved, first=2)
    (tmp_path / FILE).unlink()
    scribe.step(2)
    checks = scribe.checks()
    scribe.ledger.close()
    assert not failed(checks) and checks["rows as written"].result == "passed"
    assert checks["rows as written"].figures["steps"] == 3
    assert audited(tmp_path) and resumed(tmp_path, {"step": 1, **saved})


def test_a_run_of_an_earlier_version_goes_on_and_is_sealed_from_then_on(tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(STAGE1 / "lora", run)
    checks = {check.name: check for check in audit(run)}
    assert checks["rows as written"].result == "unknown"
    Ledger(run / FILE).close()
    assert capsys.readouterr().err.count("was begun by an earlier version of jaxrl") == 1
    assert audited(run)
    Ledger(run / FILE).close()
    assert capsys.readouterr().err == ""
