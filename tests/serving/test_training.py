"""The endpoint beside a training run."""

import threading

import openai
import pytest

from jaxrl.serving.agent_generator import AgentGenerator
from jaxrl.train import BasePPOExp
from tests.test_train import small


async def agent(base_url, session_id, prompt):
    headers = {"X-Session-ID": session_id}
    async with openai.AsyncOpenAI(base_url=base_url, api_key="-", default_headers=headers) as api:
        answer = await api.chat.completions.create(model="policy", messages=prompt.messages)
    said, wanted = answer.choices[0].message.content, prompt.extras["reward_spec"]["ground_truth"]
    return sum(a == b for a, b in zip(said, str(wanted), strict=False)) / 3


class AgentRun(BasePPOExp):
    def get_generator(self, engine, tokenizer):
        return AgentGenerator(self.server, agent)


@pytest.mark.slow  # a whole run
def test_a_run_of_agents_with_a_stranger_beside_them(tmp_path):
    endpoint = {
        "generator.inference_engine.enable_http_endpoint": True,
        "generator.inference_engine.http_endpoint_port": 0,
        "generator.inference_engine.served_model_name": "policy",
        "trainer.max_training_steps": 2,
        "trainer.eval_interval": -1,
    }
    run = AgentRun(small(tmp_path, **endpoint))
    trainer = run.build()
    over, found = threading.Event(), []

    def stranger():
        """Asks all the time; nobody waits for its samples at the end of a step."""
        while not over.wait(0.02):
            try:
                with openai.OpenAI(base_url=run.server.url, api_key="-", max_retries=0) as api:
                    api.completions.create(model="policy", prompt=[1, 13], max_tokens=6, n=2)
                found.append(200)
            except openai.APIStatusError as error:
                found.append(error.status_code)
            except openai.APIConnectionError:
                pass  # before the start, and after the end

    thread = threading.Thread(target=stranger)
    thread.start()
    try:
        run.train(trainer)
    finally:
        over.set()
        thread.join()
    assert int(trainer.state.step) == 2
    assert {200} <= set(found) <= {200, 503}
    assert not run.server._thread.is_alive()
