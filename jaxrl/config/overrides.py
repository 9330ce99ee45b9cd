"""Typed overrides "a.b=c", from the command line or as a dict."""

import copy
import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any, cast

from jaxrl.config.dataclass_config import (
    BaseConfig,
    Config,
    Text,
    check_field,
    config_class,
    convert_field,
    field_types,
    holds_dict,
    is_config,
    parse_literal,
)
from jaxrl.config.generator import InferenceEngineConfig
from jaxrl.config_error import fail

_USAGE = "quickstart --config.trainer.seed=1, with the name or the file of a recipe"


def apply_overrides(config: Config, overrides: dict[str, Any]) -> Config:
    """Return a copy of `config` with values set by dotted key.

    A string is read as on the command line: by the type of its field. A dict for a sub-config is
    merged into it; a dict for a dict-typed field replaces it, and `dict_field.key` sets one key.

    Args:
        config: any config; keys are relative to it.
        overrides: {"trainer.seed": "1", "generator.sampling_params": {"top_p": 0.9}}.

    Raises:
        ValueError: unknown key or wrong type; the message has the dotted path and the fix.
    """
    config = copy.deepcopy(config)
    for key, value in overrides.items():
        if key.startswith("+"):
            raise ValueError(
                f"'{key}': a leading '+' cannot add config fields. Set '{key.lstrip('+')}', or "
                "derive a config class with your own field (docs/configuration.md)"
            )
        typed = Text(value) if isinstance(value, str) else value
        config = _with_value(config, current_name(key, config).split("."), typed, "")
    return config


def parse_assignments(args: list[str]) -> dict[str, str]:
    """Parse ["a.b=c"] into {"a.b": "c"}.

    Raises:
        ValueError: no "=" in an argument.
    """
    pairs = {}
    for arg in args:
        key, equals, value = arg.partition("=")
        if not equals:
            raise ValueError(f"'{arg}': expected key.path=value, e.g. trainer.seed=1")
        pairs[key.strip()] = value
    return pairs


def parse_command_line(argv: list[str], fields: Iterable[str] = ()) -> tuple[str, dict[str, str]]:
    """Return the recipe and overrides of a command line, `--flag=value` or `--flag value`.

    `--config=RECIPE` is RECIPE alone.

    Args:
        argv: the arguments without the program's name.
        fields: of the config, by dotted name; an error names those that may have been meant.

    Returns:
        the recipe, a name or a file, and {"trainer.seed": "1"} for --config.trainer.seed=1.

    Raises:
        ValueError: unknown flag, a flag without a value, or no --config.
    """
    path, bare, overrides, words = "", "", {}, list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if not path and not word.startswith("-") and not equals:
            path = bare = word
            continue
        if flag != "--config" and not flag.startswith("--config."):
            key = flag.lstrip("-+")
            near = [name for name in fields if name.endswith(f".{key.replace('-', '_')}")]
            flags = [f"--config.{name}={value or '<value>'}" for name in near[:3]]
            fix = f"write --config.{key}={value or '<value>'}" if "." in key else f"usage: {_USAGE}"
            fix = f"did you mean {' or '.join(flags)}?" if flags else fix
            if not word.startswith("-") and not equals:
                fix = f"the recipe is {path} already"
            raise ValueError(f"unknown argument '{word}': {fix}")
        if not equals:
            if not words or words[0].startswith("--"):
                raise ValueError(f"{flag} has no value: write {flag}=<value>")
            value = words.pop(0)
        if flag == "--config" and bare:
            raise ValueError(f"--config={value}: the recipe is {bare} already; leave one out")
        if flag == "--config":
            path = value
        else:
            overrides[flag.removeprefix("--config.")] = value
    if not path:
        raise ValueError(f"no recipe given: usage: {_USAGE}")
    return path, overrides


def _with_value(config: Config, keys: list[str], value: Any, path: str) -> Config:
    """Return a shallow copy of `config` with the field at `keys` set."""
    name, rest = keys[0], keys[1:]
    check_field(type(config), name, path)
    path = f"{path}.{name}" if path else name
    kind = field_types(type(config))[name]
    current = getattr(config, name)
    sub_config = config_class(kind)
    if rest and current is None and sub_config is not None:
        current = sub_config()
    if not rest:
        new = convert_field(type(config), name, value, path, current)
    elif is_config(current):
        new = _with_value(current, rest, value, path)
    elif isinstance(current, dict) or holds_dict(kind):
        new = _with_key(cast(dict, current or {}), rest, value, path)
    else:
        raise ValueError(f"{path}.{'.'.join(rest)}: {path} is a value, it has no fields")
    return dataclasses.replace(cast(Any, config), **{name: new})


def _with_key(values: dict[str, Any], keys: list[str], value: Any, path: str) -> dict[str, Any]:
    name, rest = keys[0], keys[1:]
    if not rest:
        return values | {name: parse_literal(value) if isinstance(value, Text) else value}
    inner = values.get(name, {})
    if not isinstance(inner, dict):
        fail(f"{path}.{name}", inner, f"it is a value, it has no key '{rest[0]}'")
    return values | {name: _with_key(inner, rest, value, f"{path}.{name}")}


def current_name(key: str, config: BaseConfig) -> str:
    """Return the key itself, or where SkyRL's older flat `generator.<engine field>` went."""
    prefix, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    generator = getattr(config, "generator", None)
    if prefix != "generator" or generator is None or name in field_types(type(generator)):
        return key
    if name not in field_types(InferenceEngineConfig):
        return key
    new = f"generator.inference_engine.{rest}"
    warnings.warn(f"config field '{key}' is now '{new}'", stacklevel=3)
    return new
