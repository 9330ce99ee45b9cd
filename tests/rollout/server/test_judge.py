"""Our own server as the judge of the environment llm_as_a_judge."""

import pytest

from jaxrl import envs
from jaxrl.envs.json_request import RequestError


def test_our_server_judges(server, client, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    judged = {"a number": 0, "something else": 0}
    for seed in range(12):  # a model with random weights says a digit now and then
        sampling = {"temperature": 1.0, "seed": seed, "max_tokens": 1}
        messages = [{"role": "user", "content": "1+2="}]
        answer = client.chat.completions.create(model="policy", messages=messages, **sampling)
        said = answer.choices[0].message.content.strip()
        settings = {"base_url": server.url, "model": "policy", "max_score": 9.0, "max_attempts": 1}
        config = {"llm_as_a_judge": {**settings, "sampling_params": sampling}}
        env = envs.make("llm_as_a_judge", {"judge_prompt": "{question}{response}="}, config)
        env.init([{"role": "user", "content": "1+"}])
        if said.isdigit():
            judged["a number"] += 1
            assert env.step("2")["reward"] == int(said) / 9
        else:
            judged["something else"] += 1
            with pytest.raises(RequestError, match="cannot use the answer"):
                env.step("2")
    assert min(judged.values()) > 0, judged
    env.ready()
