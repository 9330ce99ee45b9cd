r"""Trains a program that knows nothing of jaxrl: an agent of the OpenAI Agents SDK.

    pip install openai-agents
    python examples/custom_agent/main_custom_agent.py

A prompt names one of four boxes. The agent has a tool, `look`, and its own loop: it asks the policy
over HTTP, calls the tool that the policy calls, asks again, and ends with what the policy says.
Nothing of that is written for training. It runs at the address of a session, where the server keeps
the tokens of all that it asks. Its reward is 0.5 for looking into the right box, and 0.5 for saying
what is in it.

In 70 steps (7 minutes on two busy cores, most of them in the SDK and the client) the reward goes
from 0.02 to 0.73; the call and a guess of four digits have 0.625.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import agents
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from jaxrl.config import apply_overrides, load_config_file, parse_command_line
from jaxrl.rollout.protocol import Engine
from jaxrl.rollout.server.agent_generator import AgentGenerator, session_url
from jaxrl.rollout.server.answer_formats import Said
from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer
from jaxrl.types import Prompt

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.py"
BOXES = "abcd"
SETTINGS = {
    "trainer.run_name": "custom_agent",
    "trainer.max_training_steps": 70,
    "trainer.train_batch_size": 16,
    "trainer.policy_mini_batch_size": 8,
    "generator.n_samples_per_prompt": 8,
    "trainer.policy.optimizer_config.scheduler": "constant",
    "trainer.policy.optimizer_config.lr": 3e-3,
    "trainer.algorithm.advantage_estimator": "grpo",  # one reward for the whole conversation
    "trainer.algorithm.entropy_loss_coef": 0.03,
    "trainer.eval_interval": -1,
    "data.train_data": [f"{__name__}:prompts(size=800, seed=0)"],
    "data.val_data": [],
    "trainer.max_prompt_length": 6,  # the prompt, the call and what the tool said
    "generator.sampling_params.max_generate_length": 1,  # a character a turn
    "trainer.algorithm.max_seq_len": 7,
    "generator.inference_engine.enable_http_endpoint": True,
    "generator.inference_engine.http_endpoint_port": 0,
    "generator.inference_engine.served_model_name": "policy",
    "serve.answer_format": f"{__name__}:letters_call",
}


def letters_call(text: str, with_calls: bool) -> Said:
    """Read the answers of a model of single characters: a letter is a call, a digit an answer.

    Models that were taught to call tools are read by serve.answer_format=tags.
    """
    if with_calls and text.isalpha():
        return Said("", calls=(("look", {"box": text}),))
    return Said(text)


class Room:
    """Four boxes with a digit in each, and which of them were looked into."""

    def __init__(self, digits: str) -> None:
        self.found = dict(zip(BOXES, digits, strict=True))
        self.looked: list[str] = []


@agents.function_tool
def look(room: agents.RunContextWrapper[Room], box: str) -> str:
    """What is in a box; "?" where there is none of that name."""
    room.context.looked.append(box)
    return room.context.found.get(box, "?")


async def run_agent(client: AsyncOpenAI, question: str, room: Room) -> str:
    """The program: the answer of an agent whose model `client` asks. It could be any other."""
    model = agents.OpenAIChatCompletionsModel("policy", client)
    finder = agents.Agent[Room](name="finder", model=model, tools=[look])
    try:
        ended = await agents.Runner.run(finder, question, context=room, max_turns=2)
    except agents.AgentsException:  # the policy said nothing, or called again and again
        return ""
    return str(ended.final_output)


class AgentExp(BasePPOExp):
    def get_generator(self, engine: Engine, tokenizer: Any) -> AgentGenerator:
        return AgentGenerator(self.server, self.agent)

    async def agent(self, base_url: str, session_id: str, prompt: Prompt) -> float:
        """Run the program at the session's address, and return what it was worth."""
        box, room = prompt.extras["box"], Room(prompt.extras["digits"])
        # Nothing is encrypted on loopback, and to read certificates takes longer than an answer.
        plain = DefaultAsyncHttpxClient(verify=False)
        address = session_url(base_url, session_id)
        async with AsyncOpenAI(base_url=address, api_key="-", http_client=plain) as client:
            answer = await run_agent(client, box, room)
        right = [room.looked[:1] == [box], room.looked != [] and answer == room.found[box]]
        return sum(right) / 2


def prompts(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows: which box is asked for, and what is in all of them."""
    rng = Random(seed)
    for box in rng.choices(BOXES, k=size):
        digits = "".join(rng.choices("0123", k=len(BOXES)))
        yield {"prompt": box, "box": box, "digits": digits}


def main(arguments: Sequence[str]) -> Trainer:
    agents.set_tracing_disabled(True)  # it would send the conversations elsewhere
    path, overrides = parse_command_line([f"--config={QUICKSTART}", *arguments])
    return AgentExp(apply_overrides(load_config_file(path), {**SETTINGS, **overrides})).run()


if __name__ == "__main__":
    main(sys.argv[1:])
