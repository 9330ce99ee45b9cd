"""Objects that a config takes in place of names: functions and classes, and rows of data.

A config holds names alone, so that it can be written down, compared and read by another process. A
function or class is named by its path, and rows by what they hold, until the run writes them to a
file of its folder.
"""

import hashlib
import json
import os
import uuid
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from jaxrl.config.dataclass_config import TakesObjects
from jaxrl.config_error import ConfigError, fail
from jaxrl.files import replaced
from jaxrl.functions import path_of


class Rows(str):
    """Hold rows of data where a config names a file of them.

    As a string, what tells them apart; once they have a folder, the path of that file.
    """

    lines: str  # as JSON, one row a line

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], field: str) -> Self:
        """Return rows as a data source.

        Raises:
            ValueError: a row holds what JSON cannot say; names the field, the row and the value.
        """
        rows, lines = [_with_path(row, field) for row in rows], []
        if changed := {key for row in rows for key, value in row.items() if _has_tuple(value)}:
            named = ", ".join(map(repr, sorted(map(str, changed))))
            warnings.warn(f"{field}: tuples in {named} become lists, as in JSON", stacklevel=2)
        for number, row in enumerate(rows):
            try:
                line = json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain)
                line.encode()  # a surrogate alone is no text
                _check_keys(row)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{field}: row {number} cannot be written as JSON ({error}); a row holds text, "
                    "numbers, lists and dicts with keys of text"
                ) from error
            lines.append(line)
        text = "".join(f"{line}\n" for line in lines)
        given = cls(f"rows-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
        given.lines = text
        return given

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # nobody changes them

    def read(self) -> list[Any]:
        """Return the rows, as they would be read from a file."""
        return [json.loads(line) for line in self.lines.split("\n") if line]

    def placed(self, folder: Path) -> Self:
        """Return the rows as a file of a folder, which `written` writes."""
        placed = type(self)(Path(os.path.expanduser(folder), f"{Path(self).stem}.jsonl"))
        placed.lines = self.lines
        return placed

    def written(self) -> str:
        """Return the path of the file, written unless it is there, whole.

        Raises:
            FolderError: it could not be written.
        """
        file, content = Path(self), self.lines.encode()
        if not file.exists() or file.read_bytes() != content:
            with replaced(file, part=uuid.uuid4().hex) as new:  # every process writes one
                new.write_bytes(content)
        return str(file)


def _with_path(row: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return a row whose environment is named, where it is given as a class."""
    given = row.get("env_class")
    return {**row, "env_class": _function(given, field)} if callable(given) else row


def _plain(value: Any) -> Any:
    if not hasattr(value, "tolist"):  # of numpy and jax
        raise TypeError(f"{value!r:.60} is a {type(value).__name__}")
    return value.tolist()


def _has_tuple(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return False
    return isinstance(value, tuple) or any(map(_has_tuple, value))


def _check_keys(value: Any) -> None:
    """Refuse keys that JSON would write as other ones: 1 and "1" are one key there."""
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"key {wrong[0]!r:.60} is a {type(wrong[0]).__name__}")
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for x in value:
        _check_keys(x)


def _function(value: Any, field: str) -> Any:
    """Return the path of a function or class; a name as it is."""
    if isinstance(value, str) or value is None:
        return value
    try:
        return path_of(value)
    except ValueError as error:
        raise ConfigError(field, value, str(error)) from error


def _functions(value: Any, field: str) -> Any:
    if callable(value):
        fail(field, value, "is one function or class: write a list of them, [...]")
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    return [_function(x, f"{field}[{i}]") for i, x in enumerate(value)]


def _sources(value: Any, field: str) -> Any:
    """Return names of sources; all rows among them are one source, where the first one stands."""
    if isinstance(value, Mapping):
        fail(field, value, "is one row: write a list of rows, [{...}, ...]")
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    sources, rows, place = [], [], 0
    for x in value:
        if not isinstance(x, Mapping):
            sources.append(x)
            continue
        if not rows:
            place = len(sources)
        rows.append(x)
    return [*sources[:place], Rows.of(rows, field), *sources[place:]] if rows else sources


function = TakesObjects(_function)
"""A field that names a function or class takes it itself."""
functions = TakesObjects(_functions)
"""A field that lists names of functions or classes takes them themselves."""
rows = TakesObjects(_sources)
"""A field that lists data sources takes rows."""
