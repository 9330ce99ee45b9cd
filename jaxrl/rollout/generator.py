"""What the trainer asks for trajectories, and how it waits for them."""

import asyncio
import inspect
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from jaxrl.rollout.conversation import generator_input
from jaxrl.rollout.protocol import Sampling
from jaxrl.rollout.step_wise import merge_steps
from jaxrl.types import GeneratorInput, GeneratorOutput, Prompt


class GeneratorInterface(Protocol):
    """Makes trajectories of prompts. Return one of yours from `BasePPOExp.get_generator`."""

    async def generate(self, batch: GeneratorInput) -> GeneratorOutput:
        """One trajectory per entry of the batch, in order.

        Each is one row, or with `is_last_step` one or more neighbouring rows.
        """
        ...


async def generate(generator: Any, batch: GeneratorInput) -> GeneratorOutput:
    """`generator.generate(batch)`.

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
    generator: Any,
    prompts: Sequence[Prompt],
    samples: int,
    names: Sequence[object],
    sampling: Sampling,
    *,
    merge: bool,
    part: bool = False,
) -> GeneratorOutput:
    """`samples` judged trajectories of every prompt.

    Args:
        names: seed, phase and step, which with prompt and sample name all that is random.
        merge: neighbouring steps of a trajectory are one row where they can be.
        part: these are not the whole batch; `buffer.gather` puts the parts together.
    """
    batch = generator_input(prompts, samples, names, sampling)
    if part:
        batch["part"] = True
    output = await generate(generator, batch)
    return merge_steps(output) if merge else output


def run_now(work: Coroutine[Any, Any, GeneratorOutput]) -> GeneratorOutput:
    """Run a coroutine to its end, in a thread of its own where a loop already runs in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def generate_now(generator: Any, batch: GeneratorInput) -> GeneratorOutput:
    """`generate`, run to its end."""
    return run_now(generate(generator, batch))
