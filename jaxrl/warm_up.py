"""The shapes of a run, known from its data, compiled before its first step.

Lengths vary from batch to batch; shapes only between the buckets of `data.packing.length_bucket`,
or between the fewer ones of `trainer.few_shapes`. Which of them can occur follows from the prompts
and the longest response.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from tqdm import tqdm

from jaxrl.checksums import checksums
from jaxrl.compilation import compile_together, lowering
from jaxrl.config.microbatching import longest_trajectory
from jaxrl.config.rollouts import in_process, keeps_slots, overlaps
from jaxrl.data.microbatches import Microbatching
from jaxrl.data.packing import buckets_between, empty_batch, length_bucket
from jaxrl.rollout.conversation import sampling_of
from jaxrl.rollout.protocol import Request
from jaxrl.types import Prompt

if TYPE_CHECKING:
    from jaxrl.trainer import Trainer


def warm_up(trainer: "Trainer") -> None:
    """Compile what the steps and evaluations of a trainer will run; prints the shapes.

    Rows of zeros, masked everywhere, take the way of real ones. Only the optimizer's own update is
    left to the first step: it would change the state.
    """
    started = time.perf_counter()
    lengths = [len(prompt.tokens) for prompt in trainer.train_prompts]
    generator = trainer.config.generator
    longest = max(lengths) + generator.sampling_params.max_generate_length
    if generator.max_turns > 1:
        longest = longest_trajectory(trainer.config)
    widths = trainer.updater.microbatching.batch_widths(min(lengths) + 1, longest)
    tqdm.write(
        f"shapes: prompts of {_prompt_buckets(trainer.train_prompts)} tokens; rows of {widths} "
        f"tokens; microbatches of {_shapes(trainer.updater.microbatching, widths)}"
    )
    sleeps = in_process(trainer.config) and not overlaps(trainer.config)
    if sleeps:  # as in a step: its copy of the weights is not there during the passes
        trainer.engine.sleep()
    if trainer.config.trainer.few_shapes is True:  # because each takes long
        with lowering(_large_programs(trainer)) as programs:
            for width in widths:
                warm_up_update(trainer, width)
        compile_together(programs.values())
    for width in widths:
        warm_up_update(trainer, width)
    if sleeps:
        trainer.sync_weights(int(trainer.state.step))
    # longest first: the cache then has its length, and shorter ones compile nothing for their own
    for batch in sorted(engine_batches(trainer), key=_longest, reverse=True):
        trainer.engine.warm_up(batch)
    tqdm.write(f"engine: {trainer.engine.describe()}")
    checksums(trainer.state)  # as a save does
    if trainer.policy.moves_reference:
        trainer.policy.moved_reference(trainer.state.params)  # as an epoch's end does
    tqdm.write(f"compiled in {time.perf_counter() - started:.1f} s")


def warm_up_update(trainer: "Trainer", width: int) -> None:
    """Log-probs, values, advantages and gradients of rows with `width` tokens."""
    settings, updater = trainer.config.trainer, trainer.updater
    length = min(width, settings.packed_length or width)
    sampling = trainer.config.generator.sampling_params
    kept = sampling.top_k if sampling.keep_sampling_mask else 0
    scorers = [trainer.scorer, trainer.ref_scorer]
    scorers += [trainer.critic.scorer] if trainer.critic else []
    cuts = {scorer.microbatching for scorer in scorers}
    most = min(cut.total for cut in cuts)  # of a batch; each rounds it up to its own devices
    for rows in sorted({min(size, most) for cut in cuts for size in cut.batch_sizes(length)}):
        empty = empty_batch(rows, width, length, kept=kept, log_probs=sampling.logprobs is not None)
        batch = trainer.add_log_probs(empty)
    batch = _rows(batch, settings.train_batch_size * trainer.samples)
    valid = np.ones(len(batch.lengths), bool)  # as `token_level` says of a batch of a step
    batch = trainer.add_advantages(batch.replace(valid_mask=valid))
    updater.warm_up(trainer.params, _rows(batch, trainer.minibatch_rows))
    if trainer.critic:
        rows = _rows(batch, trainer.critic.minibatch_rows)
        trainer.critic.warm_up(trainer.state.critic, rows)


def _large_programs(trainer: "Trainer") -> list[tuple[Any, str]]:
    """Return the jitted functions that hold the model, for `lowering`."""
    critic = [trainer.critic] if trainer.critic else []
    scorers = {id(s): s for s in (trainer.scorer, trainer.ref_scorer, *(c.scorer for c in critic))}
    updaters = [trainer.updater, *(c.updater for c in critic)]
    gradients = [(u, name) for u in updaters for name in ("accumulate", "pull_back")]
    return [*((scorer, "forward") for scorer in scorers.values()), *gradients]


def engine_batches(trainer: "Trainer") -> Iterator[list[Request]]:
    """Requests with the shapes of every training and evaluation batch."""
    generator, settings = trainer.config.generator, trainer.config.trainer
    evaluated, at_once = len(trainer.eval_prompts), settings.eval_batch_size
    eval_sizes = {min(at_once, evaluated), evaluated % at_once} - {0}
    train = trainer.train_prompts, [settings.train_batch_size], trainer.samples
    evaluation = trainer.eval_prompts, sorted(eval_sizes), generator.eval_n_samples_per_prompt
    phases = ((train, generator.sampling_params), (evaluation, generator.eval_sampling_params))
    for (prompts, sizes, samples), params in phases:
        if params is None or not prompts:
            continue
        inputs = _prompt_buckets(prompts)
        if generator.max_turns > 1:  # later turns have inputs of any length
            assert generator.max_input_length is not None  # resolved
            inputs = buckets_between(inputs[0], generator.max_input_length)
        for size, width in itertools.product(sizes, inputs):
            keys = ((0, 0),) * samples
            sampling = sampling_of(params, trainer.eos_token_ids)
            over = (Future(),) * samples if keeps_slots(generator) else ()
            yield [Request((0,) * width, keys, sampling, conversations=over)] * size


def _shapes(settings: Microbatching, widths: Sequence[int]) -> str:
    """All shapes of the model's rows, "rows x tokens"."""
    wide = (settings.width(width) for width in widths)
    shapes = [(n, settings.length(width)) for width in wide for n in settings.row_counts(width)]
    return ", ".join(f"{rows} x {length}" for rows, length in dict.fromkeys(shapes))


def _prompt_buckets(prompts: Sequence[Prompt]) -> list[int]:
    return sorted({length_bucket(len(prompt.tokens)) for prompt in prompts})


def _longest(batch: Sequence[Request]) -> int:
    return max(len(r.prompt_tokens) + r.sampling.max_tokens for r in batch)


def _rows(tree: Any, rows: int) -> Any:
    """Host arrays with their rows repeated or cut to `rows`."""
    return jax.tree.map(lambda x: np.resize(x, (rows, *x.shape[1:])), tree)
