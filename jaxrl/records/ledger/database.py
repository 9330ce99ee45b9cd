"""`run.db`: one append-only SQLite database per run, written by one thread.

Rows are only ever added. Each has an id from one counter, so a single number, the position, says
what a checkpoint knows. The orbax commit is the only commit point: a run that goes on from a
checkpoint marks the rows after its position as superseded, by the attempt that takes them back.
What is not superseded is the surviving lineage.
"""

import contextlib
import errno
import json
import os
import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl import activity
from jaxrl.files import FolderError, replaced
from jaxrl.records.sealed_tables import damage, is_sealed, seal

FILE = "run.db"
FORMAT = 2
FORMATS = (1, FORMAT)  # that can be read; rows of the first have no checksums
_TABLES = {
    "groups": "ordinal INTEGER, uid TEXT, step INTEGER",
    "trajectories": "group_id INTEGER, sample INTEGER, reward REAL, tokens INTEGER, "
    "stop_reason TEXT, first_version INTEGER, last_version INTEGER",
    "ends": "trajectory_id INTEGER, step INTEGER, reason TEXT",
    "steps": "step INTEGER, file TEXT, file_digest TEXT, checksums TEXT",
}
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS runs (run_id TEXT, format INTEGER, facts TEXT)",
    "CREATE TABLE IF NOT EXISTS data (row INTEGER PRIMARY KEY, uid TEXT)",
    "CREATE TABLE IF NOT EXISTS attempts (attempt INTEGER PRIMARY KEY, position INTEGER, "
    "from_step INTEGER, first_ordinal INTEGER, origin TEXT, started REAL, machine TEXT)",
    *(
        f"CREATE TABLE IF NOT EXISTS {name} (id INTEGER PRIMARY KEY, attempt INTEGER, {columns}, "
        "superseded INTEGER)"
        for name, columns in _TABLES.items()
    ),
    "CREATE INDEX IF NOT EXISTS ends_of ON ends (trajectory_id)",
    "CREATE INDEX IF NOT EXISTS trajectories_of ON trajectories (group_id)",
)
SEALED = ("runs", "data", "attempts", *_TABLES)
# Groups without an end of any of their trajectories, all along the surviving lineage.
_OPEN_GROUPS = """SELECT id FROM groups WHERE superseded IS NULL AND id NOT IN (
    SELECT t.group_id FROM trajectories t JOIN ends e ON e.trajectory_id = t.id
    WHERE t.superseded IS NULL AND e.superseded IS NULL)"""

_DAMAGED = (
    "move it away: the run then goes on with a new one, which knows nothing earlier; or put a copy "
    "in its place"
)
_FIXES = {  # by the first letters of SQLite's error
    "SQLITE_FULL": "free space on its disk",
    "SQLITE_BUSY": "it was locked for {.lock_timeout:g} s, end the process that holds it",
    "SQLITE_CORRUPT": _DAMAGED,
    "SQLITE_NOTADB": _DAMAGED,
}
_OTHER_FIX = "mend the disk or the permissions of its folder"
_VALUE_FIX = "a generator or an environment gave what cannot be stored, mend that"
_NO_SPACE = errno.ENOSPC, errno.EDQUOT, errno.EFBIG

Work = Callable[[sqlite3.Connection], Any]
Row = Sequence[Any]


class LedgerError(ValueError):
    """Say that the ledger cannot be written.

    What the last checkpoint holds is not touched by it.
    """


class Ledger:
    """Write a run's database; a run folder has one writer, `lease.FolderLock`.

    Methods return at once; `position` and `begin` wait. What goes wrong in the writing thread is
    raised by the next call.

    Args:
        path: of the database; its folder exists.
        lock_timeout: seconds to wait for another process that locks the database.

    Raises:
        LedgerError: it is damaged (not one row may be another) or no ledger, another process locks
            it, or the disk refuses.
    """

    def __init__(self, path: Path, *, lock_timeout: float = 60.0) -> None:
        self.path, self.lock_timeout = path, lock_timeout
        self._lock, self._next = threading.Lock(), 1
        self._failure: LedgerError | FolderError | None = None
        self._new = path.with_name(f"{path.name}.new")
        try:
            if self._new.exists() and not path.exists():  # a kill in `_write_anew`
                self._put_in_place()
            self.run_id, self._next = self._connect()
        except (sqlite3.Error, UnicodeDecodeError, OSError) as error:
            raise self._named(error) from error
        self.attempt, self._closed = 0, False
        self._queue: queue.SimpleQueue[tuple[Work, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="jaxrl-ledger", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- the rows

    def begin(
        self,
        step: int,
        saved: Mapping[str, Any] | None,
        *,
        path: str = "",
        first_ordinal: int,
        facts: Mapping[str, Any],
        machine: Mapping[str, Any],
        uids: Sequence[str],
        held: Collection[int] = (),
    ) -> None:
        """Begin an attempt after `step` finished steps; supersede what its checkpoint lacks.

        Args:
            saved: what `position` gave for the checkpoint; None without one.
            path: of the checkpoint.
            first_ordinal: number of the first prompt that was never handed out.
            facts: of the run, JSON.
            machine: what this attempt runs on, JSON.
            uids: of the training prompts, in the order of the data.
            held: groups that were sampled and wait in the checkpoint.

        Raises:
            LedgerError: rows that the checkpoint knows are not there.
        """
        known = saved is not None and saved["run_id"] == self.run_id
        position = saved["position"] if saved is not None and known else 0
        origin = "" if known or not step else f"{path} of run {saved['run_id'] if saved else '?'}"
        if position >= self._next:
            problem = f"it ends with row {self._next - 1}, {path} knows {position}"
            raise self._refusal(f"rows are lost: {problem}", _DAMAGED)
        if origin:
            activity.warn(f"{self.path} knows nothing of the steps up to {step}, of {origin}")

        def work(db: sqlite3.Connection) -> int:
            (last,) = db.execute("SELECT COALESCE(MAX(attempt), 0) FROM attempts").fetchone()
            attempt = last + 1
            for table in _TABLES:
                _supersede(db, table, attempt, "id > ?", (position,))
            if known:
                lost = {g for (g,) in db.execute(_OPEN_GROUPS)} - set(held)
                for table, column in (("groups", "id"), ("trajectories", "group_id")):
                    for group in lost:
                        _supersede(db, table, attempt, f"{column} = ?", (group,))
            db.execute("UPDATE runs SET facts = ?", (json.dumps(dict(facts)),))
            if [uid for (uid,) in db.execute("SELECT uid FROM data ORDER BY row")] != list(uids):
                db.execute("DELETE FROM data")
                db.executemany("INSERT INTO data VALUES (?, ?)", enumerate(uids))
            row = attempt, position, step, first_ordinal, origin, time.time()
            row = *row, json.dumps(dict(machine))
            db.execute("INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            return attempt

        self.attempt = self.submit(work).result()

    def add(self, table: str, rows: Iterable[Row]) -> list[int]:
        """Add rows, without id, attempt and superseded; returns their ids."""
        with self._lock:
            numbered = list(enumerate(rows, self._next))
            self._next += len(numbered)
            whole = [(i, self.attempt, *row, None) for i, row in numbered]
            self.submit(lambda db: _insert(db, table, whole))
        return [i for i, _ in numbered]

    def add_made(self, table: str, make: Callable[[], Row]) -> Future[Any]:
        """Add a row that the writing thread makes first, as of a file that it writes."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            return self.submit(
                lambda db: _insert(db, table, [(number, self.attempt, *make(), None)])
            )

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint that is saved now knows; all of it is on disk."""
        with self._lock:
            last, done = self._next - 1, self.submit(self._sync)
        done.result()
        return {"run_id": self.run_id, "position": last}

    def close(self) -> None:
        """Write what is left. It raises nothing: who has to know asks for the `position` before."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        self._connection.close()

    # ---------------------------------------------------------------- the thread

    def submit(self, work: Work) -> Future[Any]:
        """Do something in a transaction of the writing thread.

        Raises:
            LedgerError: something earlier failed, or it is closed.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise LedgerError(f"the ledger {self.path} is closed")
        done: Future[Any] = Future()
        self._queue.put((work, done))
        return done

    def _write(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            work, done = item
            if self._failure is not None:
                done.set_exception(self._failure)
                continue
            try:
                done.set_result(self._transaction(work))
            except BaseException as error:
                self._failure = self._named(error)
                if self._failure is not error:
                    self._failure.__cause__ = error
                done.set_exception(self._failure)

    def _transaction(self, work: Work) -> Any:
        if self._inodes() != self._files:
            self._write_anew()
        db = self._connection
        db.execute("BEGIN IMMEDIATE")
        try:
            result = work(db)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        return result

    def _connect(self) -> tuple[str, int]:
        """Open and check it; return the id of the run and the next number of a row."""
        db = self._connection = sqlite3.connect(
            self.path, timeout=self.lock_timeout, isolation_level=None, check_same_thread=False
        )
        try:
            (mode,) = db.execute("PRAGMA journal_mode=WAL").fetchone()
            if mode != "wal":
                problem = f"SQLite keeps no write-ahead log there (journal_mode={mode!r})"
                raise self._refusal(problem, "put trainer.log_path on a disk with shared memory")
            db.execute("PRAGMA synchronous=NORMAL")  # `position` syncs
            if found := damage(db):
                raise sqlite3.DatabaseError(f"it is damaged, {found}")
            opened = self._open()
            self._files = self._inodes()
            return opened
        except BaseException:
            db.close()
            raise

    def _inodes(self) -> list[int | None]:
        """Return the inodes of the database and its log, None for one that is gone."""
        paths = self.path, self._log
        return [path.stat().st_ino if path.exists() else None for path in paths]

    @property
    def _log(self) -> Path:
        return self.path.with_name(f"{self.path.name}-wal")

    def _sync(self, _: sqlite3.Connection) -> None:
        """Sync to disk everything committed so far."""
        with self._log.open("rb") as file:
            os.fsync(file.fileno())

    def _open(self) -> tuple[str, int]:
        """Return the id of the run and the next number of a row; make what is missing."""
        db = self._connection
        db.execute("BEGIN IMMEDIATE")
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        if tables and "runs" not in tables:
            raise sqlite3.DatabaseError(f"it is no ledger, its tables are {sorted(tables)}")
        if tables and not is_sealed(db):
            activity.warn(
                f"{self.path} was begun by an earlier version of jaxrl, without checksums of its "
                "rows: they have them from now on, and what was damaged before is not found"
            )
        for statement in _SCHEMA:
            db.execute(statement)
        seal(db, SEALED)
        found = db.execute("SELECT run_id, format FROM runs").fetchone()
        if found is None:
            found = uuid.uuid4().hex, FORMAT
            db.execute("INSERT INTO runs VALUES (?, ?, '{}')", found)
        if found[1] not in FORMATS:
            raise sqlite3.DatabaseError(f"format {found[1]}, this jaxrl writes {FORMAT}")
        db.execute("UPDATE runs SET format = ?", (FORMAT,))
        last = max(
            db.execute(f"SELECT COALESCE(MAX(id), 0) FROM {t}").fetchone()[0] for t in _TABLES
        )
        db.execute("COMMIT")
        return found[0], last + 1

    def _write_anew(self) -> None:
        """Write what is still open to a new file, where somebody deleted or replaced the file."""
        with replaced(self._new) as part:  # `_new` is whole, whenever a kill comes
            part.unlink(missing_ok=True)
            with contextlib.closing(sqlite3.connect(part)) as copy:
                self._connection.backup(copy)
        self._connection.close()
        self._put_in_place()
        self._connect()
        activity.warn(
            f"{self.path} was deleted while the run went on: written anew, nothing is lost"
        )

    def _put_in_place(self) -> None:
        """Replace the database by what was written anew; it has all that the log beside it had."""
        for suffix in ("-wal", "-shm"):
            self.path.with_name(f"{self.path.name}{suffix}").unlink(missing_ok=True)
        self._new.replace(self.path)

    def _named(self, error: BaseException) -> LedgerError | FolderError:
        if isinstance(error, LedgerError | FolderError):  # of a file beside it, which it names
            return error
        # found by us; or the text of an error of SQLite's that names what is damaged
        found_by_us = type(error) in (sqlite3.DatabaseError, UnicodeDecodeError)
        code = getattr(error, "sqlite_errorname", "SQLITE_NOTADB" if found_by_us else "")
        if isinstance(error, OSError):
            code = "SQLITE_FULL" if error.errno in _NO_SPACE else "SQLITE_IOERR"
        other = _OTHER_FIX if code else _VALUE_FIX
        fix = next((fix for name, fix in _FIXES.items() if code.startswith(name)), other)
        return self._refusal(f"{type(error).__name__}: {error}", fix.format(self))

    def _refusal(self, problem: str, fix: str) -> LedgerError:
        return LedgerError(
            f"cannot write the ledger {self.path} ({problem}): {fix}, and start again; the run "
            "goes on from its last checkpoint"
        )


def _insert(db: sqlite3.Connection, table: str, rows: Sequence[Row]) -> None:
    if rows:
        marks = ", ".join("?" * len(rows[0]))
        plain = ([x.item() if isinstance(x, np.generic) else x for x in row] for row in rows)
        db.executemany(f"INSERT INTO {table} VALUES ({marks})", plain)  # numpy's would be BLOBs


def _supersede(db: sqlite3.Connection, table: str, attempt: int, where: str, values: Row) -> None:
    db.execute(
        f"UPDATE {table} SET superseded = ? WHERE superseded IS NULL AND {where}",
        (attempt, *values),
    )
