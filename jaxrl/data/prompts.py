"""Data sets of prompts: reading rows and tokenising them.

A row is a dict with SkyRL's columns: `prompt` (chat messages; a plain string is one user message),
optionally `env_class`, and everything else, `reward_spec` and `data_source` by convention, which
reaches the environment as `extras`.
"""

import difflib
import glob
import inspect
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl.data.benchmarks import BENCHMARKS
from jaxrl.data.messages import BadRow, messages_of
from jaxrl.data.tokenizer import encode_prompt
from jaxrl.functions import import_named, parse_call, place_of
from jaxrl.hub import unfetched
from jaxrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATOR = re.compile(
    r"(?P<module>[A-Za-z_][\w.]*):(?P<call>[A-Za-z_]\w*\s*(\(.*\))?)", re.DOTALL
)
_LIKE_A_PATH = re.compile(r"\S*[/.]\S*")  # or a data set of the hub
_MAX_REPORTED_ROWS = 5
Row = TypeVar("Row")


def load_rows(source: str) -> list[dict[str, Any]]:
    """Read a data set; every returned row has its `prompt` as a list of messages.

    Args:
        source: a `.parquet`, `.jsonl` or `.json` file (a list, or one object per line), or a Python
            generator of rows: `"pkg.module:function"` or, with literal keyword arguments,
            `"pkg.module:function(size=512, seed=1, family='chain_sum')"`. Arguments are literals;
            no expression is evaluated.

    Raises:
        ValueError: the source does not exist, cannot be read, is empty, or has bad rows; the first
            few are listed with what is wrong. Rows are counted from 0.
    """
    return convert_rows(source, _prompt_row)


def convert_rows(source: str, convert: Callable[[dict[str, Any]], Row]) -> list[Row]:
    """Return what `convert` makes of every row of a data set.

    Args:
        source: see `load_rows`.
        convert: raises BadRow.

    Raises:
        ValueError: the source does not exist, cannot be read, is empty, or has bad rows; the first
            few are listed with what is wrong. Rows are counted from 0.
    """
    rows, problems = [], []
    for number, raw in enumerate(read_rows(source)):
        row = _plain(raw)
        try:
            if not isinstance(row, dict):
                raise BadRow(f"not a dict but {type(row).__name__} {str(row)[:60]!r}")
            rows.append(convert(row))
        except BadRow as error:
            problems.append(f"row {number}: {error}")
    if problems:
        raise bad_rows(_called(source), problems, len(rows) + len(problems))
    if not rows:
        raise ValueError(f"data source {source!r} is empty")
    return rows


def _called(source: str) -> str:
    """Return how an error calls a source: rows of a script may not be in a file yet."""
    return "the rows given" if hasattr(source, "read") else source


def bad_rows(source: object, problems: Sequence[str], total: int) -> ValueError:
    """Make the error that lists the first few bad rows of a source, of `total`."""
    shown = "\n  ".join(problems[:_MAX_REPORTED_ROWS])
    more = len(problems) - _MAX_REPORTED_ROWS
    rest = f"\n  and {more} more" if more > 0 else ""
    return ValueError(f"{source}: {len(problems)} of {total} rows are bad:\n  {shown}{rest}")


def load_prompts(
    sources: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_prompt_length: int,
    default_env_class: str,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[Prompt], list[int]]:
    """Read and tokenise data sets, and drop the prompts that are too long.

    Args:
        sources: what `load_rows` takes, one or more.
        tokenizer: a tokenizer with a chat template.
        max_prompt_length: in tokens, with the chat template and the generation prompt.
        default_env_class: for rows without `env_class`.
        chat_template_kwargs: variables of the chat template.

    Returns:
        The prompts in the order of the sources, and how many of each source were dropped. A uid is
        "<source index>:<row number>", counted before anything is dropped.

    Raises:
        ValueError: a bad source (see `load_rows`), or no prompt is short enough.
    """
    if isinstance(sources, str):
        raise ValueError(f"data sources are a list of strings, got the string {sources!r}")
    if not sources:
        raise ValueError("no data source was given")
    prompts, dropped_lengths, dropped = [], [], [0] * len(sources)
    for source_index, source in enumerate(sources):
        rows, refused = load_rows(source), list[str]()
        for row_number, row in enumerate(rows):
            messages = row.pop("prompt")
            env_class = row.pop("env_class", None) or default_env_class
            try:
                tokens = encode_prompt(tokenizer, messages, **(chat_template_kwargs or {}))
            except Exception as error:  # a template may refuse a role, or a conversation
                refused.append(f"row {row_number}: {type(error).__name__}: {error}")
                continue
            if len(tokens) <= max_prompt_length:
                uid = f"{source_index}:{row_number}"
                prompts.append(
                    Prompt(uid, messages, tuple(tokens), env_class, row, _called(source))
                )
            else:
                dropped_lengths.append(len(tokens))
                dropped[source_index] += 1
        if refused:
            raise ValueError(
                f"the chat template refuses rows; change them, or the template "
                f"(generator.chat_template). {bad_rows(_called(source), refused, len(rows))}"
            )
    if not prompts:
        raise ValueError(
            f"all {len(dropped_lengths)} prompts are longer than max_prompt_length="
            f"{max_prompt_length} tokens; the shortest has {min(dropped_lengths)}"
        )
    return prompts, dropped


# ---- reading -------------------------------------------------------------------------------------


def check_files(sources: Sequence[str]) -> None:
    """Check that the data sets that are files are there, before anything large is loaded.

    Raises:
        ValueError: names those that are not, and the command that writes them, if there is one.
    """
    missing = [source for source in sources if is_file(source) and not Path(source).is_file()]
    if missing:
        for source in missing:
            if files := _files_meant(source):
                raise ValueError(f"data file {source!r} is {files}")
        named = ", ".join(map(repr, missing))
        subject = f"data file {named} does" if len(missing) == 1 else f"data files {named} do"
        commands = "; ".join(dict.fromkeys(filter(None, map(_command_for, missing))))
        fix = f". To write: {commands}" if commands else ""
        raise ValueError(f"{subject} not exist (looked in {Path.cwd()}){fix}")


def _files_meant(source: str) -> str:
    """Say of a folder or a pattern what it is, and which files to name; "" of anything else."""
    if source and Path(source).is_dir():
        kind, folder = "a folder", glob.escape(source.rstrip("/"))
        patterns = [f"{folder}/*", f"{folder}/*/*"]  # partitions have folders, too
    elif glob.has_magic(source) and _LIKE_A_PATH.fullmatch(source):
        kind, patterns = "a pattern, which is not expanded", [source]
    else:
        return ""
    found = sorted(name for pattern in patterns for name in filter(is_file, glob.glob(pattern)))
    shown = [*map(repr, found[:_MAX_REPORTED_ROWS]), *["..."] * (len(found) > _MAX_REPORTED_ROWS)]
    held = f"[{', '.join(shown)}]" if found else f"{', '.join(_READERS)}; here are none"
    return f"{kind}; name its files: {held}"


def is_file(source: str) -> bool:
    """Return whether a source is a file, and not a script's rows or a generator."""
    return not hasattr(source, "read") and Path(source).suffix.lower() in _READERS


def _command_for(source: str) -> str:
    """Name the command that writes data/<name>/train.parquet or validation.parquet, or ""."""
    path = Path(source)
    if path.parent.name not in BENCHMARKS or path.suffix != ".parquet":
        return ""
    output = shlex.quote(str(path.parent))
    return f"python -m jaxrl.data.prepare {path.parent.name} --output {output}"


def read_rows(source: str) -> Iterable[Any]:
    """Read the rows of a data set as they are; see `load_rows`."""
    if read := getattr(source, "read", None):  # of `config.given.Rows`
        return read()
    if reader := _READERS.get(Path(source).suffix.lower()):
        check_files([source])
        if problem := unfetched(Path(source)):
            raise ValueError(f"{source} {problem}")
        return reader(Path(source))
    if match := _GENERATOR.fullmatch(source.strip()):
        return _generate(source, match["module"], match["call"])
    if files := _files_meant(source):
        raise ValueError(f"data source {source!r} is {files}")
    kinds = (
        f"data source {source!r} is not a .parquet, .jsonl or .json file nor a generator written "
        "'pkg.module:function(name=value, ...)'"
    )
    path = Path(source)
    if path.suffix.lower() in (".gz", ".bz2", ".xz", ".zst", ".zip"):
        raise ValueError(f"{kinds}; unpack it first")
    if path.is_file():
        raise ValueError(f"{kinds}; write its rows as one of these, a line of JSON for each")
    if _LIKE_A_PATH.fullmatch(source):
        raise ValueError(
            f"{kinds}; of a data set of the Hugging Face hub, name a parquet file that you have "
            "downloaded"
        )
    raise ValueError(
        f"{kinds}. If these are prompts, write rows: data=[{{'prompt': {source!r:.60}}}, ...]"
    )


def _read_parquet(path: Path) -> Iterator[Any]:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pa.ArrowNotImplementedError as error:  # nested columns above 2 GB in one group of rows
        raise ValueError(
            f"{path} has a column that Arrow cannot read ({error}); write the file again in "
            "smaller groups of rows, pyarrow.parquet.write_table(..., row_group_size=1000)"
        ) from error
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # with a mark of byte order, or without
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error}); write it so") from error


def _read_json(path: Path) -> list[Any]:
    try:
        found = json.loads(_text(path))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a row a line, whatever the file is called
            return _read_jsonl(path)
        raise ValueError(f"{path}, line {error.lineno}: malformed JSON: {error.msg}") from error
    return found if isinstance(found, list) else [found]


def _read_jsonl(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: malformed JSON: {error.msg}") from error
    return rows


_READERS: dict[str, Callable[[Path], Iterable[Any]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
}


def _generate(source: str, module_name: str, call: str) -> Iterator[Any]:
    function_name, arguments = parse_call(f"data source {source!r}", call)
    function = _find_function(source, module_name, function_name)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"data source {source!r}: {error}; the signature is "
            f"{function_name}{inspect.signature(function)}"
        ) from error
    return _given_by(source, function, arguments)


def _given_by(
    source: str, function: Callable[..., Any], arguments: Mapping[str, Any]
) -> Iterator[Any]:
    try:
        yield from function(**arguments)
    except (ValueError, ImportError):
        raise
    except Exception as error:
        where = place_of(error, function)
        raise ValueError(
            f"data source {source!r} raised {type(error).__name__}: {error} ({where})"
        ) from error


def _find_function(source: str, module_name: str, function_name: str) -> Callable[..., Any]:
    try:
        module = import_named(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"data source {source!r}: there is no module {error.name!r}; install it, or start in "
            "the folder that has it"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        near = difflib.get_close_matches(function_name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"data source {source!r}: module {module_name!r} has no function "
            f"{function_name!r}{hint}"
        )
    return function


# ---- rows ----------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Rid a value of numpy types, so that extras can be compared, pickled and logged."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value


def _prompt_row(row: dict[str, Any]) -> dict[str, Any]:
    if "prompt" not in row:
        raise BadRow(f"no 'prompt'; the columns are {sorted(map(str, row))}")
    if row["prompt"] is None:
        raise BadRow("the prompt is null")
    if not isinstance(row.get("env_class"), str | None):
        raise BadRow(f"env_class is not a string: {row['env_class']!r}")
    if isinstance(spec := row.get("reward_spec"), dict):
        truth = spec.get("ground_truth")
        if isinstance(truth, float) and math.isnan(truth):  # how pandas says that there is none
            row = {**row, "reward_spec": {**spec, "ground_truth": None}}
    return {**row, "prompt": messages_of(row["prompt"], "prompt")}
