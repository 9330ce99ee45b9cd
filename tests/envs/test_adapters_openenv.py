"""Environments of OpenEnv on a real server, where it is installed (the extra `openenv`)."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import textwrap
import time
import types

import pytest

from jaxrl import envs
from jaxrl.envs.adapters.openenv import OpenEnvEnv
from jaxrl.envs.readiness import check_environments
from jaxrl.types import Prompt

SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Echo(Action):
    message: str

class Echoed(Observation):
    echoed_message: str = ""
    length: int = 0

class EchoEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.steps, self.word = 0, "hello"

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.steps, self.word = 0, kwargs.get("word", f"hello {seed}")
        return Echoed(echoed_message=self.word, done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        text = action.message
        if text == "crash":
            raise RuntimeError("out of order")
        return Echoed(
            echoed_message=text, length=len(text), reward=len(text) * 0.1, done=self.steps == 3
        )

    @property
    def state(self):
        return State(step_count=self.steps)

app = create_fastapi_app(EchoEnvironment, Echo, Echoed, max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a server with an environment that repeats what it is told."""
    pytest.importorskip("openenv")
    script = tmp_path_factory.mktemp("openenv") / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, script, str(port)])
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        assert server.poll() is None, "the server ended"
        time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait()


async def talk(address, actions, max_turns=10, **columns):
    env = envs.make(f"openenv:{address}", {"max_turns": max_turns, **columns})
    prompt = [{"role": "user", "content": "Say something long."}]
    try:
        messages, _ = await env.init(prompt)
        assert messages[0] == prompt[0]
        said, earned, done = [m["content"] for m in messages[1:]], [], False
        for action in actions:
            step = await env.step(action)
            said += [m["content"] for m in step["observations"]]
            earned.append(step["reward"])
            done = step["done"]
            if done:
                break
        return said, pytest.approx(earned), env.get_metrics(), done
    finally:
        await env.close()


def play(*args, **columns):
    return asyncio.run(talk(*args, **columns))


def act(text):
    return f"<action>{json.dumps({'message': text})}</action>"


def test_an_episode(address):
    said, earned, metrics, done = play(
        address, [act("a"), act("bcd"), act("ef")], reset={"seed": 4}
    )
    assert json.loads(said[0])["echoed_message"] == "hello 4"
    assert json.loads(said[2])["length"] == 3
    assert (earned, done) == ([0.1, 0.3, 0.2], True)
    assert metrics == {"return": pytest.approx(0.6), "steps": 3, "invalid_actions": 0}
    assert play(address, [act("a"), act("b")], max_turns=2)[3]


def test_fields_for_plain_text(address):
    columns = {"action_field": "message", "observation_field": "echoed_message"}
    said, earned, _, _ = play(
        address,
        ["<action>abc</action>", "so <action>{}</action>"],
        reset='{"word": "go"}',
        **columns,
    )
    assert said == ["go", "abc", "{}"]
    assert earned == [0.3, 0.2]
    with pytest.raises(ValueError, match="has no field 'text' but .*'echoed_message'"):
        play(address, [], observation_field="text")


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("nothing", "There is no action in your answer"),
        ("<action>a</action>", "The action is not a JSON object: Expecting value"),
        ("<action>[1]</action>", "The action is no JSON object"),
        ('<action>{"massage": 1}</action>', 'The server does not take this action: {"massage": 1}'),
    ],
)
def test_what_is_no_action_earns_nothing_and_is_told(address, action, said):
    told, earned, metrics, done = play(address, [action, act("four")])
    assert said in told[1]
    assert (earned, done) == ([0.0, 0.4], False)  # the session goes on
    assert metrics["invalid_actions"] == 1


def test_sessions_side_by_side(address):
    async def both():
        games = [[act("a" * i)] * 3 for i in range(1, 6)]
        return await asyncio.gather(*[talk(address, game, reset={"seed": 1}) for game in games])

    assert [metrics["return"] for _, _, metrics, _ in asyncio.run(both())] == pytest.approx(
        [0.3, 0.6, 0.9, 1.2, 1.5]
    )


def test_an_environment_that_breaks_is_a_failure(address):
    with pytest.raises(RuntimeError, match="out of order"):
        play(address, [act("crash")])


def test_a_server_that_is_not_there_is_a_failure(address):
    with pytest.raises(ConnectionError, match="127.0.0.1:9"):
        play("http://127.0.0.1:9", [])


class NoClient:
    """Of a server that is not there."""

    closed = 0

    def __init__(self, base_url):
        self.base_url = base_url

    async def connect(self):
        raise ConnectionError(f"nobody at {self.base_url}")

    async def close(self):
        NoClient.closed += 1


def test_it_is_asked_before_a_run(monkeypatch):
    monkeypatch.setattr(
        "jaxrl.envs.adapters.openenv._library",
        lambda: types.SimpleNamespace(GenericEnvClient=NoClient),
    )
    env_class = "openenv:http://127.0.0.1:9"
    prompt = Prompt("0:0", [{"role": "user", "content": "1"}], (1,), env_class, {})
    with pytest.raises(ValueError, match="prompt 0:0: ConnectionError: nobody at http://127.0.0"):
        check_environments([prompt], {}, 1)
    assert NoClient.closed == 1


@pytest.mark.parametrize("text", ["[" * 100_000, '{"x": ' + "1" * 5000 + "}"])
def test_json_of_no_use_is_no_action(text):
    action, problem = OpenEnvEnv(name="http://127.0.0.1:9")._read(f"<action>{text}</action>")
    assert not action and problem.startswith("The action is not a JSON object: ")


def test_what_is_no_address_is_refused():
    with pytest.raises(ValueError, match="'openenv:echo_env' needs the address of a server"):
        envs.load("openenv:echo_env")


def test_missing_package_says_how_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(ImportError, match=r"package openenv-core: pip install 'jaxrl\[openenv\]'"):
        envs.load("openenv:http://127.0.0.1:8000")


def test_an_address_with_a_key_is_refused_without_it():
    with pytest.raises(ValueError, match="'openenv:http://<hidden>@host' has a key") as refused:
        OpenEnvEnv.of("http://me:hunter2secret@host")
    assert "hunter2" not in str(refused.value)
