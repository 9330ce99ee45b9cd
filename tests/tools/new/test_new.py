"""`jaxrl new`: the folder that it writes trains and passes its own tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.new import main
from jaxrl.records.json_lines import read_lines

ROOT = Path(__file__).parents[3]


def run(folder, *words):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_it_writes_a_project_and_says_what_is_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["mine"]) == 0
    files = [
        "README.md",
        "prompts.jsonl",
        "pytest.ini",
        "recipe.py",
        "rewards.py",
        "test_rewards.py",
    ]
    assert sorted(os.listdir("mine")) == files
    assert capsys.readouterr().out.endswith("\n\ncd mine\njaxrl train recipe.py\n")
    assert not any("my_project" in (tmp_path / "mine" / file).read_text() for file in files)
    rows = [json.loads(line) for line in Path("mine/prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 90  # 10 to 99
    assert rows[3] == {"prompt": "13", "answer": "31"}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("my-project", "error: 'my-project' is no name for a project: letters, digits and _"),
        ("2nd", "error: '2nd' is no name for a project"),
        ("there", "error: there is there already; choose another name, or delete it"),
    ],
)
def test_what_it_refuses(tmp_path, monkeypatch, capsys, name, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert main([name]) == 2
    assert capsys.readouterr().err.startswith(told)
    assert os.listdir(tmp_path) == ["there"] and not os.listdir("there")


@pytest.mark.slow
def test_its_own_tests_pass(tmp_path):
    """The reward by hand, and a run of two steps; in a project with settings of its own."""
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--nothing'\n")
    assert main([str(tmp_path / "mine")]) == 0
    said = run(tmp_path / "mine", "pytest", "-q", "-p", "no:cacheprovider")
    assert "6 passed" in said


@pytest.mark.slow
def test_its_reward_rises(tmp_path):
    assert main([str(tmp_path / "mine")]) == 0
    run(tmp_path / "mine", "jaxrl", "train", "recipe.py")
    lines = read_lines(tmp_path / "mine" / "runs" / "mine" / "metrics.jsonl")
    rewards = [line["reward/avg_raw_reward"] for line in lines if "reward/avg_raw_reward" in line]
    assert len(rewards) == 120
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.2
