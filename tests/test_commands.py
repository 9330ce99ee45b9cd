"""`python -m jaxrl`, and `--help` of every command that it lists."""

import runpy
import sys

import pytest

from jaxrl.__main__ import commands, main


def test_the_list_has_every_command_with_one_line(capsys):
    found = commands()
    assert {"jaxrl.train", "jaxrl.evaluate", "jaxrl.config.from_skyrl"} <= set(found)
    assert all(line.endswith((".", "?")) and len(line) <= 120 for line in found.values())
    assert main() == 0
    listed = capsys.readouterr().out
    assert all(f"python -m {module} " in listed for module in found)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("module", commands())
def test_help_of_a_command_exits_0(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code in (0, None)
    assert f"python -m {module} " in capsys.readouterr().out
