"""The endpoint beside a training run."""

import asyncio
import threading

import jax
import openai
import pytest

from jaxrl.records.json_lines import read_lines
from jaxrl.rollout.server.agent_generator import AgentGenerator, session_url
from jaxrl.rollout.server.build import make_server
from jaxrl.train import BasePPOExp
from tests.rollout.server.conftest import model_folder, serve_config
from tests.rollout.server.test_server import ask, until, waiting
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


async def branching_agent(base_url, session_id, prompt, *, reward_secret):
    """Asks for two answers, goes on from the second, and in parallel asks two sub-agents."""
    address = session_url(base_url, session_id)
    async with openai.AsyncOpenAI(base_url=address, api_key="-") as api:
        messages, more = list(prompt.messages), {"role": "user", "content": "no"}
        answer = await api.chat.completions.create(model="policy", messages=messages, n=2)
        messages += [answer.choices[1].message.model_dump(exclude_none=True), more]
        calls = [api.chat.completions.create(model="policy", messages=messages) for _ in range(2)]
        await asyncio.gather(*calls)
        body = {"reward": 0.5, "secret": reward_secret}
        await api.post("../reward", body=body, cast_to=object)


class BranchingRun(BasePPOExp):
    def get_generator(self, engine, tokenizer):
        return AgentGenerator(self.server, branching_agent, max_branches=3)


@pytest.mark.slow  # a whole run
def test_a_run_of_agents_whose_sessions_branch(tmp_path):
    overrides = {
        "generator.inference_engine.enable_http_endpoint": True,
        "generator.inference_engine.http_endpoint_port": 0,
        "generator.inference_engine.served_model_name": "policy",
        "generator.step_wise_trajectories": True,
        "generator.max_turns": 3,
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.max_seq_len": 48,
        "trainer.max_training_steps": 2,
        "trainer.eval_interval": -1,
        "trainer.eval_before_train": False,
    }
    run = BranchingRun(small(tmp_path, **overrides))
    run.train(run.build())
    found = read_lines(tmp_path / "quickstart" / "metrics.jsonl")
    steps = [line for line in found if "reward/avg_raw_reward" in line]
    assert [line["reward/avg_raw_reward"] for line in steps] == [0.5, 0.5]
    for line in steps:  # of 16 sessions, each with the other sample and the other sub-agent
        assert (line["agent/branches"], line["agent/unmatched_branches"]) == (32, 16)
        assert 0 < line["agent/branch_token_share"] < 1


class AbortingGenerator:
    """Has the first batch aborted at its rollout worker, before a token is sampled."""

    def __init__(self, generator, worker):
        self.generator, self.worker, self.batches = generator, worker, []

    async def generate(self, batch):
        if self.batches:
            output = await self.generator.generate(batch)
        else:
            loop, worker = asyncio.get_running_loop(), self.worker
            assert (await loop.run_in_executor(None, ask, worker, "/pause?mode=keep"))[0] == 200
            task = asyncio.create_task(self.generator.generate(batch))
            wanted = len(batch["prompts"])
            await loop.run_in_executor(None, until, lambda: waiting(worker) == wanted)
            await loop.run_in_executor(None, ask, worker, "/abort", {})
            await loop.run_in_executor(None, ask, worker, "/resume")
            output = await task
        self.batches.append(output)
        return output


class AbortedRun(BasePPOExp):
    worker = None

    def get_generator(self, engine, tokenizer):
        generator = AbortingGenerator(super().get_generator(engine, tokenizer), self.worker)
        self.generators = [*getattr(self, "generators", []), generator]
        return generator


@pytest.mark.slow  # a whole run
def test_an_abort_at_a_rollout_worker_ends_samples_and_not_the_run(tmp_path):
    folder = model_folder(tmp_path / "model", 0)
    worker = make_server(serve_config(folder), jax.devices()[:1])
    worker.start()
    overrides = {
        "generator.inference_engine.run_engines_locally": False,
        "generator.inference_engine.backend": "native",
        "generator.inference_engine.remote_urls": [worker.url.removesuffix("/v1")],
        "trainer.policy.model.path": str(folder),
        "trainer.max_training_steps": 2,
        "trainer.eval_interval": -1,
        "trainer.eval_before_train": False,
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": -1,
    }
    run = AbortedRun(small(tmp_path, **overrides))
    run.worker = worker
    try:
        trainer = run.build()
        run.train(trainer)
        trainer.engine.close()
    finally:
        worker.stop()
    ((first, second),) = [g.batches for g in run.generators if g.batches]
    assert first["stop_reasons"] == ["abort"] * 16  # 4 x 4 samples
    assert first["response_ids"] == [[]] * 16
    assert set(second["stop_reasons"]) <= {"stop", "length"}
    assert int(trainer.state.step) == 2
