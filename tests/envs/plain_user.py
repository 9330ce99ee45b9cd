"""Runs programs in the sandbox of a user without rights, whoever runs the tests.

As root: in a Python of its own that gave root up, from a copy of the modules that the user may
read. They need no package, so any Python can run them.
"""

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path

from jaxrl.envs.sandbox import sandbox

_SCRIPT = """
import dataclasses, json, os, sys
sys.path.insert(0, os.getcwd())
from jaxrl.envs.sandbox import sandbox
for line in sys.stdin:
    given = json.loads(line)
    sandbox._ENVIRONMENT["MARK"] = given["mark"]
    try:
        sandbox.require()
        result = sandbox.run(given["code"], given["stdin"], sandbox.Limits(**given["limits"]))
        said = dataclasses.asdict(result)
    except sandbox.SandboxError as error:
        said = str(error)
    print(json.dumps(said), flush=True)
"""
_USER = {"user": 65534, "group": 65534, "extra_groups": []}


def run(code: str, stdin: str, limits: sandbox.Limits, mark: str) -> sandbox.Result:
    """Runs a program as `sandbox.run` does; its processes have `mark` in their environment."""
    if os.getuid() != 0:
        return sandbox.run(code, stdin, limits)
    given = {"code": code, "stdin": stdin, "limits": asdict(limits), "mark": mark}
    process = _process(mark)
    too_late = threading.Timer(120, process.kill)
    too_late.start()
    try:
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        said = json.loads(process.stdout.readline())
    finally:
        too_late.cancel()
    if isinstance(said, str):
        raise sandbox.SandboxError(said)
    return sandbox.Result(**said)


@functools.cache
def _process(mark: str) -> subprocess.Popen:
    """One for all programs of a mark: it asks once whether the machine holds them."""
    python = _python()
    if python is None:
        raise sandbox.SandboxError("no Python of this machine may be started by other users")
    folder = tempfile.mkdtemp(prefix=mark)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    package = Path(folder, "jaxrl", "envs", "sandbox")
    package.mkdir(parents=True)
    for name in ("sandbox.py", "jail.py", "seccomp.py"):
        shutil.copy(Path(sandbox.__file__).with_name(name), package / name)
    for path in (Path(folder), *Path(folder).rglob("*")):
        path.chmod(0o755)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(_command(python, _SCRIPT), **pipes, **_options(folder))
    atexit.register(process.kill)
    return process


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
    options = _options(folder) | {"input": stdin, "timeout": 120}
    command = _command(python, script)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, **options).stdout


def _command(python: str, script: str) -> list[str]:
    return [python, "-I", "-B", "-c", script]


def _options(folder: str) -> dict:
    return {"cwd": folder, "env": {}, "text": True} | _USER
