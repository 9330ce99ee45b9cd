"""Only what the policy sampled is trained, and nothing outside the loss mask counts."""

from collections.abc import Iterator

import jax
import numpy as np

from jaxrl.data.columns import trajectory_numbers
from jaxrl.data.packing import length_bucket
from jaxrl.tools.doctor.bounds import EXACT, gradient_bounds
from jaxrl.tools.doctor.finding import Finding, Unavailable, failed, not_here, passed
from jaxrl.tools.doctor.gradients import NO_GRADIENT, SAME_LOSS
from jaxrl.tools.doctor.measure import (
    compare,
    gradient,
    gradient_in_order,
    longest_first,
    loss_slopes,
    slopes_in_order,
    whole,
    widened,
)
from jaxrl.tools.doctor.subject import Subject
from jaxrl.training.rewards import advantages_of
from jaxrl.types import TrainBatch

COLUMNS = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages")
SAME_ADVANTAGES = 1e-5  # relative, float32


def tokens(subject: Subject) -> Finding:
    """Check that every token in the loss mask is one that the engine drew."""
    batch = subject.collated
    mask, versions = np.asarray(batch.loss_mask) > 0, batch.token_versions
    wrong = mask & (np.asarray(batch.response_mask) == 0)
    if versions is not None:
        wrong |= mask & (np.asarray(versions) < 0)
    said = {tuple(completion.tokens) for completion in subject.engine.said.values()}
    for row, start, end in _runs(mask) if said else ():
        run = tuple(np.asarray(batch.tokens)[row, start:end].tolist())
        if not any(_within(run, tokens) for tokens in said):
            wrong[row, start:end] |= ~_drawn(run, said)
    about = f"{int(mask.sum())} trained tokens against what the engine drew"
    if not wrong.any():
        return passed(0, 0, about)
    row, place = (int(x[0]) for x in np.nonzero(wrong))
    where = "prompt or padding" if batch.response_mask[row, place] == 0 else "an observation"
    ids = np.asarray(batch.tokens)[row, place : place + 8].tolist()
    text = subject.run.tokenizer.decode(ids)
    return failed(
        int(wrong.sum()),
        0,
        about,
        cause="a wrong mask: loss_mask is 1 on tokens that the policy did not sample, first in "
        f"row {row}, token {place} ({where}): {text!r}",
        fix="in your generator give loss_masks 1 to the tokens of the engine's completions alone, "
        "0 to prompts, observations and what a template adds",
    )


def _runs(mask: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield row, first and one after the last of every run of trained tokens."""
    edges = np.diff(np.pad(mask.astype(int), ((0, 0), (1, 1))), axis=1)
    starts, ends = np.argwhere(edges > 0), np.argwhere(edges < 0)
    for (row, start), (_, end) in zip(starts.tolist(), ends.tolist(), strict=True):
        yield row, start, end


def _within(run: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    size = len(run)
    return any(tokens[i : i + size] == run for i in range(len(tokens) - size + 1))


def _drawn(run: tuple[int, ...], said: set[tuple[int, ...]]) -> np.ndarray:
    """Return which tokens of a run are covered by whole completions in it, [n] bool."""
    found = np.zeros(len(run), bool)
    for tokens in said:
        for i in range(len(run) - len(tokens) + 1):
            if tokens and run[i : i + len(tokens)] == tokens:
                found[i : i + len(tokens)] = True
    return found


def outside(subject: Subject) -> Finding:
    """Check that numbers outside the loss mask and tokens in the padding change no gradient."""
    minibatch, updater = subject.minibatch, subject.trainer.updater
    params, one = subject.trainer.params, whole(updater, len(minibatch.index))
    noisy = perturbed(minibatch, subject.trainer.eos_token_ids[0])
    expected = gradient(updater, params, minibatch, one)
    figure, where = compare(expected, gradient(updater, params, noisy, one))
    bound = EXACT.gradient  # the same program, whatever its precision
    about = "advantages and log-probs outside the loss mask, and padding tokens, changed"
    if figure <= bound:
        return passed(figure, bound, about)
    if np.isnan(figure):
        raise Unavailable(NO_GRADIENT)
    outputs = updater.forward_pass(params, minibatch, microbatching=one, with_entropy=True)
    parts = (loss_slopes(updater, outputs, part, one) for part in (minibatch, noisy))
    name = subject.run.config.trainer.algorithm.policy_loss_type
    if compare(*parts).relative > SAME_LOSS:
        cause = f"a wrong mask: policy loss '{name}' reads numbers of tokens outside loss_mask"
        fix = "take every mean, sum and quantile over loss_mask (jaxrl.array_ops.masked_mean)"
    else:
        cause = f"the model sees padding tokens; the largest part of the difference is in {where}"
        fix = "let no token attend to segment 0, or to tokens after it"
    return failed(figure, bound, about, cause=cause, fix=fix)


def perturbed(batch: TrainBatch, token: int) -> TrainBatch:
    """Return the batch with noise where nothing may be read.

    Args:
        token: for the padding.
    """
    rng, empty = np.random.default_rng(1), np.asarray(batch.loss_mask) == 0
    held = {name: getattr(batch, name) for name in COLUMNS}
    changed = {
        name: np.where(empty, x + rng.normal(0, 3, x.shape), x).astype(np.float32)
        for name, x in held.items()
        if x is not None
    }
    beyond = np.arange(batch.tokens.shape[1]) >= np.asarray(batch.lengths)[:, None]
    return batch.replace(tokens=np.where(beyond, token, batch.tokens).astype(np.int32), **changed)


def padding(subject: Subject) -> Finding:
    """Check that rows with more columns of padding give the same gradient."""
    trainer = subject.trainer
    updater, params = trainer.updater, trainer.params
    minibatch = longest_first(subject.minibatch)  # as `gradient` has them: width alone differs
    one, bound = whole(updater, len(minibatch.index)), gradient_bounds(subject.run.config).gradient
    width = one.width(int(np.asarray(minibatch.lengths).max()))
    wider = length_bucket(width + 1)
    expected = gradient(updater, params, minibatch, one)
    figure, where = compare(expected, gradient_in_order(updater, params, minibatch, wider))
    about = f"rows of {width} tokens against the same padded to {wider}"
    if figure <= bound:
        return passed(figure, bound, about)
    if np.isnan(figure):
        raise Unavailable(NO_GRADIENT)
    name = trainer.config.trainer.algorithm.policy_loss_type
    cause = (
        f"a wrong mask: policy loss '{name}' counts padding, or ignores loss_mask: it divides by "
        "the size of [B, T] instead of by the trained tokens"
    )
    fix = "divide by loss_mask.sum() (jaxrl.array_ops.masked_mean), or return [B, T] unreduced"
    outputs = updater.forward_pass(params, minibatch, microbatching=one, with_entropy=True)
    slopes = loss_slopes(updater, outputs, minibatch, one)
    wide = (np.pad(x, ((0, 0), (0, wider - x.shape[1]))) for x in outputs)
    there = slopes_in_order(updater, tuple(wide), widened(minibatch, wider))
    if compare(slopes, [x[:, : slopes[0].shape[1]] for x in there]).relative <= SAME_LOSS:
        cause = f"the model's forward pass depends on padding; most of it in {where}"
        fix = "let no token attend to segment 0"
    return failed(figure, bound, about, cause=cause, fix=fix)


def advantages(subject: Subject) -> Finding:
    """Check that advantages of sampled tokens depend on neither padding nor the order of rows."""
    trainer, batch = subject.trainer, subject.trainer.add_log_probs(subject.collated)
    if type(trainer).add_advantages.__qualname__ != "Trainer.add_advantages":
        return not_here(f"{type(trainer).__name__} has its own add_advantages")
    rng = np.random.default_rng(2)
    drawn = rng.normal(size=batch.rewards.shape).astype(np.float32)
    batch = batch.replace(rewards=drawn * np.asarray(batch.response_mask))
    wide = widened(batch, length_bucket(batch.tokens.shape[1] + 1))
    order = shuffled_trajectories(batch)
    shuffled = jax.tree.map(lambda x: np.asarray(x)[order], batch)
    narrow, wider, other = (advantages_of(trainer.estimate, x) for x in (batch, wide, shuffled))
    mask, columns = np.asarray(batch.loss_mask), batch.tokens.shape[1]
    back = [np.asarray(x)[np.argsort(order)] for x in other]
    left, right, there = (
        [np.asarray(x)[:, :columns] * mask for x in xs] for xs in (narrow, wider, back)
    )
    padded, moved = (compare(left, x).relative for x in (right, there))
    figure = max(padded, moved)
    about = f"random rewards, rows of {columns} tokens against {wide.tokens.shape[1]}, and shuffled"
    name = trainer.config.trainer.algorithm.advantage_estimator
    if figure <= SAME_ADVANTAGES or not any(x.any() for x in left):
        return passed(0.0 if np.isnan(figure) else figure, SAME_ADVANTAGES, about)
    cause = f"a wrong mask: advantage estimator '{name}' counts padding"
    fix = "take means over response_mask (jaxrl.array_ops.masked_mean)"
    if not padded > SAME_ADVANTAGES:
        cause = f"advantage estimator '{name}' depends on the place of a row in its batch"
        fix = "find the samples of a prompt by index, not by their place"
    return failed(figure, SAME_ADVANTAGES, about, cause=cause, fix=fix)


def shuffled_trajectories(batch: TrainBatch) -> np.ndarray:
    """Return an order of rows [B] in which the rows of a trajectory stay neighbours."""
    last = batch.is_last_step
    numbers = np.arange(len(batch.index)) if last is None else trajectory_numbers(last)
    places = np.random.default_rng(4).permutation(int(numbers[-1]) + 1)
    return np.argsort(places[numbers], kind="stable")
