"""The examples of docs/serving.md run as they stand."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jaxrl.rollout.generator import generate_now
from jaxrl.rollout.server.agent_generator import AgentGenerator
from tests.rollout.server.test_sessions import batch

PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_client(server, capsys):
    first, _ = blocks("python")
    exec(first, {"url": server.url.removesuffix("/v1")})
    assert "[([" in capsys.readouterr().out


def test_the_agent(server):
    names = {}
    exec(blocks("python")[1], names)
    output = generate_now(AgentGenerator(server, names["agent"]), batch(2))
    assert [sum(rewards) for rewards in output["rewards"]] == [0, 0]
    assert names["AgentRun"].get_generator is not None


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server):
    commands = [block for block in blocks("bash") if block.startswith("curl")]
    environment = {**os.environ, "URL": server.url.removesuffix("/v1")}
    for command in commands:
        shell = ["bash", "-c", command]
        ran = subprocess.run(shell, env=environment, capture_output=True, check=True)
        assert b'"object": "text_completion"' in ran.stdout
    assert len(commands) == 2
