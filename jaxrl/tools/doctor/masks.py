"""Only what the policy sampled is trained, and nothing outside the loss mask counts."""

from collections.abc import Iterator

import jax
import numpy as np

from jaxrl.data.columns import trajectory_numbers
from jaxrl.data.packing import length_bucket
from jaxrl.registry.memory import ESTIMATOR
from jaxrl.registry.trial import OVER_MASK
from jaxrl.tools.doctor.examined_run import ExaminedRun
from jaxrl.tools.doctor.finding import (
    EXACT,
    Finding,
    Unavailable,
    failed,
    gradient_bounds,
    not_here,
    passed,
)
from jaxrl.tools.doctor.gradients import NO_GRADIENT, compare, longest_first, of_policy, widened
from jaxrl.types import TrainBatch

COLUMNS = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages")
SAME_ADVANTAGES = 1e-5  # relative, float32


def tokens(examined: ExaminedRun) -> Finding:
    """Check that every token in the loss mask is one that the engine drew."""
    batch = examined.collated
    mask, versions = np.asarray(batch.loss_mask) > 0, batch.token_versions
    wrong = mask & (np.asarray(batch.response_mask) == 0)
    if versions is not None:
        wrong |= mask & (np.asarray(versions) < 0)
    completions = {tuple(completion.tokens) for completion in examined.engine.answers.values()}
    for row, start, end in _runs(mask) if completions else ():
        run = tuple(np.asarray(batch.tokens)[row, start:end].tolist())
        if not any(_within(run, tokens) for tokens in completions):
            wrong[row, start:end] |= ~_drawn(run, completions)
    about = f"{int(mask.sum())} trained tokens against what the engine drew"
    if not wrong.any():
        return passed(0, 0, about)
    row, place = (int(x[0]) for x in np.nonzero(wrong))
    where = "prompt or padding" if batch.response_mask[row, place] == 0 else "an observation"
    ids = np.asarray(batch.tokens)[row, place : place + 8].tolist()
    text = examined.tokenizer.decode(ids)
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


def _drawn(run: tuple[int, ...], completions: set[tuple[int, ...]]) -> np.ndarray:
    """Return which tokens of a run are covered by whole completions in it, [n] bool."""
    found = np.zeros(len(run), bool)
    for tokens in completions:
        for i in range(len(run) - len(tokens) + 1):
            if tokens and run[i : i + len(tokens)] == tokens:
                found[i : i + len(tokens)] = True
    return found


def outside(examined: ExaminedRun) -> Finding:
    """Check that numbers outside the loss mask and tokens in the padding change no gradient."""
    policy, rng = of_policy(examined), np.random.default_rng(1)
    minibatch = policy.minibatch
    untrained = np.asarray(minibatch.loss_mask) == 0
    noisy = {
        name: np.where(untrained, x + rng.normal(0, 3, x.shape), x).astype(np.float32)
        for name in COLUMNS
        if (x := getattr(minibatch, name)) is not None
    }
    beyond = np.arange(minibatch.tokens.shape[1]) >= np.asarray(minibatch.lengths)[:, None]
    tokens = np.where(beyond, examined.trainer.eos_token_ids[0], minibatch.tokens).astype(np.int32)
    expected = policy.gradient()
    numbers = compare(expected, policy._replace(minibatch=minibatch.replace(**noisy)).gradient())
    padding = compare(
        expected, policy._replace(minibatch=minibatch.replace(tokens=tokens)).gradient()
    )
    figure = max(numbers.relative, padding.relative)
    bound = EXACT.gradient  # the same program, whatever its precision
    about = "advantages and log-probs outside the loss mask, and padding tokens, changed"
    if np.isnan(figure):
        raise Unavailable(NO_GRADIENT)
    if figure <= bound:
        return passed(figure, bound, about)
    if numbers.relative > bound:
        name = examined.config.trainer.algorithm.policy_loss_type
        cause = f"a wrong mask: policy loss '{name}' reads numbers of tokens outside loss_mask"
        fix = OVER_MASK
    else:
        cause = f"the model sees padding tokens; most of the difference is in {padding.worst}"
        fix = "let no token attend to segment 0, or to tokens after it"
    return failed(figure, bound, about, cause=cause, fix=fix)


def padding(examined: ExaminedRun) -> Finding:
    """Check that rows with more columns of padding give the same gradient."""
    policy = of_policy(examined)
    # in the order in which the updater has them: width alone differs
    ordered = policy._replace(minibatch=longest_first(policy.minibatch))
    width = policy.whole.width(int(np.asarray(policy.minibatch.lengths).max()))
    wider = length_bucket(width + 1)
    figure, where = compare(ordered.gradient(), ordered.gradient_in_order(wider))
    bound = gradient_bounds(examined.config).gradient
    about = f"rows of {width} tokens against the same padded to {wider}"
    if np.isnan(figure):
        raise Unavailable(NO_GRADIENT)
    if figure <= bound:
        return passed(figure, bound, about)
    name = examined.config.trainer.algorithm.policy_loss_type
    return failed(
        figure,
        bound,
        about,
        cause=f"a wrong mask: policy loss '{name}' counts padding, or ignores loss_mask: it "
        "divides by the size of [B, T] instead of by the trained tokens; or a model of your own "
        f"reads padding; most of the difference is in {where}",
        fix="divide by loss_mask.sum() (jaxrl.array_ops.masked_mean), or return [B, T] unreduced; "
        "in a model let no token attend to segment 0",
    )


def advantages(examined: ExaminedRun) -> Finding:
    """Check that advantages of sampled tokens depend on neither padding nor the order of rows."""
    trainer, batch = examined.trainer, examined.trainer.add_log_probs(examined.collated)
    if type(trainer).add_advantages.__qualname__ != "Trainer.add_advantages":
        return not_here(f"{type(trainer).__name__} has its own add_advantages")
    drawn = np.random.default_rng(2).normal(size=batch.rewards.shape).astype(np.float32)
    batch = batch.replace(rewards=drawn * np.asarray(batch.response_mask))
    wide = widened(batch, length_bucket(batch.tokens.shape[1] + 1))
    order = shuffled_trajectories(batch)
    mask, columns = np.asarray(batch.loss_mask), batch.tokens.shape[1]

    def estimated(rows: TrainBatch) -> list[np.ndarray]:
        found = trainer.estimated(rows, trainer.memory.get(ESTIMATOR))[1:]
        return [np.asarray(x)[:, :columns] for x in found]

    expected = [x * mask for x in estimated(batch)]
    padded = [x * mask for x in estimated(wide)]
    shuffled = estimated(jax.tree.map(lambda x: np.asarray(x)[order], batch))
    moved = [x[np.argsort(order)] * mask for x in shuffled]
    by_padding, by_place = (compare(expected, x).relative for x in (padded, moved))
    figure = max(by_padding, by_place)
    about = f"random rewards, rows of {columns} tokens against {wide.tokens.shape[1]}, and shuffled"
    name = trainer.config.trainer.algorithm.advantage_estimator
    if figure <= SAME_ADVANTAGES or not any(x.any() for x in expected):
        return passed(0.0 if np.isnan(figure) else figure, SAME_ADVANTAGES, about)
    cause = f"a wrong mask: advantage estimator '{name}' counts padding"
    fix = "take means over response_mask (jaxrl.array_ops.masked_mean)"
    if not by_padding > SAME_ADVANTAGES:
        cause = f"advantage estimator '{name}' depends on the place of a row in its batch"
        fix = "find the samples of a prompt by index, not by their place"
    return failed(figure, SAME_ADVANTAGES, about, cause=cause, fix=fix)


def shuffled_trajectories(batch: TrainBatch) -> np.ndarray:
    """Return an order of rows [B] in which the rows of a trajectory stay neighbours."""
    last = batch.is_last_step
    numbers = np.arange(len(batch.index)) if last is None else trajectory_numbers(last)
    places = np.random.default_rng(4).permutation(int(numbers[-1]) + 1)
    return np.argsort(places[numbers], kind="stable")
