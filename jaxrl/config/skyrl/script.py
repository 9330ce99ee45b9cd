"""What a run script would start: bash evaluates it with nothing to run and nowhere to write."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

_TOOLS = "basename cat cut dirname expr head id nproc realpath seq tail tr wc"  # they only read
_SECONDS = 10.0
_WORD, _END = "\x1f", "\x1e"

# A restricted shell runs no program by path and writes no file. Here every program but _TOOLS is
# unknown, and reported with its arguments; ${unset:?text} is what still writes to stderr.
_PRELUDE = r"""
command_not_found_handle() {
  set +x
  local word words=$'\037'
  for word in "$@"; do words+="$word"$'\037'; done
  ( : "${_jaxrl_unset_:?$words$'\036'}" ) || return 0
}
exec() { "$@"; exit 0; }
cd() { :; }
date() { printf "%(${1#+})T\n" -1; }
enable -n kill
"""
_CONFIG_KEY = re.compile(r"\+{0,2}(data|trainer|generator|environment)\.[\w.]+=")
_REDIRECTIONS = re.compile(
    r"""(?x) \s [0-9]? >& [0-9] \b                              # 2>&1
    | (?<=\s) [&0-9]? >>? \s* (?: "[^"\n]*" | '[^'\n]*' | [^\s()&|;<>"'=]+ ) (?= [\s)|;] | $ )"""
)


class ScriptRun(NamedTuple):
    """Hold what a run script starts.

    Attributes:
        command: words of the first command with config keys, ["uv", "run", "-m", "skyrl...",
            "trainer.seed=1"].
        not_run: names of other programs that it calls, in case their output matters.
        more_runs: number of further commands with config keys.
    """

    command: list[str]
    not_run: list[str]
    more_runs: int


def read_script(text: str, args: list[str], path: str = "script") -> ScriptRun:
    """Return the command that a run script would start.

    Variables, conditions and arrays are evaluated.

    Args:
        text: of the script.
        args: its own arguments, its `$@`; the environment is this process's.
        path: its `$0`.

    Raises:
        ValueError: it starts no command with config keys; the message says what it did.
    """
    if (bash := shutil.which("bash")) is None:
        raise ValueError(
            "run scripts are evaluated by bash, which is not installed; give key=value"
        )
    with tempfile.TemporaryDirectory() as folder:
        for tool in _TOOLS.split():
            if (found := shutil.which(tool)) is not None:
                (Path(folder) / tool).symlink_to(found)
        env = {k: v for k, v in os.environ.items() if k not in ("BASH_ENV", "ENV", "SHELLOPTS")}
        command = [bash, "--noprofile", "--norc", "--restricted", "-c"]
        text = _REDIRECTIONS.sub(" ", text).replace("BASH_SOURCE[0]", "0")  # unset with -c
        command += [_PRELUDE + text, path, *args]
        try:
            done = subprocess.run(
                command,
                env=env | {"PATH": folder},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_SECONDS,
                check=False,
                text=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(
                f"{path}: not done after {_SECONDS:.0f} s; give its arguments as key=value"
            ) from error
    calls = [c.split(_WORD)[1:-1] for c in done.stderr.split(_END)[:-1]]
    runs = [c for c in calls if any(_CONFIG_KEY.match(word) for word in c)]
    if not runs:
        said = (done.stderr.split(_END)[-1] + done.stdout).strip().splitlines()[-3:]
        called = ", ".join(c[0] for c in calls) or "nothing"
        raise ValueError(
            f"{path}: starts no command with arguments like trainer.seed=1 (it calls {called}; "
            f"exit status {done.returncode}){': ' + ' | '.join(said) if said else ''}"
        )
    return ScriptRun(runs[0], sorted({c[0] for c in calls if c not in runs}), len(runs) - 1)
