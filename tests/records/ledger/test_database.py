"""The append-only database: lineages, positions, who may write."""

import os
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxrl.records.ledger import Ledger, LedgerError
from jaxrl.records.ledger.database import FILE

FACTS = {"seed": 0, "train_batch_size": 2}


def open_ledger(folder, **kwargs):
    return Ledger(folder / FILE, **kwargs)


def begin(ledger, step=0, saved=None, **kwargs):
    given = {"first_ordinal": 2 * step, "facts": FACTS, "machine": {}, "uids": ["a", "b"]}
    ledger.begin(step, saved, **{**given, **kwargs})


def rows(folder, query):
    with sqlite3.connect(folder / FILE) as db:
        return db.execute(query).fetchall()


def surviving(folder, table, column="id"):
    return [x for (x,) in rows(folder, f"SELECT {column} FROM {table} WHERE superseded IS NULL")]


def group(ledger, ordinal, *, step=0, ended=None):
    """A prompt, its one trajectory, and where that ended; returns their ids."""
    (g,) = ledger.add("groups", [(ordinal, "a", step)])
    (t,) = ledger.add("trajectories", [(g, 0, 1.0, 5, "stop", step, step)])
    if ended is not None:
        ledger.add("ends", [(t, ended, None)])
    return g, t


def test_ids_come_from_one_counter_and_go_on_in_the_next_attempt(tmp_path):
    ledger = open_ledger(tmp_path)
    begin(ledger)
    assert group(ledger, 0, ended=1) == (1, 2)  # its end is 3
    assert ledger.position() == {"run_id": ledger.run_id, "position": 3}
    ledger.close()
    again = open_ledger(tmp_path)
    begin(again, 1, {"run_id": ledger.run_id, "position": 3})
    assert again.attempt == 2 and again.run_id == ledger.run_id
    assert group(again, 1) == (4, 5)
    again.close()
    assert surviving(tmp_path, "groups") == [1, 4]


def test_a_position_is_given_once_its_rows_are_on_disk(tmp_path, monkeypatch):
    ledger, synced = open_ledger(tmp_path), []
    begin(ledger)
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file)))
    group(ledger, 0, ended=1)
    ledger.position()
    log = (tmp_path / f"{FILE}-wal").stat()
    assert [(found.st_ino, found.st_size) for found in synced] == [(log.st_ino, log.st_size)]
    ledger.close()


def test_what_a_checkpoint_does_not_know_is_taken_back(tmp_path):
    ledger = open_ledger(tmp_path)
    begin(ledger)
    ended, _ = group(ledger, 0, ended=1)
    held, of_held = group(ledger, 1)  # sampled, and waiting in the checkpoint
    flying, _ = group(ledger, 2)  # its samples are nowhere
    saved = ledger.position()
    later, of_later = group(ledger, 3)
    ledger.add("ends", [(of_held, 2, None), (of_later, 2, None)])
    ledger.close()
    again = open_ledger(tmp_path)
    begin(again, 1, saved, held=[held])
    again.close()
    assert surviving(tmp_path, "groups") == [ended, held]
    assert surviving(tmp_path, "trajectories", "group_id") == [ended, held]
    assert surviving(tmp_path, "ends", "step") == [1]  # that of the held one was after the commit
    taken = rows(tmp_path, "SELECT id FROM groups WHERE superseded = 2")
    assert taken == [(flying,), (later,)]


def test_without_a_checkpoint_everything_is_taken_back(tmp_path):
    ledger = open_ledger(tmp_path)
    begin(ledger)
    group(ledger, 0, ended=1)
    ledger.close()
    again = open_ledger(tmp_path)
    begin(again)
    again.close()
    assert surviving(tmp_path, "groups") == [] and len(rows(tmp_path, "SELECT * FROM groups")) == 1


@pytest.mark.parametrize("saved", [None, {"run_id": "other", "position": 7}])
def test_a_checkpoint_of_elsewhere_is_named_as_the_origin(tmp_path, saved):
    ledger = open_ledger(tmp_path)
    begin(ledger, 3, saved, path="global_step_3")
    ledger.close()
    name = "other" if saved else "?"
    found = rows(tmp_path, "SELECT from_step, first_ordinal, origin FROM attempts")
    assert found == [(3, 6, f"global_step_3 of run {name}")]


def test_a_killed_writer_leaves_what_it_flushed_and_no_lock(tmp_path):
    code = f"""
import os, signal
from tests.records.ledger.test_database import *
from pathlib import Path
ledger = open_ledger(Path({str(tmp_path)!r})); begin(ledger); group(ledger, 0, ended=1)
ledger.position()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert surviving(tmp_path, "ends", "step") == [1]
    open_ledger(tmp_path).close()


def test_ids_of_threads_do_not_mix(tmp_path):
    ledger = open_ledger(tmp_path)
    begin(ledger)
    threads = [
        threading.Thread(target=lambda: [group(ledger, 0, ended=1) for _ in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    positions = [ledger.position()["position"] for _ in range(20)]
    for thread in threads:
        thread.join()
    assert positions == sorted(positions) and ledger.position()["position"] == 600
    ledger.close()
    assert len(surviving(tmp_path, "ends")) == 200


def test_another_format_is_refused(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.submit(lambda db: db.execute("UPDATE runs SET format = 99")).result()
    ledger.close()
    with pytest.raises(LedgerError, match="format 99, this jaxrl writes 2") as refused:
        open_ledger(tmp_path)
    assert refused.traceback  # whose frames are still there
    with sqlite3.connect(tmp_path / FILE, timeout=0) as db:
        db.execute("BEGIN IMMEDIATE")  # nobody locks it


def test_a_closed_ledger_says_so(tmp_path):
    ledger = open_ledger(tmp_path)
    begin(ledger)
    ledger.close()
    ledger.close()
    for call in (ledger.position, lambda: begin(ledger), lambda: group(ledger, 0)):
        with pytest.raises(LedgerError, match=r"the ledger .*run.db is closed"):
            call()


def test_numbers_of_numpy_are_stored_as_numbers(tmp_path):
    ledger = open_ledger(tmp_path)
    begin(ledger)
    ledger.add("groups", [(np.int64(3), np.str_("a"), np.int32(1))])
    ledger.add("trajectories", [(1, 0, np.float32(0.5), np.int64(7), "stop", np.int32(0), 0)])
    ledger.close()
    assert rows(tmp_path, "SELECT ordinal, uid, step FROM groups") == [(3, "a", 1)]
    found = rows(tmp_path, "SELECT reward, tokens, first_version FROM trajectories")
    assert found == [(0.5, 7, 0)]
