"""Recipes: Python files whose `get_config()` returns the config of a run."""

import copy
import difflib
import importlib.util
import re
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FieldReference

from jaxrl.config.dataclass_config import (
    BaseConfig,
    TakesObjects,
    checked,
    field_markers,
    field_types,
    field_values,
    flatten,
    get_config_as_dict,
    is_config,
    is_union,
)
from jaxrl.config.given import Rows
from jaxrl.config.overrides import apply_overrides, parse_command_line
from jaxrl.config.train_config import TrainConfig
from jaxrl.config.trainer import run_folder
from jaxrl.functions import RECIPE, place_of

# Where they are without a folder `configs` here: around the package, if that is a checkout; where
# the wheel puts them, for which `pip install --user` has a folder of its own.
_PACKAGE = Path(__file__).resolve().parents[1]
_CHECKOUT = _PACKAGE.parent
_BASES = (sysconfig.get_path("data"), site.getuserbase())
INSTALLED = (
    *([_CHECKOUT / "configs"] if (_CHECKOUT / "pyproject.toml").is_file() else []),
    *(Path(base, "share", "jaxrl", "configs") for base in _BASES),
)

_loading: list[Path] = []  # the recipes that are being run, one within the other
_READ_EARLY: dict[tuple[str, ...], TrainConfig] = {}  # by the words


def default_config(config_cls: type[TrainConfig] = TrainConfig) -> ConfigDict:
    """Return all fields with their defaults, locked: a wrong name or type is an error.

    Dict-typed fields such as policy_loss_kwargs take new keys.

    Args:
        config_cls: your own class, if you have one; then return
            `config_cls.from_dict_config(config)` from `get_config()`.

    Example:
        def get_config():
            config = default_config()
            config.trainer.seed = 1
            return config
    """
    config = config_cls()
    result = _config_dict(config).lock()
    _unlock_dict_fields(result, config)
    return result


def to_train_config(config: Any, config_cls: type[TrainConfig] = TrainConfig) -> TrainConfig:
    """Make the TrainConfig of a run from a TrainConfig (copied), a ConfigDict or a nested dict.

    Functions and classes in it become their paths; rows of data become a file of the run folder.

    Raises:
        ValueError: unknown key or wrong type, or an object that no name leads to.
    """
    result = with_row_files(config, config_cls)
    write_row_files(result)
    return result


def with_row_files(config: Any, config_cls: type[TrainConfig] = TrainConfig) -> TrainConfig:
    """Make what `to_train_config` makes; `write_row_files` writes the files of the rows."""
    result = converted(config, config_cls)
    folder = run_folder(result.trainer) / "data"
    _replace_rows(result, lambda rows: rows.placed(folder))
    return result


def write_row_files(config: TrainConfig) -> None:
    """Write the rows that a config holds to the files of their names, and hold the names alone.

    A script's rows may name code. Where these do, the config says so to whoever reads the files,
    unless others' files are among them, which it must not speak for.
    """
    sources = [*config.data.train_data, *config.data.val_data]
    if _rows_name_code(sources, config.environment.env_class):
        config.environment.rows_may_name_code = True
    _replace_rows(config, Rows.written)


def _rows_name_code(sources: Sequence[str], named: str) -> bool:
    """Return whether a script's rows, the only ones that will be read from files, name code."""
    rows = [row for source in sources if isinstance(source, Rows) for row in source.read()]
    if not rows:
        return False
    from jaxrl.data.prompts import is_file  # here: as in `environment.check_environment`
    from jaxrl.envs import code_of

    chosen = (code_of(str(row.get("env_class") or named), row, named) for row in rows)
    return not any(map(is_file, sources)) and any(chosen)


def _replace_rows(config: TrainConfig, new: Callable[[Rows], str]) -> None:
    for name in ("train_data", "val_data"):
        sources = getattr(config.data, name)
        setattr(config.data, name, [new(x) if isinstance(x, Rows) else x for x in sources])


def converted(config: Any, config_cls: type[TrainConfig] = TrainConfig) -> TrainConfig:
    """Make what `to_train_config` makes, and write nothing: fields may still change."""
    if isinstance(config, TrainConfig):
        return checked(config)
    return config_cls.from_dict_config(config)


def read_early(words: Sequence[str]) -> None:
    """Read a command line before the long imports; the next `read_command_line` of it takes that.

    So a recipe runs once: it may make a folder, or register an environment.
    """
    _READ_EARLY[tuple(words)] = read_command_line(words)


def read_command_line(words: Sequence[str] | None = None) -> TrainConfig:
    """Return the config of a command line: a recipe, and every `--config.a.b=value` over it.

    Args:
        words: None = the arguments of this process.

    Raises:
        ValueError: see `parse_command_line`, `load_config_file` and `apply_overrides`.
    """
    words = sys.argv[1:] if words is None else words
    if (already := _READ_EARLY.pop(tuple(words), None)) is not None:
        return already
    path, overrides = parse_command_line(list(words), flatten(TrainConfig()))
    return apply_overrides(load_config_file(path), overrides)


def recipe_files() -> dict[str, Path]:
    """Return name -> file of the recipes in `configs/`, then of those that came with jaxrl."""
    places = (Path("configs"), *INSTALLED)
    files = [file for place in places for file in sorted(place.glob("*.py"))]
    return {file.stem: file for file in reversed(files)}  # of equal names the first counts


def installed_recipe(name: str) -> str:
    """Return the file of a recipe that came with jaxrl, whatever `configs/` is here."""
    files = [place / f"{name}.py" for place in INSTALLED]
    return str(next(file for file in files if file.is_file()))


def _recipe_file(recipe: str) -> Path:
    """Return the file of a recipe, from its name or path.

    Raises:
        ValueError: there is none; names those that are spelt nearly so.
    """
    file = Path(recipe)
    if file.is_file():
        return file
    named = recipe_files()
    if file.parent in (Path(), Path("configs")) and file.suffix in ("", ".py"):
        if file.stem in named:
            return named[file.stem]
        near = difflib.get_close_matches(file.stem, named, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; `jaxrl recipes` lists them"
    else:
        hint = ""
    what = "no such file" if file.suffix else "no recipe of this name"
    raise ValueError(f"recipe {recipe}: {what} (working directory {Path.cwd()}){hint}")


def load_config_file(recipe: str) -> TrainConfig:
    """Return the config of a recipe: run the file and call its `get_config()`.

    Args:
        recipe: a file, or a name such as quickstart, of `configs/` or of what came with jaxrl;
            `configs/quickstart.py` is found without a clone, too.

    Raises:
        ValueError: no such file, no `get_config` in it, or not a config that it returned.
    """
    file = _recipe_file(recipe)
    place = file.resolve()
    if place in _loading:
        raise ValueError(
            f"recipe {recipe}: it loads itself ({place}); give it another name, or load another"
        )
    spec = importlib.util.spec_from_file_location(f"{RECIPE}{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"recipe {recipe}: not a Python file; a recipe is a .py file")
    module = importlib.util.module_from_spec(spec)
    # @dataclass looks its module up there, should the recipe define a config class.
    sys.modules[spec.name] = module
    _loading.append(place)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ValueError(f"recipe {recipe}: the file defines no function get_config()")
        config = module.get_config()
    except Exception as error:
        if isinstance(error, ValueError) and _is_ours(error):
            raise  # says what is wrong by itself
        raise _explained(recipe, error) from error
    finally:
        _loading.pop()
    try:
        return converted(config)  # overrides may name another run, whose rows they are
    except ValueError as error:
        raise ValueError(f"recipe {recipe}: {error}") from error


def _is_ours(error: Exception) -> bool:
    """Return whether jaxrl itself raised an error."""
    return Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(_PACKAGE)


def _explained(path: str, error: Exception) -> ValueError:
    """Return what a recipe raised with its line.

    Of an unknown field or a wrong type it is what ml_collections says of it, without its list of
    all other fields.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if "ml_collections" not in frames[-1].filename:
        place = place_of(error)
        where = f" ({place})" if place else ""
        return ValueError(f"recipe {path} raised {type(error).__name__}: {error}{where}")
    line = next(frame for frame in reversed(frames) if "ml_collections" not in frame.filename)
    text = str(error).replace("\\n", "\n").replace("\\'", "'")  # some are a repr in a repr
    problem = text.partition(" Other fields present")[0].partition("\n")[0].strip("'\". ")
    near = re.search(r'Did you mean "(\w+)"', text)
    hint = f" Did you mean '{near[1]}'?" if near else ""
    if unknown := re.match(r'Key "(\w+)" does not exist', problem):
        problem = f"there is no field '{unknown[1]}' there"
        elsewhere = [name for name in flatten(TrainConfig()) if name.endswith(f".{unknown[1]}")]
        if elsewhere and not near:
            hint = f" Did you mean '{elsewhere[0]}'?"
    where = f"recipe {path}, line {line.lineno}, `{line.line}`"
    return ValueError(f"{where}: {problem}.{hint}")


def _config_dict(config: BaseConfig) -> ConfigDict:
    result = ConfigDict()
    kinds, markers = field_types(type(config)), field_markers(type(config))
    for name, value in field_values(config).items():
        takes_objects = any(isinstance(marker, TakesObjects) for marker in markers[name])
        if is_config(value):
            result[name] = _config_dict(value)
        elif isinstance(value, dict):
            result[name] = ConfigDict(get_config_as_dict(value), type_safe=False)
        elif (is_union(kinds[name]) and value is not None) or takes_objects:
            # ml_collections would insist on the type of the default.
            result[name] = FieldReference(copy.deepcopy(value), field_type=object)
        else:
            result[name] = copy.deepcopy(value)
    return result


def _unlock_dict_fields(result: Any, config: BaseConfig) -> None:
    for name, value in field_values(config).items():
        if is_config(value):
            _unlock_dict_fields(result[name], value)
        elif isinstance(value, dict):
            result[name].unlock()
