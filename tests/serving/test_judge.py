"""Our own server as the judge of the environment llm_as_a_judge."""

import pytest

from jaxrl import envs
from jaxrl.envs.json_request import RequestError


def test_our_server_judges(server, client, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    one_token = {"temperature": 0.0, "max_tokens": 1}

    def said(text):
        messages = [{"role": "user", "content": text}]
        answer = client.chat.completions.create(model="policy", messages=messages, **one_token)
        return answer.choices[0].message.content

    settings = {"base_url": server.url, "model": "policy", "max_score": 9.0}
    config = {"llm_as_a_judge": {**settings, "sampling_params": one_token, "max_attempts": 1}}
    rewards = {}
    for text in "0123456789abcdefghijklmnopqrstuvwxyz":
        env = envs.make("llm_as_a_judge", {"judge_prompt": "{response}="}, config)
        env.init([{"role": "user", "content": "1"}])
        if said(f"{text}=").strip().isdigit():
            rewards[text] = env.step(text)["reward"]
            assert rewards[text] == int(said(f"{text}=")) / 9
        else:  # a model with random weights rarely says a number
            with pytest.raises(RequestError, match="cannot use the answer"):
                env.step(text)
    assert rewards
    env.ready()
