"""Write a recipe from SkyRL's arguments, a run script or a YAML file, and say what became of each.

    python -m jaxrl.config.from_skyrl trainer.algorithm.advantage_estimator="grpo" trainer.epochs=2
    python -m jaxrl.config.from_skyrl --output configs/mine.py run_gsm8k.sh trainer.epochs=2
    python -m jaxrl.config.from_skyrl --devices 8 config.yaml

A script is read as text and nothing of it is run: variables, arrays, sums, comparisons and the
environment count, and a setting whose value only the run itself knows, such as `$(nproc)`, is named
and left out. Arguments after a script are its own, but for --output and --devices, and settings
among them count last.
Without --output the recipe is printed; --devices: how many it shall be valid on, default SkyRL's.
Exit status: 0; 1 something that changes the run was left out; 2 the input cannot be read.
"""

from jaxrl import cli

if __name__ == "__main__":
    cli.answer_early(__doc__)

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxrl.config.skyrl.conversion import Conversion, convert
from jaxrl.config.skyrl.names import EntryPoint, entry_point
from jaxrl.config.skyrl.recipe_file import recipe_text
from jaxrl.config.skyrl.script import read_script
from jaxrl.files import replace_text

_ARGUMENT = re.compile(r"\+{0,2}[a-z]\w*(\.\w+)+=", re.IGNORECASE)
_WRAPPED = textwrap.TextWrapper(
    100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
)


def from_command(words: Sequence[str], num_devices: int | None = None) -> Conversion:
    """Convert a command: `uv run -m skyrl... key=value ...`, or key=value alone.

    Raises:
        ValueError: it does not train, or a word is no setting.
    """
    start = next((i for i, word in enumerate(words) if _ARGUMENT.match(word)), 0)
    settings = {}
    for word in words[start:]:
        key, equals, value = word.partition("=")
        if not _ARGUMENT.match(f"{key}{equals}"):
            fix = (
                f"; a variable of the script stands before the command: {word} jaxrl from-skyrl ..."
            )
            fix = fix if key.isidentifier() and equals else ""
            raise ValueError(f"{word!r}: expected key.path=value, e.g. trainer.seed=1{fix}")
        settings[key] = value
    module, entry = entry_point(list(words))
    return convert(settings, module=module, entry=entry, num_devices=num_devices)


def from_script(path: Path, args: Sequence[str], num_devices: int | None = None) -> Conversion:
    """Convert the run that a script starts, or a script that it calls.

    Raises:
        ValueError: it starts none, or calls a script that is not there.
    """
    run = read_script(path.read_text(encoding="utf-8"), list(args), str(path))
    shell, *rest = run.command
    if shell in ("bash", "sh") and rest and rest[0].endswith(".sh"):
        if lost := [line for line in run.unknown if not _ARGUMENT.match(f"{line.split(':')[0]}=")]:
            raise ValueError(f"{path}: an argument of {rest[0]} is no key=value: {lost[0]}")
        result = from_script(_called_script(path, rest[0]), rest[1:], num_devices)
    else:
        result = from_command(run.command, num_devices)
    result.refused += run.unknown
    result.changed += run.notes
    return result


def from_yaml(path: Path, args: Sequence[str], num_devices: int | None = None) -> Conversion:
    """Convert a config in YAML, with `key=value` over it.

    Raises:
        ValueError: no mapping, or an interpolation.
    """
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not a mapping of config groups")
    settings = _flat(values, "")
    if wrong := [k for k, v in settings.items() if isinstance(v, str) and "${" in v]:
        raise ValueError(f"{path}: {wrong[0]}={settings[wrong[0]]}: write the value out")
    settings |= {name: value for name, _, value in (word.partition("=") for word in args)}
    return convert(settings, module="", entry=EntryPoint({}), num_devices=num_devices)


@cli.command(__doc__, bare=cli.REFUSED, help_first=True, mendable=(*cli.MENDABLE, yaml.YAMLError))
def main(argv: Sequence[str]) -> int:
    """Convert, write, report; see the module's docstring for the exit status."""
    arguments = cli.Arguments()  # any other option is of what is converted
    arguments.add_argument("--output")
    arguments.add_argument("--devices", type=int)
    options, args = arguments.parse_known_args(argv)
    if not args:
        arguments.error("nothing to convert")
    result = _read(args, options.devices)
    source = args[0] if Path(args[0]).is_file() else "arguments"
    notes = [f"{result.verdict[0].upper()}{result.verdict[1:].removesuffix('.')}."]
    if left := [line.partition(": ")[0] for line in result.refused]:
        notes.append(
            "Left out, as `python -m jaxrl.config.from_skyrl` explains: " + ", ".join(left)
        )
    notes = [_WRAPPED.fill(note) for note in notes]
    text = recipe_text(result.config, source, options.output or "FILE.py", notes, result.named)
    if options.output:
        replace_text(Path(options.output), text)
    else:
        print(text)
    _report(result, sys.stdout if options.output else sys.stderr)
    return cli.FAILED if result.refused or result.problem else cli.DONE


def _read(args: list[str], num_devices: int | None) -> Conversion:
    path, rest = Path(args[0]), args[1:]
    if path.suffix in (".yaml", ".yml"):
        return from_yaml(path, rest, num_devices)
    if path.suffix == ".sh" or path.is_file():
        return from_script(path, rest, num_devices)
    return from_command(args, num_devices)


def _called_script(path: Path, name: str) -> Path:
    """Find a script that another one calls, by a path from where that is to be started."""
    for folder in (Path.cwd(), *path.resolve().parents):
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"{path} calls {name}, which is not there; convert that, or start it there")


def _flat(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _report(result: Conversion, out: Any) -> None:
    home = os.path.expanduser("~")
    names = [line.partition("=")[0] for line in result.taken]
    print(_WRAPPED.fill(f"taken as they are ({len(names)}): {', '.join(names)}"), file=out)
    if result.written_out:
        written = ", ".join(result.written_out)
        print(_WRAPPED.fill(f"SkyRL's defaults, written out: {written}"), file=out)
    groups = (
        ("changed", result.changed),
        ("without effect", result.inert),
        ("left out: the run is another one", result.refused),
    )
    for title, lines in groups:
        print(f"{title} ({len(lines)})", file=out)
        for line in lines:
            print(f"  {line.replace(home, '~')}", file=out)
    print(result.verdict, file=out)


if __name__ == "__main__":
    sys.exit(main())
