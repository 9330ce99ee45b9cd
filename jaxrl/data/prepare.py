"""Write a known data set as train.parquet and validation.parquet, in the columns of the trainer.

    python -m jaxrl.data.prepare gsm8k --output data/gsm8k
    python -m jaxrl.data.prepare dapo --output data/dapo --source copies/dapo

    --output     folder of the two files
    --source     folder or file of a copy, or the id of a data set on the hub
    --env-class  environment of the rows, in place of the data set's own
    --levels     of math's training rows, 1 to 5, e.g. --levels 3 4 5

The data sets are gsm8k, math, dapo, aime, text2sql and searchr1; docs/data.md says what is in them.
They come from the Hugging Face hub, or from a copy with the files that the hub has.
"""

from jaxrl import cli

if __name__ == "__main__":
    cli.answer_early(__doc__)

import csv
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl.data.benchmarks import BENCHMARKS, Row, Split
from jaxrl.data.messages import BadRow
from jaxrl.data.prompts import bad_rows, read_rows
from jaxrl.files import replaced

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_FIELD = 16 * 1024**2  # characters of a field of a CSV; Python's own limit is 128 Ki
_SPLITS = {"train": "train", "validation": "test"}  # file -> what the data sets call it


class NoSuchFiles(ValueError):
    """Say that a folder has none of the files of a split."""


def prepare(
    name: str,
    output: Path,
    source: str | None = None,
    *,
    env_class: str | None = None,
    levels: Sequence[int] = (),
) -> dict[str, int]:
    """Write `output`/train.parquet and validation.parquet; the same input gives the same files.

    Args:
        name: of `BENCHMARKS`.
        source: a folder, a file or the id of a data set on the hub; None = where it is published.
        env_class: in place of the data set's environment.
        levels: of MATH's training rows, 1 to 5; () = all.

    Returns:
        The number of rows of each file. A source without evaluation rows gives no validation.

    Raises:
        ValueError: there is no such source, a file or column is missing, rows are bad, or
            `output` has a validation.parquet of another source.
    """
    if levels and name != "math":
        raise ValueError(f"--levels {levels}: {name} has no levels, only math has")
    changed = {} if env_class is None else {"env_class": env_class}
    again = f"python -m jaxrl.data.prepare {name} --output {shlex.quote(str(output))}"
    tables = {}
    for split in _SPLITS:
        files = files_of(name, split, source, again)
        rows = converted_rows(name, files, split) if files else []
        if levels and split == "train":
            wanted = {f"Level {level}" for level in levels}
            rows = [row for row in rows if row["extra_info"]["level"] in wanted]
        if rows:
            tables[split] = pa.Table.from_pylist([row | changed for row in rows])
    if "train" not in tables:
        raise ValueError(f"--levels {levels}: no row of train has one of these levels")
    left = output / "validation.parquet"
    if "validation" not in tables and left.exists():
        raise ValueError(
            f"{left} is of another source, for this one has no validation; remove it, or choose "
            "another --output"
        )
    for split, table in tables.items():  # all of them are right
        _write(table, output / f"{split}.parquet")
    return {split: table.num_rows for split, table in tables.items()}


def files_of(name: str, split: str, source: str | None, again: str) -> list[Path]:
    """Return the files of a split; none where a source has only training rows.

    Args:
        again: the command, for errors.

    Raises:
        ValueError: there is no such source, or it has no training rows.
    """
    benchmark = BENCHMARKS[name]
    one_file = source is not None and Path(source).expanduser().is_file()
    if split == "validation" and one_file and benchmark.train != benchmark.validation:
        print(f"{source} is one file: no validation.parquet is written")
        return []
    try:
        return find_files(source, getattr(benchmark, split), again)
    except NoSuchFiles as error:
        if split == "train":
            raise
        print(f"{error}: no validation.parquet is written")
        return []


def find_files(source: str | None, split: Split, again: str) -> list[Path]:
    """Find the files of a source that a split asks for, in order; those of the hub are downloaded.

    Raises:
        NoSuchFiles: it has none.
        ValueError: there is no such source, or the hub cannot be reached.
    """
    if source is not None and (path := Path(source).expanduser()).exists():
        return [path] if path.is_file() else _matching(path, split.files)
    if source is not None and not _HUB_ID.fullmatch(source):
        raise ValueError(
            f"--source {source!r} is neither a file or folder (looked in {Path.cwd()}) nor the id "
            "of a data set on the Hugging Face hub, owner/name"
        )
    hub = source or split.hub
    return _matching(_download(hub, split.files, again), split.files, hub)


def converted_rows(name: str, files: Sequence[Path], split: str) -> list[Row]:
    """Convert the rows of some files to what the trainer reads.

    Raises:
        ValueError: bad rows, the first few listed; there is no row to train on.
    """
    benchmark, problems, total = BENCHMARKS[name], [], 0

    def converted() -> Iterator[Row]:
        nonlocal total
        for total, raw in enumerate((row for file in files for row in _read(file)), start=1):
            try:
                if not isinstance(raw, Mapping):
                    raise BadRow(f"not a row with columns but {raw!r:.100}")
                row = benchmark.convert(dict(raw), total - 1, _SPLITS[split])
            except BadRow as error:
                problems.append(f"row {total - 1}: {error}")
                continue
            if row is not None:
                yield row

    found = _distinct(converted()) if benchmark.distinct else list(converted())
    source = ", ".join(map(str, files))
    if problems:
        raise bad_rows(f"{source} as {name}", problems, total)
    if not found and split == "train":
        raise ValueError(f"{source} has no row for train")
    return found


def _distinct(rows: Iterable[Row]) -> list[Row]:
    """Keep each prompt once, where its first row stands; none whose rows have different answers."""
    first: dict[str, Row] = {}
    ambiguous = set()
    for row in rows:
        key = repr(row["prompt"])
        if first.setdefault(key, row)["reward_model"] != row["reward_model"]:
            ambiguous.add(key)
    return [row for key, row in first.items() if key not in ambiguous]


def _matching(folder: Path, patterns: Sequence[str], hub: str = "") -> list[Path]:
    names = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    for pattern in patterns:
        if found := [name for name in names if _matches(name, pattern)]:
            return [folder / name for name in found]
    raise NoSuchFiles(f"{hub or folder} has none of the files {', '.join(patterns)}")


def _matches(name: str, pattern: str) -> bool:
    """Return whether a path matches a pattern; `*` stays within a folder."""
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _download(hub: str, patterns: Sequence[str], again: str) -> Path:
    from huggingface_hub import snapshot_download  # a second to import

    try:
        found = snapshot_download(hub, repo_type="dataset", allow_patterns=list(patterns))
        return Path(found)
    except Exception as error:  # of the hub, of HTTP, of sockets: there is no common base
        raise ValueError(
            f"the data set {hub!r} cannot be had from the Hugging Face hub "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]}). Copy it where it can "
            f"be reached, 'hf download {hub} --repo-type dataset --local-dir FOLDER', and run "
            f"{again} --source FOLDER"
        ) from error


def _read(file: Path) -> Iterator[Any]:
    """Yield the rows of a file.

    Raises:
        ValueError: it cannot be read; names it, and how many rows could.
    """
    read = 0
    try:
        for row in _read_csv(file) if file.suffix.lower() == ".csv" else read_rows(str(file)):
            yield row
            read += 1
    except (csv.Error, pa.ArrowException, UnicodeError) as error:
        raise ValueError(f"{file}: cannot be read after {read} rows: {error}") from error


def _read_csv(file: Path) -> Iterator[Any]:
    csv.field_size_limit(_MAX_FIELD)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        yield from csv.DictReader(lines)


def _write(table: pa.Table, path: Path) -> None:
    with replaced(path) as new:
        pq.write_table(table, new)


@cli.command(__doc__, bare=cli.REFUSED)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.data.prepare NAME --output FOLDER [--source SOURCE] ...`."""
    arguments = cli.Arguments()
    arguments.add_argument("name", choices=BENCHMARKS)
    arguments.add_argument("--output", type=Path, required=True)
    arguments.add_argument("--source")
    arguments.add_argument("--env-class")
    arguments.add_argument("--levels", type=int, nargs="+", default=())
    options = arguments.parse_args(argv)
    output = options.output.expanduser()
    written = prepare(
        options.name,
        output,
        options.source,
        env_class=options.env_class,
        levels=options.levels,
    )
    for split, rows in written.items():
        print(f"{output / split}.parquet: {rows} rows")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
