"""A corpus of passages to search, from files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_WORDS = 100  # of a passage cut from a text, as of Karpukhin et al. 2020, arXiv:2004.04906, 4.1
_TEXTS = (".txt", ".md")
_SUFFIXES = (*_TEXTS, ".jsonl")


class Passage(NamedTuple):
    """Hold a piece of text that a search may find."""

    id: str
    contents: str


def read_passages(corpus: str) -> list[Passage]:
    """Read all passages of a folder or a file.

    A `.parquet` or `.jsonl` file has a column `contents`, and perhaps `id` and `title`; the title
    is put in quotes before contents that do not begin with it, as in the corpora of Search-R1. In a
    folder all such .jsonl files and all .txt and .md files count, those of its folders too, by
    name; a text is cut into passages of 100 words, under the file's name as title.

    Args:
        corpus: path of the folder or file.

    Raises:
        ValueError: there is no such thing, or nothing in it, or a row without contents.
    """
    path = Path(corpus).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES)
    elif path.is_file() and path.suffix.lower() in (".parquet", *_SUFFIXES):
        files = [path]
    else:
        problem = "is of no known kind" if path.exists() else "does not exist"
        raise ValueError(
            f"the corpus {corpus!r} {problem} (looked in {Path.cwd()}): give a folder of "
            f"{', '.join(_SUFFIXES)} files, or a .parquet or .jsonl file with a column contents"
        )
    found = [passage for file in files for passage in _of_file(file, path)]
    if not found:
        raise ValueError(f"the corpus {corpus!r} has no passage in {len(files)} files")
    return found


def _of_file(file: Path, corpus: Path) -> Iterator[Passage]:
    name = file.name if file == corpus else str(file.relative_to(corpus))
    suffix = file.suffix.lower()
    try:
        if suffix in _TEXTS:
            yield from _cut(file.read_text(encoding="utf-8"), name, file.stem)
            return
        rows = _parquet(file) if suffix == ".parquet" else _jsonl(file)
        for number, row in enumerate(rows):
            yield _passage(row, f"{name}:{number}")
    except ValueError as error:  # also UnicodeDecodeError, JSONDecodeError and ArrowInvalid
        raise ValueError(f"the corpus file {str(file)!r} cannot be read: {error}") from error


def _cut(text: str, name: str, title: str) -> Iterator[Passage]:
    words = text.split()
    for start in range(0, len(words), _WORDS):
        window = " ".join(words[start : start + _WORDS])
        yield Passage(f"{name}:{start // _WORDS}", f'"{title}"\n{window}')


def _jsonl(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number}: malformed JSON: {error.msg}") from error


def _parquet(file: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    columns = [name for name in ("id", "title", "contents") if name in table.schema_arrow.names]
    if "contents" not in columns:
        raise ValueError(f"no column contents; the columns are {table.schema_arrow.names}")
    for batch in table.iter_batches(columns=columns):
        yield from batch.to_pylist()


def _passage(row: Any, name: str) -> Passage:
    contents = row.get("contents") if isinstance(row, Mapping) else None
    if not isinstance(contents, str):
        keys = sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(f"row {name} has no text in the column contents; it has {keys}")
    title = str(row.get("title") or "").strip('"')
    if title and not contents.lstrip('"').startswith(title):
        contents = f'"{title}"\n{contents}'
    row_id = row.get("id")
    return Passage(name if row_id is None else str(row_id), contents)
