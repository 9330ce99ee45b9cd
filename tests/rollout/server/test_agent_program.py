"""Agents that are processes."""

import sys

import psutil
import pytest

from jaxrl.rollout.generator import generate_now
from jaxrl.rollout.server.agent_generator import AgentGenerator
from jaxrl.rollout.server.agent_program import AgentProgram
from tests.rollout.server.test_server import until
from tests.rollout.server.test_sessions import batch

# It asks twice, and knows of its address, its key and its reward alone what its environment says.
PROGRAM = """
import json, os, sys, urllib.request

def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

told = json.load(sys.stdin)
messages, url = told["messages"], os.environ["OPENAI_BASE_URL"] + "/chat/completions"
for _ in range(2):
    choice = post(url, {"model": "policy", "messages": messages, "max_tokens": 4})["choices"][0]
    messages += [choice["message"], {"role": "user", "content": "no"}]
wanted = told["extras"]["reward_spec"]["ground_truth"]
post(os.environ["JAXRL_REWARD_URL"], {"reward": len(wanted) + float(os.environ["MORE"])})
"""


def test_a_program_is_an_agent(server, tmp_path):
    (tmp_path / "agent.py").write_text(PROGRAM)
    command = [sys.executable, "agent.py"]
    agent = AgentProgram(command, folder=str(tmp_path), environment={"MORE": "0.5"})
    output = generate_now(AgentGenerator(server, agent), batch(2))
    assert [sum(rewards) for rewards in output["rewards"]] == [4.5, 4.5]
    assert output["rollout_metrics"]["generate/avg_turns"] == 2
    assert output["rollout_metrics"]["agent/branches"] == 0


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('no room')", "ended with status 1: no room"),
        ("pass", "reward is None"),
    ],
)
def test_a_program_that_fails(server, caplog, program, said):
    agent = AgentProgram([sys.executable, "-c", program])
    with pytest.raises(RuntimeError, match="all 1 agents"):
        generate_now(AgentGenerator(server, agent), batch(1))
    assert said in caplog.text


def test_a_program_that_takes_too_long_is_killed_with_what_it_started(server, tmp_path):
    # a shell has started its child long before it is killed, however busy the machine is
    agent = AgentProgram(["sh", "-c", "sleep 600 & echo $! > child; wait"], folder=str(tmp_path))
    with pytest.raises(RuntimeError, match="all 1 agents"):
        generate_now(AgentGenerator(server, agent, seconds=2), batch(1))
    child = int((tmp_path / "child").read_text())
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")
