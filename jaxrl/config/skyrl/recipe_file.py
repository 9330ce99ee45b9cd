"""A recipe as text: what was named, and what else differs from the defaults."""

import os
from collections.abc import Collection
from typing import Any

from jaxrl.config.dataclass_config import field_values, get_config_as_dict, is_config
from jaxrl.config.train_config import TrainConfig

_HEAD = '''r"""Converted from SkyRL: {source}.

    python -m jaxrl.train --config={path}
{notes}"""

from jaxrl.config import default_config


def get_config():
    config = default_config()
'''


def recipe_text(
    config: TrainConfig, source: str, path: str, notes: list[str], named: Collection[str] = ()
) -> str:
    """Return the text of a recipe.

    Args:
        config: not resolved.
        source: what it was converted from.
        path: of the file, for its header.
        notes: lines of the header, e.g. what was left out.
        named: keys to write even where the value is the default's.
    """
    lines = []
    for key, value in _written(config, TrainConfig(), "", named):
        group, _, name = key.partition(".")
        short = f"{group}.{name}" if group in ("trainer", "generator") else f"config.{key}"
        lines.append((group, f"    {short} = {_literal(_tilde(key, value))}\n"))
    text = _HEAD.format(source=source, path=path, notes="".join(f"\n{n}\n" for n in notes))
    seen = set()
    for group, line in lines:
        if group in ("trainer", "generator") and group not in seen:
            text += f"\n    {group} = config.{group}\n"
        seen.add(group)
        text += line
    return text + "    return config\n"


def _written(
    config: Any, default: Any, prefix: str, named: Collection[str]
) -> list[tuple[str, Any]]:
    """Return dotted key and value of what is named or differs, in the order of the schema."""
    found = []
    for name, value in field_values(config).items():
        other = getattr(default, name)
        if is_config(value) and is_config(other):
            found += _written(value, other, f"{prefix}{name}.", named)
        elif is_config(value):
            plain, usual = get_config_as_dict(value), get_config_as_dict(type(value)())
            found.append((prefix + name, {k: v for k, v in plain.items() if v != usual[k]}))
        elif value != other or prefix + name in named:
            found.append((prefix + name, value))
    return found


def _tilde(key: str, value: Any) -> Any:
    """Write the home folder as `~`, where a run expands it."""
    home = os.path.expanduser("~") + "/"
    if isinstance(value, list):
        return [_tilde(key, v) for v in value]
    expands = key.startswith("data.") or key.endswith(("_path", "model.path"))
    if isinstance(value, str) and value.startswith(home) and expands:
        return "~/" + value.removeprefix(home)
    return value


def _literal(value: Any) -> str:
    """Write a value as `repr` does, but with the double quotes of formatted code."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(k)}: {_literal(v)}' for k, v in value.items())}}}"
    shown = repr(value)
    plain = isinstance(value, str) and shown == f"'{value}'"
    return f'"{value}"' if plain and '"' not in value else shown
