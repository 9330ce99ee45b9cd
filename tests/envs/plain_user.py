"""Runs programs in the sandbox of a user without rights, whoever runs the tests.

As root: in a Python of its own that gave root up, from a copy of the modules that the user may
read. They need no package, so any Python can run them.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from jaxrl.envs.sandbox import sandbox

_SCRIPT = """
import dataclasses, json, os, sys
sys.path.insert(0, os.getcwd())
from jaxrl.envs.sandbox import sandbox
given = json.load(sys.stdin)
sandbox._ENVIRONMENT["MARK"] = given["mark"]
try:
    sandbox.require()
    result = sandbox.run(given["code"], given["stdin"], sandbox.Limits(**given["limits"]))
    print(json.dumps(dataclasses.asdict(result)))
except sandbox.SandboxError as error:
    print(json.dumps(str(error)))
"""
_USER = {"user": 65534, "group": 65534, "extra_groups": []}


def run(code: str, stdin: str, limits: sandbox.Limits, mark: str) -> sandbox.Result:
    """Runs a program as `sandbox.run` does; its processes have `mark` in their environment."""
    if os.getuid() != 0:
        return sandbox.run(code, stdin, limits)
    python = _python()
    if python is None:
        raise sandbox.SandboxError("no Python of this machine may be started by other users")
    with tempfile.TemporaryDirectory(prefix=mark) as folder:
        package = Path(folder, "jaxrl", "envs", "sandbox")
        package.mkdir(parents=True)
        for name in ("sandbox.py", "jail.py", "seccomp.py"):
            shutil.copy(Path(sandbox.__file__).with_name(name), package / name)
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)
        given = {"code": code, "stdin": stdin, "limits": asdict(limits), "mark": mark}
        said = json.loads(_start(python, _SCRIPT, folder, json.dumps(given)))
    if isinstance(said, str):
        raise sandbox.SandboxError(said)
    return sandbox.Result(**said)


@functools.cache
def refused() -> str:
    """Return why this machine has no sandbox for such a user; empty if it has one."""
    try:
        run("", "", sandbox.Limits(), "asked")
    except sandbox.SandboxError as error:
        return str(error)
    return ""


@functools.cache
def _python() -> str | None:
    new_enough = "import sys; print(sys.version_info >= (3, 11))"
    ours = sys._base_executable  # type: ignore[attr-defined]
    for python in (ours, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            if _start(python, new_enough, "/", "") == "True\n":
                return python
        except (OSError, subprocess.CalledProcessError):
            pass  # it is not there, or lies where only root may look
    return None


def _start(python: str, script: str, folder: str, stdin: str) -> str:
    command = [python, "-I", "-B", "-c", script]
    options = {"cwd": folder, "env": {}, "input": stdin, "text": True, "timeout": 120} | _USER
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, **options).stdout
