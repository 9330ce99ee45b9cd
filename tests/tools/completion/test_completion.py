"""What TAB offers, in Python and in the shells themselves."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.completion import main
from jaxrl.tools.completion.words import completions, script

ROOT = Path(__file__).parents[3]


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder with a program `jaxrl`, as an installation has it, in PATH."""
    program = tmp_path / "jaxrl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m jaxrl "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("jaxrl tr", ["train"]),
        ("jaxrl re", ["recipes", "report", "replay", "retriever"]),
        ("jaxrl train quicks", ["quickstart"]),
        ("jaxrl train --config=quicks", ["--config=quickstart"]),
        ("jaxrl train quickstart --config.tr", ["--config.trainer."]),
        ("jaxrl train quickstart --config.trainer.see", ["--config.trainer.seed="]),
        (
            "jaxrl train quickstart --config.trainer.policy.model.pa",
            ["--config.trainer.policy.model.path="],
        ),
        ("jaxrl sft --config.nothing.at.all", []),
        ("jaxrl plan --est", ["--estimate"]),
        ("jaxrl audit --", ["--json", "--help"]),
        ("jaxrl train quickstart guess", []),  # there is a recipe
        ("jaxrl nothing ", []),
        ("cd x && jaxrl tr", ["train"]),  # zsh hands over the whole line
        ("jaxrl plan quickstart; A=1 bin/jaxrl tr", ["train"]),
        ("jaxrl plan --topology v5e:2x4 quicks", ["quickstart"]),
        ("jaxrl plan --estimate quickstart q", []),
        ("jaxrl plan --topology q", []),  # its value, no recipe
    ],
)
def test_words_that_may_follow(line, offered):
    assert completions(line) == offered


def test_a_group_offers_all_of_its_fields():
    offered = completions("jaxrl train x --config.trainer.policy.model.")
    names = [word.removeprefix("--config.trainer.policy.model.") for word in offered]
    assert names == ["path=", "lora.", "random_init="]


def test_bash_completes(programs):
    """Real bash: what stands behind "=" and ":" is a word of its own there."""
    code = f"""
{script("bash")}
ask() {{ COMP_LINE=$1 COMP_POINT=${{#1}}; _jaxrl; echo "${{COMPREPLY[@]}}"; }}
ask 'jaxrl trai'
ask 'jaxrl train quicks'
ask 'jaxrl train --config=quicks'
ask 'jaxrl train quickstart --config.trainer.seed=1 --config.trainer.algorithm.gam'
complete -p jaxrl
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[:4] == [
        "train",
        "quickstart",
        "quickstart",
        "--config.trainer.algorithm.gamma=",
    ]
    assert "-F _jaxrl jaxrl" in done.stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell, programs, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    file = tmp_path / f"script.{shell}"
    file.write_text(script(shell))
    subprocess.run([shell, "-n", str(file)], check=True)
    if shell == "fish":
        ask = f"source {file}; complete -C 'jaxrl train quicks'"
        done = subprocess.run(["fish", "-c", ask], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "quickstart"


def test_an_unknown_shell_is_one_line(capsys):
    assert main(["tcsh"]) == 2
    assert capsys.readouterr().err == (
        "error: no completion for 'tcsh'; there is one for bash, fish, zsh\n"
    )
