"""The scripts of examples/custom_*: each as its docstring says, to its end; the reward rises."""

import subprocess
import sys

import pytest

from jaxrl.records.json_lines import read_lines
from tests.examples.notebook_kernels import ROOT, environment

pytestmark = pytest.mark.slow


def run(name, folder, *arguments, as_run=None):
    """Lines of the metrics with a reward, and what was printed."""
    script = ROOT / "examples" / name / f"main_{name}.py"
    done = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = read_lines(folder / "runs" / (as_run or name) / "metrics.jsonl")
    return [line for line in lines if "reward/avg_raw_reward" in line], done.stdout


def mean(lines, name="reward/avg_raw_reward"):
    return sum(line[name] for line in lines) / len(lines)


def test_custom_environment(tmp_path):
    lines, _ = run("custom_environment", tmp_path)
    assert mean(lines[:5]) < 0.1
    assert mean(lines[-5:]) > 0.7  # the call and a guess of four digits: 0.625


def test_custom_generator(tmp_path):
    lines, _ = run("custom_generator", tmp_path)
    assert mean(lines[:5]) < 0.1
    assert mean(lines[-5:]) > 0.6
    assert mean(lines[-5:], "environment/all_right") > 0.2


def test_custom_agent(tmp_path):
    lines, _ = run("custom_agent", tmp_path, "--config.trainer.max_training_steps=30")
    assert mean(lines[:5]) < 0.1
    assert mean(lines[-5:]) > 0.4  # it looks into the right box; in 30 steps it only guesses then
    assert mean(lines, "generate/avg_turns") > 1
    assert all(line["agent/branches"] == 0 for line in lines)
    assert all(line["generate/env_errors"] == 0 for line in lines)


def test_custom_trainer(tmp_path):
    lines, printed = run("custom_trainer", tmp_path, as_run="custom_trainer_0.25")
    assert mean(lines[:5]) < 0.1
    assert mean(lines[-5:]) > 0.5
    assert 0 < lines[-1]["advantage/share_negative"] < 1
    assert "negative 0.25: {'reward/avg_raw_reward': " in printed


def test_custom_reward(tmp_path):
    lines, _ = run("custom_reward", tmp_path)
    assert mean(lines[:5]) < 0.1
    assert mean(lines[-5:]) > 0.8
    assert lines[-1]["reward/letters/mean"] > lines[0]["reward/letters/mean"]
    assert lines[-1]["reward/brief/mean"] > lines[0]["reward/brief/mean"]
