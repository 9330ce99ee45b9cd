"""The loops of examples/tinker against a server, a few steps each."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.tinker.serving import KEY, serving

FOLDER = Path(__file__).parents[3] / "examples" / "tinker"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("tinker"), tinker__max_rank=32) as running:
        yield running


def run(server, name, *arguments):
    ran = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", *arguments],
        env=os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


@pytest.mark.slow  # the loop of test_docs.py, and the calls of test_sdk.py
def test_reinforcement_learning(server):
    said = run(server, "rl", "--steps=2", "--prompts=2", "--samples=4")
    assert re.fullmatch(r"(step \d: reward \d\.\d{3}\n){2}", said)


@pytest.mark.slow  # the calls of test_sdk.py
def test_fine_tuning_and_then_distillation_of_what_came_out(server):
    said = run(server, "sft", "--steps=5", "--batch=8", "--lr=1e-2")
    losses = [float(x) for x in re.findall(r"step \d: loss (\S+)", said)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    (teacher,) = re.findall(r"saved (tinker://\S+)", said)
    said = run(server, "distillation", f"--teacher={teacher}", "--steps=2", "--prompts=4")
    assert len(re.findall(r"step \d: reverse KL -?\d", said)) == 2


def test_each_has_less_than_100_lines():
    for script in FOLDER.glob("*.py"):
        assert len(script.read_text().splitlines()) < 100
