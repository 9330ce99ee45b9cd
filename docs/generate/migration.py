"""Generate the tables of docs/migrating_from_skyrl.md: fields, later settings, entry points."""

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

from docs.generate.configuration import shown
from jaxrl.config.dataclass_config import BaseConfig, config_class, field_types
from jaxrl.config.field_status import SAME_DEFAULT, FieldStatus, status_of
from jaxrl.config.skyrl.names import SETTINGS, entry_points
from jaxrl.config.train_config import TrainConfig

PAGE = Path(__file__).parents[2] / "docs" / "migrating_from_skyrl.md"
_BEGIN = "<!-- Written by `python -m docs.generate` until the end mark. -->"
_END = "<!-- end of what is written -->"


def tables(first_cells: list[str]) -> str:
    """Return the part of the page between the marks.

    Args:
        first_cells: of the table of fields: which of them share a row is written on the page.
    """
    lines = [
        "| fields | here | difference | SkyRL's default, where ours differs |",
        "|---|---|---|---|",
        *_field_rows(first_cells),
        "",
        "Later settings, and those of examples, which the documents of March 2026 lack:",
        "",
        "| setting | here | note |",
        "|---|---|---|",
        *(f"| {_names('', row.names)} | {row.kind} | {row.note} |" for row in SETTINGS),
        "",
        "Entry points; any other one is refused, as its code is not in the arguments:",
        "",
        "| entry point | sets | note |",
        "|---|---|---|",
        *(
            f"| `{name}` | {' '.join(f'`{k}={v!r}`' for k, v in entry.sets.items())} | "
            f"{entry.note} |"
            for name, entry in entry_points().items()
        ),
    ]
    return "\n".join(lines)


def page() -> str:
    """Return the text of docs/migrating_from_skyrl.md with its tables written anew."""
    return with_tables(PAGE.read_text())


def with_tables(text: str) -> str:
    """Return the text of the page with its tables written anew.

    Raises:
        ValueError: the fields of a row differ, or a field has no row.
    """
    head, written = text.split(_BEGIN, maxsplit=1)
    written, tail = written.split(_END)
    first_cells = [line.split(" | ")[0] for line in written.split("\n\n")[1].splitlines()[2:]]
    return f"{head}{_BEGIN}\n\n{tables(first_cells)}\n\n{_END}{tail}"


def _field_rows(first_cells: list[str]) -> list[str]:
    """Return the rows of the table of fields, each of SkyRL's fields in one.

    Raises:
        ValueError: the fields of a row differ, or a field has no row.
    """
    left, rows = {key for key in _keys(TrainConfig, "") if _status(key).skyrl_only}, []
    for cell in first_cells:
        keys = _named(cell, left)
        if len(statuses := {_status(key) for key in keys}) != 1:
            raise ValueError(f"{PAGE}, row {cell}: the fields differ, or have a row; found {keys}")
        left -= keys
        rows.append(_field_row(cell, statuses.pop()))
    if left:
        raise ValueError(f"{PAGE}: write {sorted(left)} into the first column of its first table")
    return rows


def _field_row(cell: str, status: FieldStatus) -> str:
    used = f"used with {status.only_with}" * bool(status.only_with)
    default = "" if status.skyrl_default is SAME_DEFAULT else shown(status.skyrl_default)
    note = "; ".join(filter(None, (status.note, used)))
    return f"{cell} | {status.status} | {note} | {default} |"


def _keys(cls: type[BaseConfig], prefix: str) -> Iterator[str]:
    for name, kind in field_types(cls).items():
        if (inner := config_class(kind)) is not kind:
            yield prefix + name
        if inner is not None:
            yield from _keys(inner, f"{prefix}{name}.")


def _status(key: str) -> FieldStatus:
    status = status_of(key)
    assert status is not None, key
    return status


def _named(cell: str, keys: set[str]) -> set[str]:
    """Return the keys that a first cell names: the first in full, others in a group around it."""
    first, *others = re.findall(r"`(.+?)`", cell)
    found, groups = set(fnmatch.filter(keys, first)), [first]
    while "." in groups[-1]:
        groups.append(groups[-1].rpartition(".")[0])
    for name in others:
        matches = (set(fnmatch.filter(keys, f"{group}.{name}")) for group in groups)
        found |= next(filter(None, matches), set())
    return found


def _names(prefix: str, names: str) -> str:
    """Return names, the first in full, the others without what they share with it."""
    first, *others = names.split()
    shared = f"{prefix}{first}".rpartition(".")[0] + "."
    return ", ".join(f"`{n}`" for n in [prefix + first, *(o.removeprefix(shared) for o in others)])
