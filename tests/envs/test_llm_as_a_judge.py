"""The environment llm_as_a_judge against servers on loopback, well and ill."""

import asyncio
import threading

import pytest

from jaxrl import config as cfg, envs
from jaxrl.envs import json_request
from jaxrl.envs.json_request import RequestError
from jaxrl.envs.tasks.llm_as_a_judge import GSM8K_PROMPT, read_score
from jaxrl.rollout.conversations.environment_pool import EnvironmentPool
from jaxrl.rollout.conversations.session import EnvironmentFailure, Session
from jaxrl.types import Prompt
from tests.envs.json_server import JsonServer, closed_url, serving

ROW = {"reward_spec": {"method": "rule", "ground_truth": "72"}}
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 12?"}]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(json_request, "FIRST_WAIT", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def reply(text):
    return lambda question: {"choices": [{"message": {"role": "assistant", "content": text}}]}


def make(server, row=ROW, **settings):
    env = envs.make("llm_as_a_judge", row, {"llm_as_a_judge": {"base_url": server.url, **settings}})
    assert env.init(QUESTION) == (QUESTION, {})
    return env


# ---- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("They agree.\n\n### Final Score: 1", 1.0),
        ("### Final Score: 0", 0.0),
        ("### Final Score:1.0", 1.0),
        ("###  Final Score:  0.25\n", 0.25),
        ("### Final Score: **1**", 1.0),
        ("### Final Score: 1.", 1.0),  # the end of a sentence
        ("1", 1.0),
        (" 0.5\n", 0.5),
        # It quotes what it judges, and then judges.
        ('It says "### Final Score: 1" itself.\n### Final Score: 0', 0.0),
    ],
)
def test_scores_of_replies(said, score):
    assert read_score(said) == score


@pytest.mark.parametrize(
    "said",
    [
        *("", "right", "Final Score: 1", "### Final Score: high", "### Final Score:", "nan", "inf"),
        *("### Final Score: 10", "### Final Score: -1", "### Final Score: 1.01", "2"),
        *("### Final Score: 1/10", "### Final Score: 1e3", "### Final Score: 1.5e3"),
    ],
)
def test_replies_without_a_score(said):
    with pytest.raises(ValueError, match="score|float"):
        read_score(said)


def test_scores_of_another_scale():
    assert read_score("### Final Score: 7", 10.0) == 0.7
    assert read_score("### Final Score: 10", 10) == 1.0
    with pytest.raises(ValueError, match="11 is not from 0 to 10"):
        read_score("### Final Score: 11", 10)


# ---- questions -----------------------------------------------------------------------------------


def test_the_judge_is_asked_as_an_openai_server(monkeypatch):
    with serving(JsonServer(reply("Yes.\n### Final Score: 1"))) as server:
        env = make(server, model="judge")
        step = env.step("#### 72")
        assert step == {
            "observations": [], "reward": 1.0, "done": True, "metadata": {"score": 1.0}
        }  # fmt: skip
        assert env.get_metrics() == {"score": 1.0, "judge_attempts": 1}
        monkeypatch.setenv("OPENAI_API_KEY", "of-openai\n")
        monkeypatch.setenv("OTHER_KEY", "of-another")
        make(server, sampling_params={"max_tokens": 9}).step("#### 72")
        make(server, api_key_env="OTHER_KEY").step("#### 72")
    asked = GSM8K_PROMPT.replace("{question}", "6 * 12?").replace("{ground_truth}", "72")
    content = asked.replace("{response}", "#### 72")
    messages = [{"role": "user", "content": content}]
    first, second, _ = server.questions
    assert first == {"model": "judge", "messages": messages, "temperature": 0.0}
    assert second == {"model": "gpt-4o-mini", "messages": messages, "max_tokens": 9}
    assert server.keys == [None, "Bearer of-openai", "Bearer of-another"]


def test_prompts_of_config_and_row():
    prompt = r"Is {response} \frac{1}{2}, {other}? {question}{"
    with serving(JsonServer(reply("1"))) as server:
        make(server, prompt=prompt).step("a")
        make(server, {"judge_prompt": "Rate {response}"}, prompt=prompt).step("b")
        # what is put in is not searched for more to put in
        make(server, prompt="{response}|{ground_truth}").step("{ground_truth}{question}")
    assert [question["messages"][0]["content"] for question in server.questions] == [
        r"Is a \frac{1}{2}, {other}? 6 * 12?{", "Rate b", "{ground_truth}{question}|72"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "settings", "problem"),
    [
        (ROW, {"prompt": "Is it right?"}, r"must hold \{response\}.*'Is it right\?'"),
        ({}, {}, "needs a column reward_spec"),
        ({"judge_prompt": "x"}, {}, r"must hold \{response\}"),
    ],
)
def test_what_cannot_be_judged(row, settings, problem):
    config = {"llm_as_a_judge": {"base_url": "http://127.0.0.1:9", **settings}}
    with pytest.raises(ValueError, match=problem):
        envs.make("llm_as_a_judge", row, config)


def test_openai_needs_a_key(monkeypatch):
    with pytest.raises(ValueError, match="the variable OPENAI_API_KEY has no key for https://api"):
        envs.make("llm_as_a_judge", ROW)
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    settings = cfg.get_config_as_dict(cfg.TrainConfig())["environment"]["skyrl_gym"]
    of_config, of_nothing = (envs.make("llm_as_a_judge", ROW, given) for given in (settings, None))
    assert of_config.judge.url == "https://api.openai.com/v1/chat/completions"
    names = ("url", "model", "sampling_params", "max_score", "timeout", "attempts", "_places")
    for name in names:  # the defaults are the config's
        assert getattr(of_config.judge, name) == getattr(of_nothing.judge, name)


@pytest.mark.parametrize("key", ["sk-a\nb", "sk-\u2019"])
def test_a_key_that_is_none_is_not_shown(monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ValueError, match="OPENAI_API_KEY has a key with signs that no") as raised:
        envs.make("llm_as_a_judge", ROW)
    assert "sk-" not in repr(raised.value)


# ---- judges that fail ----------------------------------------------------------------------------

WELL = b'{"choices": [{"message": {"content": "### Final Score: 1"}}]}'
GARBAGE = (
    b"", b"<html>", b"null", b"{}", b'{"choices": []}', b'{"choices": [{"message": {}}]}',
    b'{"choices": [{"message": {"content": null}}]}', WELL[:-3], WELL.replace(b"1", b"good"),
    WELL.replace(b"1", b"7"),
)  # fmt: skip


@pytest.mark.parametrize("fault", [500, 503, 429, "hang", "drip", "reset", "cut", *GARBAGE])
def test_one_fault_is_made_up_for(fault):
    with serving(JsonServer(reply("### Final Score: 1"), [fault])) as server:
        env = make(server, timeout=0.3)
        assert env.step("#### 72")["reward"] == 1.0
    assert env.get_metrics() == {"score": 1.0, "judge_attempts": 2}


@pytest.mark.parametrize(
    ("fault", "attempts", "reason"),
    [
        (500, 3, "status 500"),
        (429, 3, "status 429"),
        ("hang", 3, "timed out"),
        (b"{}", 3, r"cannot use the answer '\{\}': KeyError\('choices'\)"),
        (WELL.replace(b"1", b"good"), 3, "cannot use the answer .*Final Score: good"),
        (401, 1, "status 401: a fault of the test"),  # a wrong key stays wrong
        (404, 1, "status 404"),
        ({"status": 302, "headers": {"Location": "http://127.0.0.1:9/"}}, 1, "status 302"),
    ],
)
def test_no_score_is_a_failure_of_the_environment_and_never_a_reward(fault, attempts, reason):
    with serving(JsonServer(None, [fault], endless=True)) as server:
        env = make(server, timeout=0.1, max_attempts=3)
        with pytest.raises(RequestError, match=f"in {attempts} attempts; the last: .*{reason}"):
            env.step("#### 72")
    assert len(server.questions) == attempts
    assert env.get_metrics() == {}


def test_nobody_listens():
    env = envs.make("llm_as_a_judge", ROW, {"llm_as_a_judge": {"base_url": closed_url()}})
    for call in (env.ready, lambda: env.step("#### 72")):
        with pytest.raises(RequestError, match="in 4 attempts; the last: .*Connection refused"):
            call()


def test_in_a_conversation_it_is_blamed_on_the_environment():
    """So that the trajectory is masked: tests/rollout has what becomes of such a failure."""

    async def converse(url):
        prompt = Prompt("0:0", QUESTION, (1,), "llm_as_a_judge", extras=ROW)
        config = {"llm_as_a_judge": {"base_url": url, "max_attempts": 2}}
        session = Session(prompt, EnvironmentPool(2), config)
        await session.open(1)
        try:
            return await session.step("#### 72", ["#### 72"], True)
        finally:
            await session.close()

    with serving(JsonServer(reply("### Final Score: 1"), [500, 500])) as server:
        with pytest.raises(EnvironmentFailure, match="'llm_as_a_judge' failed on prompt 0:0 .*500"):
            asyncio.run(converse(server.url))
        assert asyncio.run(converse(server.url))["reward"] == 1.0


def test_requests_at_a_time():
    with serving(JsonServer(reply("1"), seconds=0.02)) as server:
        judges = [make(server, max_requests=3) for _ in range(12)]
        threads = [threading.Thread(target=env.step, args=("#### 72",)) for env in judges]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(server.questions) == 12
    assert server.most == 3
