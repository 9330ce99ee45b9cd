"""Find the row of the data that a prompt was made of: its ground truth and what else it has."""

import json
from pathlib import Path
from typing import Any

from jaxrl.tools.report.run_files import RunFiles
from jaxrl.tools.report.settings import shown

ROWS = 200_000  # of a source that are looked at, at most
CHARACTERS = 4000  # of a row that are shown
FILES = ".parquet", ".jsonl", ".json"
OWN = "jaxrl."  # generators of other modules are not run: reading a report runs nobody's code


def row_of(run: RunFiles, uid: str) -> dict[str, str]:
    """Return the row of a prompt by its columns, as JSON; {} where it is not known.

    A uid is "<source index>:<row number>". Paths of a config are relative to where the run began.
    """
    source, _, number = uid.partition(":")
    sources = run.group("data").get("train_data")
    if not (source.isdecimal() and number.isdecimal() and isinstance(sources, list)):
        return {}
    if int(source) >= len(sources):
        return {}
    rows = run.data_rows.get(int(source))
    if rows is None:
        name = str(sources[int(source)])
        rows = run.note_of(f"ground truth of {name}", lambda: _read(name), [])
        run.data_rows[int(source)] = rows
    return json.loads(rows[int(number)]) if int(number) < len(rows) else {}


def env_of(run: RunFiles, uid: str) -> str:
    """Return the environment of a prompt: that of its row, else of the run; "" = not known."""
    own = json.loads(row_of(run, uid).get("env_class", "null"))
    return own or run.group("environment").get("env_class") or ""


def _read(source: str) -> list[str]:
    from jaxrl.data.prompts import read_rows  # reads parquet: for runs with trajectories only

    if not source.startswith(OWN) and Path(source).suffix.lower() not in FILES:
        return []
    return [_shown(row) for row, _ in zip(read_rows(source), range(ROWS), strict=False)]


def _shown(row: Any) -> str:
    columns = row.items() if isinstance(row, dict) else ()
    texts = {str(name): shown(value) for name, value in columns if name != "prompt"}
    return json.dumps({name: _shortened(text) for name, text in texts.items()})


def _shortened(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]} ..."
