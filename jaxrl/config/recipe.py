"""Recipes: Python files whose `get_config()` returns the config of a run."""

import copy
import difflib
import importlib.util
import re
import site
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FieldReference

from jaxrl.config.dataclass_config import (
    BaseConfig,
    checked,
    field_types,
    field_values,
    get_config_as_dict,
    is_config,
    is_union,
)
from jaxrl.config.overrides import apply_overrides, parse_command_line
from jaxrl.config.train_config import TrainConfig

# Where the wheel puts them; `pip install --user` has a folder of its own.
_BASES = (sysconfig.get_path("data"), site.getuserbase())
INSTALLED = tuple(Path(base, "share", "jaxrl", "configs") for base in _BASES)


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
    """Make a TrainConfig from a TrainConfig (copied), a ConfigDict or a nested dict.

    Raises:
        ValueError: unknown key or wrong type.
    """
    if isinstance(config, TrainConfig):
        return checked(config)
    return config_cls.from_dict_config(config)


def read_command_line(words: Sequence[str]) -> TrainConfig:
    """Return the config of a command line: `--config=FILE`, and every `--config.a.b=value` over it.

    Raises:
        ValueError: see `parse_command_line`, `load_config_file` and `apply_overrides`.
    """
    path, overrides = parse_command_line(list(words))
    return apply_overrides(load_config_file(path), overrides)


def load_config_file(path: str) -> TrainConfig:
    """Return the config of a recipe: run the file and call its `get_config()`.

    Args:
        path: of the file; `configs/quickstart.py` and its like are found without a clone, too.

    Raises:
        ValueError: no such file, no `get_config` in it, or not a config that it returned.
    """
    file, hint = Path(path), ""
    if not file.is_file() and file.parent == Path("configs"):
        bases = reversed(INSTALLED)  # of equal names the first base has it
        installed = {found.name: found for base in bases for found in base.glob("*.py")}
        near = difflib.get_close_matches(file.name, installed, n=3)
        hint = f"; did you mean configs/{' or configs/'.join(near)}?" if near else ""
        file = installed.get(file.name, file)
    if not file.is_file():
        raise ValueError(f"--config={path}: no such file (working directory {Path.cwd()}){hint}")
    spec = importlib.util.spec_from_file_location(f"jaxrl_recipe_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"--config={path}: not a Python file; a recipe is a .py file")
    module = importlib.util.module_from_spec(spec)
    # @dataclass looks its module up there, should the recipe define a config class.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"--config={path}: the file defines no function get_config()")
    try:
        config = module.get_config()
    except (AttributeError, KeyError, TypeError) as error:
        _explain(path, error)
        raise
    try:
        return to_train_config(config)
    except ValueError as error:
        raise ValueError(f"--config={path}: {error}") from error


def _explain(path: str, error: Exception) -> None:
    """Raise ValueError with the line of the recipe that sets an unknown field or a wrong type.

    It says what ml_collections says of it, without its list of all other fields.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if "ml_collections" not in frames[-1].filename:
        return
    line = next(frame for frame in reversed(frames) if "ml_collections" not in frame.filename)
    text = str(error).replace("\\n", "\n").replace("\\'", "'")  # some are a repr in a repr
    problem = text.partition(" Other fields present")[0].partition("\n")[0].strip("'\". ")
    near = re.search(r'Did you mean "(\w+)"', text)
    hint = f" Did you mean '{near[1]}'?" if near else ""
    where = f"--config={path}, line {line.lineno}, `{line.line}`"
    raise ValueError(f"{where}: {problem}.{hint}") from error


def _config_dict(config: BaseConfig) -> ConfigDict:
    result = ConfigDict()
    kinds = field_types(type(config))
    for name, value in field_values(config).items():
        if is_config(value):
            result[name] = _config_dict(value)
        elif isinstance(value, dict):
            result[name] = ConfigDict(get_config_as_dict(value), type_safe=False)
        elif is_union(kinds[name]) and value is not None:
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
