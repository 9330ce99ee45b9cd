"""`python -m jaxrl`, and `--help` of every command that it lists."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from jaxrl.__main__ import commands


def test_the_list_has_every_command_with_one_line(capsys):
    found = commands()
    assert {"jaxrl.train", "jaxrl.evaluate", "jaxrl.config.from_skyrl"} <= set(found)
    assert "jaxrl.config.document" not in found  # writes pages of this repository
    assert all(line.endswith((".", "?")) and len(line) <= 120 for line in found.values())


def test_help_of_every_command_exits_0():
    def helps(module):
        words = [sys.executable, "-m", module, "--help"]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    names = ["jaxrl", *commands()]
    with ThreadPoolExecutor(2) as pool:
        for name, done in zip(names, pool.map(helps, names), strict=True):
            assert done.returncode == 0, (name, done.stderr)
            assert f"python -m {name} " in done.stdout, name
