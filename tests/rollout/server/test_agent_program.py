"""Agents that are processes, and what those and the model's commands in them may know."""

import asyncio
import os
import sys

import psutil
import pytest

from jaxrl import activity
from jaxrl.rollout.generator import generate_now
from jaxrl.rollout.server.agent_generator import AgentGenerator
from jaxrl.rollout.server.agent_program import AgentProgram
from tests.rollout.server.test_server import ask, until
from tests.rollout.server.test_sessions import SAMPLING, batch

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
reward = len(wanted) + float(os.environ["MORE"])
post(os.environ["JAXRL_REWARD_URL"], {"reward": reward, "secret": told["reward_secret"]})
"""
# What a model says to a shell: it gives itself a reward, with all that it can read or guess.
GREEDY = """
import json, os, sys, urllib.error, urllib.request

said = sys.stdin.read()
for secret in [{}, {"secret": said}, *({"secret": value} for value in os.environ.values())]:
    data = json.dumps({"reward": 1, **secret}).encode()
    try:
        urllib.request.urlopen(urllib.request.Request(os.environ["JAXRL_REWARD_URL"], data))
    except urllib.error.HTTPError as error:
        assert (error.code, "reward_secret" in error.read().decode()) == (403, True)
    else:
        raise AssertionError(secret)
url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
try:  # nor does it take the session away from the trainer
    urllib.request.urlopen(urllib.request.Request(url, method="DELETE"))
except urllib.error.HTTPError as error:
    assert error.code == 403
else:
    raise AssertionError(url)
print("has", *(name for name in os.environ if "PLANTED" in os.environ[name]))
"""
RUNS_WHAT_IT_SAYS = f"""
import subprocess, sys
shell = subprocess.run([sys.executable, "-c", {GREEDY!r}], capture_output=True, text=True, stdin=0)
assert (shell.returncode, shell.stdout) == (0, "has NAMED\\n"), shell
"""


def test_a_program_is_an_agent(server, tmp_path):
    (tmp_path / "agent.py").write_text(PROGRAM)
    command = [sys.executable, "agent.py"]
    agent = AgentProgram(command, folder=str(tmp_path), environment={"MORE": "0.5"})
    output = generate_now(AgentGenerator(server, agent), batch(2))
    assert [sum(rewards) for rewards in output["rewards"]] == [4.5, 4.5]
    assert output["rollout_metrics"]["generate/avg_turns"] == 2
    assert output["rollout_metrics"]["agent/branches"] == 0


def test_what_the_model_says_to_a_shell_earns_nothing_and_reads_no_key(
    server, tmp_path, monkeypatch
):
    """The harness has read its input before the model says anything; then it runs that."""
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "JAXRL_SERVE_TOKEN"):
        monkeypatch.setenv(name, "PLANTED")
    before, after = PROGRAM.split("for _ in range(2):")
    (tmp_path / "agent.py").write_text(f"{before}{RUNS_WHAT_IT_SAYS}for _ in range(2):{after}")
    command, named = [sys.executable, "agent.py"], {"MORE": "0.5", "NAMED": "PLANTED"}
    agent = AgentProgram(command, folder=str(tmp_path), environment=named)
    output = generate_now(AgentGenerator(server, agent), batch(1))
    assert [sum(rewards) for rewards in output["rewards"]] == [4.5]


def test_a_program_gets_the_listed_variables_alone(server, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "LC_ALL": "C", "KEY": "1"})
    agent = AgentProgram(["sh", "-c", "env > seen"], folder=str(tmp_path), environment={"A": "b"})
    with pytest.raises(RuntimeError, match="all 1 agents"):  # none has a reward
        generate_now(AgentGenerator(server, agent), batch(1))
    seen = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    of_shells = {"PWD", "OLDPWD", "SHLVL", "_"}
    said = {"OPENAI_BASE_URL", "OPENAI_API_KEY", "JAXRL_REWARD_URL"}
    assert seen - of_shells == {"PATH", "LC_ALL", "A"} | said


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize(("user", "readable"), [(None, True), ("nobody", False)])
def test_another_user_cannot_read_what_the_trainer_was_started_with(server, user, readable):
    """The trainer's own can, in /proc: the page on security says so."""
    agent = AgentProgram(["sh", "-c", "cat /proc/$PPID/environ > /dev/null"], user=user)
    secret = server.open_session("of-a-user", SAMPLING, (1, 2))
    try:
        call = agent(server.url, "of-a-user", batch(1)["prompts"][0], reward_secret=secret)
        if readable:
            asyncio.run(call)
        else:
            with pytest.raises(RuntimeError, match="Permission denied"):
                asyncio.run(call)
    finally:
        server.take_session("of-a-user")


def test_a_reward_without_the_secret_is_refused(server):
    secret = server.open_session("secret", SAMPLING, (1, 2))
    path = "/sessions/secret/reward"
    for wrong in ({}, *({"secret": text} for text in (None, "", secret[1:], "\ud800"))):
        status, answer = ask(server, path, {"reward": 1, **wrong})
        assert (status, answer["error"]["code"]) == (403, "wrong_reward_secret")
    assert secret not in str(ask(server, "/sessions/secret", method="GET"))
    assert ask(server, path, {"reward": 0, "secret": secret})[0] == 200
    assert ask(server, path, {"reward": 1, "secret": secret})[0] == 409
    assert ask(server, "/sessions/secret", method="DELETE")[0] == 403
    assert server.take_session("secret").reward == 0


def test_an_agent_that_ends_is_seen(server):
    """Else the run would count as standing still while agents work that sample nothing."""
    seen = []

    async def agent(base_url, session_id, prompt):
        seen.append(activity.described(activity.going_on()))
        return 1.0

    with pytest.raises(RuntimeError, match="all 2 agents"):  # they have asked for nothing
        generate_now(AgentGenerator(server, agent, max_agents=1), batch(2))
    assert seen == ["rollouts 0 of 2", "rollouts 1 of 2"]


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
