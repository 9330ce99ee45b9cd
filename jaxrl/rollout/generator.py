"""What the trainer asks for trajectories, how it waits for them, and what it takes for one."""

import asyncio
import dataclasses
import inspect
from collections.abc import Coroutine, Sequence
from contextlib import closing
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from jaxrl.config import SamplingParams, TrainConfig
from jaxrl.data.columns import BLANKS, NO_ROUTES, ROUTES, TOKEN_COLUMNS, trajectory_numbers
from jaxrl.rollout.conversations.conversation import generator_input, sampling_of
from jaxrl.rollout.conversations.loop_thread import LoopThread
from jaxrl.rollout.conversations.step_wise import merge_steps
from jaxrl.types import GeneratorInput, GeneratorOutput, Prompt

_IDS = dict.fromkeys(("prompt_token_ids", "response_ids"), "iu")
# Of the columns of numbers per token the kinds; rewards may be a number for the response, too.
_NUMBERS = _IDS | {column.name: column.kinds for column in TOKEN_COLUMNS if column.kinds}
_PER_ROW = {"stop_reasons": str, "policy_versions": int}
_COLUMNS = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", *_PER_ROW)
_REQUIRED = (*_COLUMNS, "rollout_logprobs", "rollout_metrics")


class GeneratorInterface(Protocol):
    """Make trajectories of prompts. Return one of yours from `BasePPOExp.get_generator`.

    One that gives up what it waits for may say so: `longest_wait` are the seconds until then.
    """

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
    greedy: bool = False,
    demonstrations: bool = False,
) -> GeneratorOutput:
    """Return `samples` judged trajectories of every prompt.

    Args:
        config: resolved.
        eos_token_ids: of the model.
        phase, step: with seed, prompt and sample they name all that is random.
        part: these are not the whole batch; `concat_batch` puts the parts together.
        greedy: answer each prompt greedily, too, and say what that earns.
        demonstrations: the last of the samples is the answer that the prompt's row gives, if any.

    Raises:
        ValueError: see `checked_output`.
    """
    rng_path = config.trainer.seed, phase, step
    asked = sampling_of(params, eos_token_ids)
    batch = generator_input(prompts, samples, rng_path, asked, demonstrations=demonstrations)
    if part:
        batch["part"] = True
    output = await generate(generator, batch)
    output = checked_output(output, type(generator).__name__, len(batch["prompts"]))
    if greedy:
        rng_path = *rng_path[:1], f"{phase}, greedy", step
        asked = sampling_of(dataclasses.replace(params, temperature=0.0), eos_token_ids)
        alone = generator_input(prompts, 1, rng_path, asked)
        if part:
            alone["part"] = True
        answers = await generate(generator, alone)
        answers = checked_output(answers, type(generator).__name__, len(prompts))
        output = with_greedy_rewards(output, answers, samples)
    return merge_steps(output) if config.generator.merge_stepwise_output else output


def with_greedy_rewards(
    output: GeneratorOutput, answers: GeneratorOutput, samples: int
) -> GeneratorOutput:
    """Return trajectories with what the greedy answers to their prompts earned.

    Where an environment failed it is the mean of the prompt's samples, which is a baseline, too.

    Args:
        output: `samples` trajectories of each prompt; answers: one of each.
    """

    def of_trajectories(of: GeneratorOutput) -> tuple[np.ndarray, np.ndarray]:
        number = trajectory_numbers(of.get("is_last_step", [True] * len(of["response_ids"])))
        earned = np.zeros(int(number[-1]) + 1)
        np.add.at(earned, number, [float(np.sum(r)) for r in of["rewards"]])
        return number, earned

    number, sampled = of_trajectories(output)
    rows, earned = of_trajectories(answers)
    failed = np.zeros(len(earned), bool)
    failed[rows] = np.isin(answers["stop_reasons"], ("env_error", "abort"))
    earned = np.where(failed, sampled.reshape(-1, samples).mean(1), earned)
    return {**output, "greedy_rewards": earned[number // samples].tolist()}


Result = TypeVar("Result")


def run_now(work: Coroutine[Any, Any, Result]) -> Result:
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


# ---- what a generator gave, before anything is made of it


def checked_output(output: GeneratorOutput, generator: str, trajectories: int) -> GeneratorOutput:
    """Check a generator's output and return it with lists in place of arrays and tuples.

    Args:
        generator: its name.
        trajectories: that were asked for.

    Raises:
        ValueError: a column is missing or has other rows than the others, there are more or fewer
            trajectories than were asked for, or a row is not what its column is made of. The
            message names generator, column and row.
    """
    gave, found = f"{generator}.generate gave", cast(dict[str, Any], output)
    if missing := [name for name in _REQUIRED if name not in found]:
        raise ValueError(f"{gave} no {', '.join(missing)}: see jaxrl.types.GeneratorOutput")
    columns = {k: x for k, v in found.items() if isinstance(x := _plain(v), list)}
    for name in _COLUMNS:
        if name not in columns:
            raise ValueError(f"{gave} {name}={_short(found[name])}: give a list, one for each row")
    rows = len(columns["response_ids"])
    for name, column in columns.items():
        if len(column) != rows:
            raise ValueError(f"{gave} {len(column)} {name} for {rows} response_ids: give one each")
    last = columns.get("is_last_step", [True] * rows)
    if (ended := sum(map(bool, last))) != trajectories or not all(last[-1:]):
        raise ValueError(
            f"{gave} {ended} trajectories in {rows} rows for {trajectories} entries of the batch: "
            "give one for each entry, in order, and is_last_step for its last row"
        )
    for name, column in columns.items():
        columns[name] = rows_of = [_ids(v) if name == ROUTES else _plain(v) for v in column]
        for row, value in enumerate(rows_of):
            tokens = len(columns["response_ids"][row])
            if name == ROUTES:
                tokens += len(columns["prompt_token_ids"][row])
            if wanted := _wanted(name, value, tokens):
                raise ValueError(f"{gave} {name}[{row}]={_short(value)}: give {wanted}")
    return cast(GeneratorOutput, {**found, **columns})


def _plain(value: Any) -> Any:
    """Return arrays and tuples as lists, their scalars as numbers; a NamedTuple stays one."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if type(value) is tuple else value


def _ids(routes: Any) -> Any:
    """Return experts as an array of unsigned integers, if they are that, whatever they lie in."""
    try:
        array = np.asarray(routes)
    except ValueError:  # lists of different lengths
        return routes
    if not array.size:
        return NO_ROUTES
    fits = array.dtype.kind == "i" and array.min() >= 0 and array.max() < 2**16
    return array.astype(np.uint16) if fits else array


def _wanted(name: str, value: Any, tokens: int) -> str:
    """Return what a row of a column has to be, or "" if it is that."""
    if name == ROUTES:
        usable = isinstance(value, np.ndarray) and value.dtype.kind == "u" and value.ndim == 3
        fits = usable and len(value) <= tokens
        return "" if fits else f"ids [n, layers, experts of a token], n at most {tokens}"
    if name in _PER_ROW:
        kind = _PER_ROW[name]
        return "" if isinstance(value, kind) else f"one {kind.__name__}"
    if name in _NUMBERS:
        whole = name == "rewards" and not isinstance(value, list)
        try:
            array = np.asarray(value)
        except ValueError:  # lists of different lengths
            array = np.array("")
        if array.ndim != (not whole) or (array.size and array.dtype.kind not in _NUMBERS[name]):
            numbers = "integers" if _NUMBERS[name] == "iu" else "numbers"
            return f"a list of {numbers}" + " or one number" * (name == "rewards")
        if whole:
            return ""
    if name in BLANKS and len(value) != tokens:
        return f"one entry for each of the {tokens} response tokens"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
