"""What processes that run or parse others' words are told of the trainer's environment."""

import ast
import json
import os
import queue
import sqlite3
import stat
import sys
from pathlib import Path

import pytest

import jaxrl
from jaxrl.child_environment import child_environment
from jaxrl.envs.sandbox import sandbox
from jaxrl.envs.tasks import math_checker
from jaxrl.envs.tasks.sqlite_query import query
from tests.envs.test_sandbox import needs_sandbox

ROOT = Path(jaxrl.__file__).parent
SECRETS = "WANDB_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "LCD_TOKEN"
STARTS = {f"subprocess.{name}" for name in ("Popen", "run", "check_output", "check_call", "call")}
STARTS |= {"asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "os.system"}
STARTS |= {"os.fork", "os.execve", "os.posix_spawn", "concurrent.futures.ProcessPoolExecutor"}
# Every place where a process is started, and what that has of the environment:
LISTED, ALL, NOTHING = "what is listed", "all: it is the run, or jaxrl's own command", "none of it"
PLACES = {
    "cluster/child.py": ALL,  # a process of a job
    "cluster/guard.py": ALL,  # the same, within its guard
    "cluster/settings.py": ALL,  # reads the job's config
    "envs/sandbox/jail.py": NOTHING,  # what a model wrote
    "envs/sandbox/sandbox.py": NOTHING,
    "envs/tasks/math_checker.py": LISTED,  # parses what a model and a row say
    "envs/tasks/sqlite_query.py": LISTED,
    "parallel/devices.py": ALL,  # asks JAX for its devices
    "rollout/remote/server_process.py": ALL,  # a sampler: jaxrl's or vLLM's
    "rollout/server/agent_program.py": LISTED,  # a harness, which may run what a model says
    "tools/doctor/machine_report.py": ALL,  # nvidia-smi
    "tools/prove/proof.py": ALL,  # sections of a proof
    "tools/prove/runs.py": ALL,  # runs
    "tools/sweep/units.py": ALL,  # runs
}


@pytest.fixture
def planted(monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "PLANTED")
    monkeypatch.setenv("LC_PLACE", "here")


def test_what_is_listed(planted):
    found = child_environment()
    assert (found["PATH"], found["LC_PLACE"]) == (os.environ["PATH"], "here")
    allowed = {"PATH", "HOME", "TMPDIR", "LANG", "PYTHONPATH", "VIRTUAL_ENV"}
    allowed |= {"LD_LIBRARY_PATH", "SYSTEMROOT"}
    assert {name for name in found if not name.startswith("LC_")} <= allowed


@pytest.fixture
def seen(planted, tmp_path, monkeypatch):
    """Read the environment of the program that was started as `sys.executable`."""
    noted, wrapper = tmp_path / "environment", tmp_path / "python"
    say = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    wrapper.write_text(
        f'#!/bin/sh\n"{sys.executable}" -I -S -c "{say}" "{noted}"\nexec "{sys.executable}" "$@"\n'
    )
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(wrapper))
    return lambda: json.loads(noted.read_text())


def assert_knows_nothing(environment):
    assert environment["LC_PLACE"] == "here"  # this is what it was started with
    assert "PLANTED" not in environment.values()
    assert set(environment) <= {*child_environment(), "PWD", "OLDPWD", "SHLVL", "_"}


def test_a_query_knows_no_key(seen, tmp_path):
    file = tmp_path / "shop.sqlite"
    sqlite3.connect(file).close()
    assert query(file, "SELECT 1", 60.0, 10).rows == ((1,),)
    assert_knows_nothing(seen())


def test_a_comparison_of_formulas_knows_no_key(seen, monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(math_checker, "_IDLE", queue.SimpleQueue())
    assert math_checker.is_equal("0.5", r"\frac{1}{2}", 60.0)[0]
    assert_knows_nothing(seen())
    math_checker._IDLE.get_nowait().process.kill()


@needs_sandbox
def test_a_program_in_the_sandbox_knows_no_key(planted):
    said = sandbox.run("import os; print(sorted(os.environ), *os.environ.values())").stdout
    assert "HOME" in said
    assert not [word for word in (*SECRETS, "PLANTED", "LC_PLACE") if word in said]


def test_every_process_that_is_started_is_in_the_table():
    """A new one is put into it, and into docs/security.md."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in STARTS:
                place = str(path.relative_to(ROOT))
                found.add(place)
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}.get("env", "")
                if PLACES.get(place) == LISTED:
                    assert "child_environment()" in given, place
    assert found == set(PLACES)
