"""What the trainer asks for trajectories, and how it waits for them."""

import asyncio
import inspect
from collections.abc import Coroutine, Sequence
from contextlib import closing
from typing import Any, Protocol

from jaxrl.config import SamplingParams, TrainConfig
from jaxrl.rollout.conversations.columns import checked
from jaxrl.rollout.conversations.conversation import generator_input, sampling_of
from jaxrl.rollout.conversations.loop_thread import LoopThread
from jaxrl.rollout.conversations.step_wise import merge_steps
from jaxrl.types import GeneratorInput, GeneratorOutput, Prompt


class GeneratorInterface(Protocol):
    """Makes trajectories of prompts. Return one of yours from `BasePPOExp.get_generator`."""

    async def generate(self, batch: GeneratorInput) -> GeneratorOutput:
        """Return one trajectory per entry of the batch, in order.

        Each is one row, or with `is_last_step` one or more neighbouring rows.
        """
        ...


async def generate(generator: Any, batch: GeneratorInput) -> GeneratorOutput:
    """Await `generator.generate(batch)`.

    Raises:
        TypeError: it is not a coroutine function.
    """
    work = generator.generate(batch)
    if not inspect.iscoroutine(work):
        raise TypeError(
            f"{type(generator).__name__}.generate must be written 'async def generate', it "
            f"returned {type(work).__name__}"
        )
    return await work


async def sample_prompts(
    config: TrainConfig,
    generator: Any,
    eos_token_ids: Sequence[int],
    phase: str,
    prompts: Sequence[Prompt],
    step: int,
    samples: int,
    params: SamplingParams,
    *,
    part: bool = False,
) -> GeneratorOutput:
    """Return `samples` judged trajectories of every prompt.

    Args:
        config: resolved.
        eos_token_ids: of the model.
        phase, step: with seed, prompt and sample they name all that is random.
        part: these are not the whole batch; `concat_batch` puts the parts together.

    Raises:
        ValueError: see `checked`.
    """
    names, sampling = (config.trainer.seed, phase, step), sampling_of(params, eos_token_ids)
    batch = generator_input(prompts, samples, names, sampling)
    if part:
        batch["part"] = True
    output = checked(
        await generate(generator, batch), type(generator).__name__, len(batch["prompts"])
    )
    return merge_steps(output) if config.generator.merge_stepwise_output else output


def run_now(work: Coroutine[Any, Any, GeneratorOutput]) -> GeneratorOutput:
    """Run a coroutine to its end; in a thread of its own where a loop runs in this one (Jupyter).

    Whoever interrupts the wait ends the coroutine with it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with closing(LoopThread("jaxrl-rollouts")) as thread:
        return thread.run(work)


def generate_now(generator: Any, batch: GeneratorInput) -> GeneratorOutput:
    """Run `generate` to its end."""
    return run_now(generate(generator, batch))
