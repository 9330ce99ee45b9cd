"""Checksums of the rows of an SQLite database, which itself has none: one bit is another row.

The table `seals` has a number for each table: the sum of a hash of each of its rows, in which no
order matters. Triggers of the connection that writes keep it, in the transaction of each change; so
it is right at any instant, after a kill, too. Whoever reads compares.
"""

import hashlib
import sqlite3
from collections.abc import Iterable
from typing import Any

_SCHEMA = "sqlite_master"  # is sealed, too: which tables there are, and names of their columns
_DECLARED = "name, sql FROM sqlite_master WHERE type = 'table' AND name IN (SELECT name FROM seals)"
_HASH_BYTES = 8
_DAMAGED = "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR"  # the last: there is no such table


def is_sealed(db: sqlite3.Connection) -> bool:
    """Return whether a database has seals; one that an earlier version wrote has none."""
    (marked,) = db.execute("PRAGMA user_version").fetchone()  # one bit cannot take both away
    return bool(marked or db.execute(f"SELECT 1 FROM {_SCHEMA} WHERE name = 'seals'").fetchone())


def seal(db: sqlite3.Connection, tables: Iterable[str]) -> None:
    """Seal tables, and keep the seals right whatever this connection changes; in a transaction.

    Tables that have no seal get one of the rows they have now: look for `damage` first.
    """
    db.create_function("moved", -1, _moved, deterministic=True)
    db.execute("PRAGMA recursive_triggers = ON")  # else nobody hears of a row that is replaced
    db.execute("PRAGMA user_version = 1")
    db.execute("CREATE TABLE IF NOT EXISTS seals (name TEXT PRIMARY KEY, checksum TEXT)")
    for table in tables:
        if not db.execute("SELECT 1 FROM seals WHERE name = ?", (table,)).fetchone():
            db.execute("INSERT INTO seals VALUES (?, ?)", (table, _checksum(db, table)))
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        old, new = (", ".join(f"{when}.{name}" for name in columns) for when in ("OLD", "NEW"))
        less, more = f"moved(checksum, -1, '{table}', {old})", f"'{table}', {new})"
        for event, value in (
            ("INSERT", f"moved(checksum, 1, {more}"),
            ("DELETE", less),
            ("UPDATE", f"moved({less}, 1, {more}"),
        ):
            db.execute(
                f"CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON {table} BEGIN "
                f"UPDATE seals SET checksum = {value} WHERE name = '{table}'; END"
            )
    db.execute("REPLACE INTO seals VALUES (?, ?)", (_SCHEMA, _checksum(db, _SCHEMA)))


def damage(db: sqlite3.Connection) -> str:
    """Return what of a database is not as it was written, in words; "" = nothing.

    Of a database without seals only the structure can be known.

    Raises:
        sqlite3.Error: it cannot be read now.
    """
    try:
        (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            return " ".join(found.split())
        if not is_sealed(db):
            return ""
        seals = dict(db.execute("SELECT name, checksum FROM seals"))
        for table in seals.keys() | {_SCHEMA}:
            if seals.get(table) != _checksum(db, table):
                return f"the rows of its table {table} are not those that were written"
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter of the name of a column
        if getattr(error, "sqlite_errorname", _DAMAGED[0]).startswith(_DAMAGED):
            return f"{type(error).__name__}: {error}"
        raise
    return ""


def _checksum(db: sqlite3.Connection, table: str) -> str:
    selected = _DECLARED if table == _SCHEMA else f"* FROM {table}"
    decode, db.text_factory = db.text_factory, _lossless
    try:
        return _written(sum(_of_row(table, row) for row in db.execute(f"SELECT {selected}")))
    finally:
        db.text_factory = decode


def _moved(checksum: str, sign: int, table: str, *row: Any) -> str:
    """Return the seal of a table with a row more or less; a function of SQL."""
    return _written(int(checksum, 16) + sign * _of_row(table, row))


def _of_row(table: str, row: Iterable[Any]) -> int:
    plain = [hashlib.sha256(x).digest() if isinstance(x, bytes) else x for x in row]
    # `ascii` is the same in every version of Python; `repr` knows which characters are printable
    data = ascii((table, *plain)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=_HASH_BYTES).digest())


def _written(total: int) -> str:
    return f"{total % 256**_HASH_BYTES:0{2 * _HASH_BYTES}x}"


def _lossless(text: bytes) -> str:
    """Return a text that differs from others in whatever byte does, valid or not."""
    return text.decode("utf-8", "surrogateescape")
