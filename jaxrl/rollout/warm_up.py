"""Which requests have the shapes of every batch that a run will sample."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jaxrl.config.generator import GeneratorConfig
from jaxrl.config.objective_requirements import needs_greedy
from jaxrl.config.trainer import TrainerConfig
from jaxrl.data.packing import buckets_between, length_bucket
from jaxrl.rollout.conversations.conversation import sampling_of
from jaxrl.rollout.protocol import Request
from jaxrl.types import Prompt


def engine_batches(
    trainer: TrainerConfig,
    generator: GeneratorConfig,
    train_prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    eos_token_ids: Sequence[int],
) -> list[list[Request]]:
    """Return requests with the shapes of every training and evaluation batch, the longest first.

    With these the native engine's tables have their length, and shorter ones compile nothing of
    their own. Other engines have programs for each length of prompts, and each number of rows.
    """
    batches = _batches(trainer, generator, train_prompts, eval_prompts, eos_token_ids)
    return sorted(batches, key=_longest, reverse=True)


def _batches(
    trainer: TrainerConfig,
    generator: GeneratorConfig,
    train_prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    eos_token_ids: Sequence[int],
) -> Iterator[list[Request]]:
    evaluated, at_once = len(eval_prompts), trainer.eval_batch_size
    eval_sizes = {min(at_once, evaluated), evaluated % at_once} - {0}
    train = train_prompts, [trainer.train_batch_size], generator.n_samples_per_prompt
    evaluation = eval_prompts, sorted(eval_sizes), generator.eval_n_samples_per_prompt
    phases = [(train, generator.sampling_params), (evaluation, generator.eval_sampling_params)]
    if needs_greedy(trainer.algorithm):
        greedy = dataclasses.replace(generator.sampling_params, temperature=0.0)
        phases.append(((*train[:2], 1), greedy))
    for (prompts, sizes, samples), params in phases:
        if params is None or not prompts:
            continue
        sampling = sampling_of(params, eos_token_ids)
        inputs = prompt_buckets(prompts)
        if generator.max_turns > 1:  # later turns have inputs of any length
            assert generator.max_input_length is not None  # resolved
            inputs = buckets_between(inputs[0], generator.max_input_length)
        keys = ((0, 0),) * samples
        for size, width in itertools.product(sizes, inputs):
            yield [Request((0,) * width, keys, sampling)] * size
        if params is generator.sampling_params and generator.inference_engine.speculative_least:
            yield [Request((0,) * inputs[-1], keys, sampling, guesses=False)] * sizes[-1]


def prompt_buckets(prompts: Sequence[Prompt]) -> list[int]:
    """Return the lengths that prompts are padded to, ascending."""
    return sorted({length_bucket(len(prompt.tokens)) for prompt in prompts})


def _longest(batch: Sequence[Request]) -> int:
    return max(len(r.prompt_tokens) + r.sampling.max_tokens for r in batch)
