"""What the service must not lose: calls before they are acknowledged, results before they are told.

One SQLite database. A call is there before its client hears of it, and by a number of its client's
own: sent again it is the same call. So after the server's death everything is computed again from
the last state of each model (`states.py`) on, and nothing is computed twice.

What is answered is kept for a time. So the file is as large as what is asked in that time, and as
what models were asked since they were last written; deleted rows leave room for new ones.

A bit that is another is found when the service begins (`records/sealed_tables.py`).
"""

import contextlib
import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl import activity
from jaxrl.files import DamagedFile
from jaxrl.records.sealed_tables import damage, is_sealed, seal

WAITS, DONE, FAILED = range(3)
_TABLES = "service", "sessions", "models", "samplers", "calls", "checkpoints"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS service (facts TEXT);
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, owner TEXT, opened REAL, seen REAL, ended REAL, facts TEXT);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, owner TEXT, session TEXT, opened REAL, ended REAL, facts TEXT);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, owner TEXT, session TEXT, clients INTEGER DEFAULT 0, path TEXT);
CREATE TABLE IF NOT EXISTS calls (
    id TEXT PRIMARY KEY, owner TEXT, target TEXT, number INTEGER, kind TEXT, body BLOB,
    digest TEXT, state INTEGER, answer BLOB, at REAL);
CREATE INDEX IF NOT EXISTS calls_of ON calls (target, number);
CREATE INDEX IF NOT EXISTS calls_that_wait ON calls (state) WHERE state = 0;
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, owner TEXT, model TEXT, kind TEXT, call TEXT, bytes INTEGER, at REAL,
    expires REAL, facts TEXT);
"""


class Call(NamedTuple):
    """Hold one call as it was accepted.

    Attributes:
        id: of its result.
        owner: whose key asked.
        target: the model or the sampler.
        number: in the order of the target's calls; that of a sampler says nothing.
        kind: what is asked.
        body: as it came.
    """

    id: str
    owner: str
    target: str
    number: int
    kind: str
    body: bytes


class Reused(ValueError):
    """Signal that a number has come before, with another body or too long ago to know."""


class Journal:
    """Write and read the database; any thread may.

    Args:
        path: of the file, which is made.

    Raises:
        DamagedFile: its rows are not those that were written.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._open(path)
        except BaseException:
            self._db.close()
            raise

    def _open(self, path: Path) -> None:
        if found := damage(self._db):
            raise DamagedFile(
                f"{path} is damaged, {found}: put a copy of its whole folder in its place; or "
                "begin anew with another tinker.root, which knows no model and no checkpoint of "
                "this one"
            )
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        if not is_sealed(self._db) and self.rows("SELECT 1 FROM sqlite_master"):
            activity.warn(
                f"{path} was begun by an earlier version of jaxrl, without checksums of its rows: "
                "they have them from now on, and what was damaged before is not found"
            )
        self._db.executescript(_SCHEMA)
        with self.together():
            seal(self._db, _TABLES)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement and return what it found."""
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Make all statements of the block one: there is all of it, or nothing."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def belong_to(self, about: dict[str, Any]) -> str | None:
        """Take the database for a service of these facts; return the fact that is another.

        Of one that an earlier version began, those that this version has added are not known.
        """
        with self.together():
            if not self.rows("SELECT facts FROM service"):
                self.rows("INSERT INTO service VALUES (?)", json.dumps(about))
        before = self.service
        return next((name for name in before if before[name] != about[name]), None)

    @property
    def service(self) -> dict[str, Any]:
        """Return the facts of the service that it belongs to."""
        return facts(self.rows("SELECT facts FROM service")[0][0])

    # ---------------------------------------------------------------- calls

    def accept(self, call: Call) -> bool:
        """Write a call; return whether it is new.

        Raises:
            Reused: another call had its number.
        """
        digest = hashlib.sha256(call.kind.encode() + b"\0" + call.body).hexdigest()
        with self._lock:
            known = self.rows("SELECT owner, digest FROM calls WHERE id = ?", call.id)
            if known:
                if known[0] != (call.owner, digest):
                    raise Reused(f"{call.id} was another call: number each call anew")
                return False
            self.rows(
                "INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL, ?)",
                *call,
                digest,
                WAITS,
                time.time(),
            )
        return True

    def answer(self, name: str, owner: str) -> tuple[str, int, bytes | None] | None:
        """Return kind, state and answer of an owner's call; None: there is no such call."""
        sql = "SELECT kind, state, answer FROM calls WHERE id = ? AND owner = ?"
        found = self.rows(sql, name, owner)
        return found[0] if found else None

    def finish(self, name: str, state: int, answer: bytes) -> None:
        """Write the answer of a call, which stays the first."""
        sql = """UPDATE calls SET state = ?, answer = ?,
            body = CASE kind WHEN 'sample' THEN NULL ELSE body END WHERE id = ? AND state = ?"""
        self.rows(sql, state, answer, name, WAITS)

    def calls(self, where: str, *values: Any) -> list[tuple[Call, int]]:
        """Return calls and their states, in the order of their numbers."""
        columns = "id, owner, target, number, kind, body, state"
        sql = f"SELECT {columns} FROM calls WHERE {where} ORDER BY target, number"
        return [(Call(*row[:-1]), row[-1]) for row in self.rows(sql, *values)]

    def forget_bodies(self, target: str, number: int = 2**63 - 1) -> None:
        """Drop what calls up to a number asked: a state that is kept has them in it, or none is."""
        sql = "UPDATE calls SET body = NULL WHERE target = ? AND number <= ? AND state != ?"
        self.rows(sql, target, number, WAITS)

    def forget_answers(self, before: float) -> None:
        """Drop calls that have been answered, and came before a time.

        Those stay without their answers that may have to be done again, losses while their owner
        has a session, and the last call of each target, which says when that was in use.
        """
        old = "at < ? AND state != ?"
        last = "SELECT MAX(number) FROM calls AS later WHERE later.target = calls.target"
        here = "SELECT owner FROM sessions WHERE ended IS NULL"
        loss = "kind = 'create_custom_loss'"
        for sql in (
            f"UPDATE calls SET body = NULL WHERE {old} AND {loss} AND owner NOT IN ({here})",
            f"DELETE FROM calls WHERE {old} AND body IS NULL AND number < ({last})",
            f"UPDATE calls SET answer = NULL WHERE {old} AND answer IS NOT NULL",
        ):
            self.rows(sql, before, WAITS)


def facts(text: str) -> dict[str, Any]:
    """Return what a row says beside its columns."""
    return json.loads(text)
