"""skyrl-gym's environments as they are: its own, registered ones, and classes by path."""

import functools
import http.server
import json
import pickle
import sys
import threading

import cloudpickle
import pytest
import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from jaxrl import envs
from jaxrl.config import TrainConfig, get_config_as_dict
from tests.envs import corpus

THEIRS = json.loads(corpus.REWARDS.read_text())["rewards"]


class CountingEnv(BaseTextEnv):
    """A user's environment, with all that the interface has."""

    closed = 0

    def __init__(self, env_config, extras, bonus=0.0):
        super().__init__()
        self.topk, self.url = env_config.topk, env_config["search_url"]
        self.max_turns, self.bonus = extras["max_turns"], bonus

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "count"}], {}

    def step(self, action):
        self.turns += 1
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": "more"}],
            reward=len(action) + self.bonus,
            done=self.turns >= self.max_turns,
            metadata={"topk": self.topk},
            postprocessed_action=action[:2],
        )

    def close(self):
        type(self).closed += 1

    def get_metrics(self):
        return {"turns": self.turns}

    @staticmethod
    def aggregate_metrics(metrics):
        return {"most_turns": max(m["turns"] for m in metrics)}


class WholeConfigEnv(CountingEnv):
    """Named by its path, it is given all groups."""

    def __init__(self, env_config, extras):
        super().__init__(env_config.search, extras)


@pytest.fixture
def counting():
    """An id that is registered with settings of its own."""
    skyrl_gym.register("counting", entry_point=CountingEnv, kwargs={"bonus": 0.5})
    yield "skyrl_gym:counting"
    skyrl_gym.envs.deregister("counting")


def settings(**groups):
    return get_config_as_dict(TrainConfig().environment.skyrl_gym) | groups


@pytest.mark.parametrize(
    ("name", "count"), [("gsm8k", 240), ("gsm8k_multi_turn", 31), ("aime", 688), ("text2sql", 64)]
)
def test_rewards_are_theirs(name, count, tmp_path):
    corpus.make_database(tmp_path)
    config = settings(text2sql={"db_path": str(tmp_path)})
    found = {}
    for kind, case, extras, actions in corpus.cases():
        if kind == name:
            env, found[case] = envs.make(f"skyrl_gym:{name}", extras, config), []
            for action in actions:
                step = env.step(action)
                found[case].append(float(step["reward"]))
                if step["done"]:
                    break
            env.close()
    assert len(found) == count
    assert found == THEIRS[name]


def test_all_of_the_interface_is_carried_over(counting):
    env = envs.make(counting, {"max_turns": 2}, settings(counting={"topk": 7, "search_url": "u"}))
    assert env.init([{"role": "user", "content": "go"}])[0][-1]["content"] == "count"
    step = env.step("four")
    assert (step["reward"], step["done"]) == (4.5, False)  # 4 letters and the bonus
    assert (step["metadata"], step["postprocessed_action"]) == ({"topk": 7}, "fo")
    assert env.step("")["done"]
    assert env.get_metrics() == {"turns": 2}
    before = CountingEnv.closed
    env.close()
    assert CountingEnv.closed == before + 1
    assert envs.load(counting).aggregate_metrics([{"turns": 2}, {"turns": 5}]) == {"most_turns": 5}
    assert envs.load(counting).__name__ == "CountingEnv"
    assert envs.load(counting) is envs.load(counting)


def test_metrics_of_their_own_are_aggregated_as_theirs():
    multi_turn = envs.load("skyrl_gym:gsm8k_multi_turn")
    assert multi_turn.aggregate_metrics([{"steps": 1}, {"steps": 4}]) == {"avg_steps": 2.5}
    assert envs.load("skyrl_gym:gsm8k").aggregate_metrics([{"a": 1.0}, {"a": 2.0}]) == {"a": 1.5}


def test_a_class_is_named_by_its_path():
    env = envs.make(f"{__name__}:WholeConfigEnv", {"max_turns": 1}, settings())
    assert (env.topk, env.url) == (3, "http://127.0.0.1:8000/retrieve")
    assert env.step("four")["reward"] == 4.0


def test_the_class_of_a_name_can_go_to_another_process():
    there = pickle.loads(cloudpickle.dumps(envs.load("skyrl_gym:gsm8k_multi_turn")))
    extras = {"reward_spec": {"ground_truth": "72"}, "max_turns": 2}
    env = envs.construct(there, "skyrl_gym:gsm8k_multi_turn", extras, settings())
    assert env.step("#### 71")["reward"] == 0.1  # 0.2 over two turns
    assert there.aggregate_metrics([{"steps": 3}]) == {"avg_steps": 3.0}


class Retriever(http.server.BaseHTTPRequestHandler):
    """Answers every query with one document, as SkyRL's retriever does."""

    asked: list

    def __init__(self, asked, *args):
        self.asked = asked
        super().__init__(*args)

    def do_POST(self):
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(query)
        found = [[{"document": {"contents": "Paris is the capital"}, "score": 1.0}]]
        body = json.dumps({"result": found}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_search_reads_its_settings_and_asks_its_retriever():
    asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Retriever, asked))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/retrieve"
        config = settings(
            search={"search_url": url, "topk": 2, "timeout": 5, "log_requests": False}
        )
        extras = {"reward_spec": {"ground_truth": {"target": ["Paris"]}}, "max_turns": 3}
        env = envs.make("skyrl_gym:search", extras, config)
        step = env.step("<search>capital of France</search>")
        assert "is the capital" in step["observations"][0]["content"]
        assert (asked[0]["query"], asked[0]["topk"]) == ("capital of France", 2)
        assert env.step("<answer>Paris</answer>")["reward"] == 1.0
    finally:
        server.shutdown()


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(
        ValueError, match="no environment 'gsm8'; did you mean 'gsm8k'. it has aime"
    ):
        envs.load("skyrl_gym:gsm8")


def test_what_their_constructor_refuses_is_said():
    with pytest.raises(AssertionError, match="reward_spec field is required"):
        envs.make("skyrl_gym:gsm8k", {})


def test_missing_package_says_how_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(ImportError, match=r"package skyrl-gym: pip install 'jaxrl\[envs\]'"):
        envs.load("skyrl_gym:gsm8k")
