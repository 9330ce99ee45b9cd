"""`python` of the folder in which the commands of a page run: it cuts what would take long.

- A run of more than 5 steps (`jaxrl.train`, `jaxrl.sft`, `jaxrl.cluster.launch`, and scripts that
  take --config) is cut to 2, by an override behind all others.
- `.../global_step_160`, which such a run does not reach, is the last step that it did reach; on the
  command line and in the config.
- `jaxrl.serve` and `jaxrl.tinker` end when they say that they serve.

Everything else runs as it stands. `pip` does nothing here: tests/test_packaging.py installs.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.docs.pages import spelt_out

LONG, CUT = 5, 2  # steps
_RUNS = ("jaxrl.train", "jaxrl.sft", "jaxrl.cluster.launch")
_STEP = re.compile(r"([^\s=]*/global_step_)(\d+)")


def reached(text: str) -> str:
    """The text with the last step that there is, where it names one that there is not."""

    def newest(named: re.Match[str]) -> str:
        path = Path(named[0])
        steps = [p.name.removeprefix("global_step_") for p in path.parent.glob("global_step_*")]
        there = [int(step) for step in steps if step.isdecimal()]
        return named[0] if path.exists() or not there else f"{named[1]}{max(there)}"

    return _STEP.sub(newest, text)


def cut(config: Any) -> dict[str, Any]:
    """The overrides that make a run short, and go on from what others reached."""
    steps = config.trainer.max_training_steps
    overrides = {}
    if steps is None or not 0 < steps <= LONG:
        overrides["trainer.max_training_steps"] = CUT
    for role in ("policy", "ref", "critic"):
        path = getattr(config.trainer, role).model.path
        if path and reached(path) != path:
            overrides[f"trainer.{role}.model.path"] = reached(path)
    return overrides


def shortened(words: Sequence[str]) -> list[str]:
    """The arguments of `python` for a command of a page."""
    words = [reached(word) for word in words]
    flags = [word for word in words if re.match(r"--config[=.]", word)]
    if not flags or words[0] == "-m" and words[1] not in _RUNS:
        return words
    from jaxrl import config as cfg  # slow to import

    path, overrides = cfg.parse_command_line(flags)
    config = cfg.apply_overrides(cfg.load_config_file(path), overrides)
    return words + [f"--config.{name}={value}" for name, value in cut(config).items()]


def short_loader() -> Callable[[str], Any]:
    """`load_config_file`, for programs that train what it returns."""
    from jaxrl import config as cfg

    load = cfg.load_config_file

    def load_short(path: str) -> Any:
        config = load(path)
        return cfg.apply_overrides(config, cut(config))

    return load_short


def serve(command: Sequence[str]) -> int:
    """Start a server, wait until it says that it serves, interrupt it; its exit status."""
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            print(line, end="", flush=True)
            if line.startswith("serving ") and " at http" in line:
                server.send_signal(2)
        return server.wait(60)
    finally:
        server.kill()


def main(words: Sequence[str]) -> None:
    if words[:2] == ["-m", "jaxrl"]:
        words = spelt_out(list(words[2:]))
    command = [sys.executable, *shortened(words)]
    if {"jaxrl.serve", "jaxrl.tinker"} & set(words):
        sys.exit(serve(command))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
