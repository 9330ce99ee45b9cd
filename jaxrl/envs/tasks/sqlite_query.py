"""One query of a SQLite database that nobody may change, in a process that can be killed.

As a module: `query` starts this file as a program, which answers on stdout. A query is one C call
that may not return for hours (a recursive table, a pattern, a join of everything with everything),
and may ask for any amount of memory; only a process of its own is sure to end.
"""

import json
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MEMORY_BYTES = 1 << 30
_MOST_BYTES = 10_000_000  # of one value, and of all rows as JSON
_SHOWN_ROWS, _SHOWN_CHARACTERS = 50, 9000
_READS = (
    *(sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION),
    sqlite3.SQLITE_RECURSIVE,
)
_PRAGMAS = (
    *("table_info", "table_xinfo", "table_list", "foreign_key_list"),
    *("index_list", "index_info", "index_xinfo"),
)


@dataclass(frozen=True)
class QueryResult:
    """Hold what a query gave."""

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    error: str = ""
    """Why there are no rows, or not all."""

    def same_rows(self, other: "QueryResult") -> bool:
        """Return whether both succeeded with the same set of rows.

        Order and repetitions do not count.
        """
        return not self.error and not other.error and set(self.rows) == set(other.rows)

    def __str__(self) -> str:
        """Return a table, cut after 50 rows or 9000 characters; or the error."""
        if self.error:
            return f"Error: {self.error}"
        lines = [" | ".join(map(str, row)) for row in (self.columns, *self.rows[:_SHOWN_ROWS])]
        text = "\n".join(lines)
        if len(self.rows) > _SHOWN_ROWS or len(text) > _SHOWN_CHARACTERS:
            text = f"{text[:_SHOWN_CHARACTERS]}\n... (cut: {len(self.rows)} rows in all)"
        return text


def query(path: Path, sql: str, seconds: float, max_rows: int) -> QueryResult:
    """Run one statement that only reads.

    Args:
        path: of the database; nothing else may be writing to it.
        sql: SELECT, WITH, VALUES, EXPLAIN, or PRAGMA of a table's columns and keys.
        seconds: until it is killed.
        max_rows: more than these are an error.
    """
    from jaxrl.child_environment import child_environment  # the program has no packages

    question = json.dumps({"path": str(path), "sql": sql, "max_rows": max_rows})
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-B", __file__],
            input=question.encode(),
            capture_output=True,
            timeout=seconds,
            env=child_environment(),
            check=False,
            start_new_session=True,  # Ctrl-C is the trainer's
        )
    except subprocess.TimeoutExpired:
        return QueryResult(error=f"no answer within {seconds:g} s")
    if ran.returncode != 0:
        return QueryResult(error="the query took too much memory")
    outcome = json.loads(ran.stdout)
    rows = tuple(tuple(map(_from_json, row)) for row in outcome["rows"])
    return QueryResult(tuple(outcome["columns"]), rows, outcome["error"])


def main() -> None:
    """Read a question from stdin, and write the answer to stdout."""
    question = json.loads(sys.stdin.buffer.read())
    _limit_memory()
    outcome: dict[str, Any] = {"columns": [], "rows": [], "error": ""}
    try:
        connection = sqlite3.connect(
            f"{Path(question['path']).as_uri()}?mode=ro&immutable=1", uri=True
        )
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(_authorize)
        cursor = connection.execute(question["sql"])
        outcome["columns"] = [column[0] for column in cursor.description or ()]
        outcome["rows"], outcome["error"] = _fetch(cursor, question["max_rows"])
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        outcome["error"] = str(error)
    sys.stdout.write(json.dumps(outcome))


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Allow reading, and asking for the columns of a table; deny everything else."""
    if action == sqlite3.SQLITE_PRAGMA and first in _PRAGMAS:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and second == "load_extension":
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_UPDATE and first == "sqlite_master":
        return sqlite3.SQLITE_OK  # how json_each and the like come in; the file cannot be written
    return sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY


def _fetch(cursor: sqlite3.Cursor, max_rows: int) -> tuple[list[list[Any]], str]:
    rows, num_bytes = [], 0
    for row in cursor:
        rows.append([_to_json(value) for value in row])
        num_bytes += sum(len(v) if isinstance(v, str | bytes) else 8 for v in row)
        if len(rows) > max_rows:
            return [], f"more than {max_rows} rows"
        if num_bytes > _MOST_BYTES:
            return [], f"more than {_MOST_BYTES} bytes of rows"
    return rows, ""


def _to_json(value: Any) -> Any:
    return {"blob": value.hex()} if isinstance(value, bytes) else value


def _from_json(value: Any) -> Any:
    return bytes.fromhex(value["blob"]) if isinstance(value, dict) else value


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not a Unix
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MEMORY_BYTES, _MEMORY_BYTES))  # temporary files


if __name__ == "__main__":
    main()
