"""Find the words that may stand at the end of a command line, without JAX: at each press of TAB."""

import re
from pathlib import Path

from jaxrl.__main__ import MODULES, usage
from jaxrl.config.dataclass_config import BaseConfig, config_class, field_types
from jaxrl.config.recipe import recipe_files
from jaxrl.config.train_config import TrainConfig

_FIELD, _RECIPE = "--config.", "--config="


def script(shell: str) -> str:
    """Return the script of a shell.

    Raises:
        ValueError: there is none for it.
    """
    folder = Path(__file__).parent / "scripts"
    known = sorted(file.suffix[1:] for file in folder.iterdir())
    if shell not in known:
        raise ValueError(f"no completion for {shell!r}; there is one for {', '.join(known)}")
    return (folder / f"jaxrl.{shell}").read_text(encoding="utf-8")


def completions(line: str) -> list[str]:
    """Return the words that may stand in place of the last one of a command line.

    A word that ends with "=" or "." goes on.

    Args:
        line: up to the cursor, with the program's name. Other commands and settings of the
            environment may stand before that: `cd x && A=1 jaxrl tr`.
    """
    before, _, last = re.split(r"[;&|]", line)[-1].rpartition(" ")
    words = before.split()
    programs = [i for i, word in enumerate(words) if Path(word).name == "jaxrl"]
    words = words[programs[0] :] if programs else words
    found = list(MODULES) if len(words) < 2 else _arguments(words[1], words[2:], last)
    return [word for word in found if word.startswith(last)]


def _arguments(command: str, words: list[str], last: str) -> list[str]:
    if command not in MODULES:
        return []
    text = usage(MODULES[command])
    flags = sorted({flag for flag in re.findall(r"--[a-z][a-z-]*", text) if flag != "--config"})
    if "--config=" not in text:
        recipes = sorted(recipe_files()) if command == "recipes" else []
        return [*recipes, *flags, "--help"]
    if last.startswith(_FIELD):
        return _fields(last.removeprefix(_FIELD))
    if last.startswith(_RECIPE):
        return [_RECIPE + name for name in sorted(recipe_files())]
    if last.startswith("-"):
        return [_RECIPE, _FIELD, *flags, "--help"]
    valued = {f"--{name}" for name in re.findall(r"--([a-z][a-z-]*)=", text)} - {"--config"}
    before = ["", *words]  # each word's, then the last one's
    given = [
        word
        for previous, word in zip(before, words, strict=False)
        if word.startswith(_RECIPE) or not (word.startswith("-") or previous in valued)
    ]
    return [] if given or before[-1] in valued else sorted(recipe_files())


def _fields(typed: str) -> list[str]:
    """Return the fields beside the one that is being typed: groups end in ".", others in "="."""
    groups = typed.split(".")[:-1]
    group: type[BaseConfig] | None = TrainConfig
    for name in groups:
        kind = field_types(group).get(name) if group else None
        group = config_class(kind) if kind is not None else None
    if group is None:
        return []
    path = "".join(f"{name}." for name in groups)
    kinds = field_types(group).items()
    return [f"{_FIELD}{path}{name}{'.' if config_class(kind) else '='}" for name, kind in kinds]
