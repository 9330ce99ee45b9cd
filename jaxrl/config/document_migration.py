"""Writes tables of docs/migrating_from_skyrl.md: `python -m jaxrl.config.document_migration`."""

from pathlib import Path

from jaxrl.config.document import shown
from jaxrl.config.field_status import SAME_DEFAULT, TABLE, FieldStatus
from jaxrl.config.skyrl.names import SETTINGS, entry_points

PAGE = Path(__file__).parents[2] / "docs" / "migrating_from_skyrl.md"
_BEGIN = "<!-- Written by `python -m jaxrl.config.document_migration` until the end mark. -->"
_END = "<!-- end of what is written -->"


def tables() -> str:
    """Return the part of the page between the marks."""
    lines = [
        "| fields | here | difference | SkyRL's default, where ours differs |",
        "|---|---|---|---|",
        *(_field_row(row) for row in TABLE if row.skyrl_only),
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


def migration_page(text: str) -> str:
    """Return the page with its tables written anew."""
    head, tail = text.split(_BEGIN, maxsplit=1)[0], text.split(_END)[1]
    return f"{head}{_BEGIN}\n\n{tables()}\n\n{_END}{tail}"


def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(migration_page(PAGE.read_text()))


def _field_row(row: FieldStatus) -> str:
    used = f"used with {row.only_with}" * bool(row.only_with)
    default = "" if row.skyrl_default is SAME_DEFAULT else shown(row.skyrl_default)
    cells = _names(f"{row.prefix}.", row.names), row.status
    note = "; ".join(filter(None, (row.note, used)))
    return f"| {' | '.join(cells)} | {note} | {default} |"


def _names(prefix: str, names: str) -> str:
    """Return names, the first in full, the others without what they share with it."""
    first, *others = names.split()
    shared = f"{prefix}{first}".rpartition(".")[0] + "."
    return ", ".join(f"`{n}`" for n in [prefix + first, *(o.removeprefix(shared) for o in others)])


if __name__ == "__main__":
    main()
