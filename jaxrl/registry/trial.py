"""A loss and an estimator of the user's on a small batch before a run: is there anything to learn?

Their form is checked where they are bound (`contracts`); here it is what they compute.
"""

from typing import Any

import jax
import numpy as np

from jaxrl.array_ops import masked_sum
from jaxrl.functions import Function, place_of_function
from jaxrl.registry.bind import PolicyLoss, bind_estimator, loss_ndim, make_policy_loss
from jaxrl.registry.contracts import ContractError
from jaxrl.registry.memory import as_arrays, initial_state_of
from jaxrl.registry.table import AdvantageEstimatorRegistry, PolicyLossRegistry
from jaxrl.types import Array, TrainBatch

SAME_LOSS = 1e-4  # relative; slopes of a loss on the same log-probs, in float32
REDUCE = (
    "return the loss of each token [B, T] and leave means to trainer.algorithm.loss_reduction, or "
    "register it with batch_statistics=True, so that it sees the whole minibatch"
)
OVER_MASK = "take every mean, sum and quantile over loss_mask (jaxrl.array_ops.masked_mean)"
_WIDEST = 128  # tokens of a row, at most: these numbers are computed, not only traced
_FAILED = -1  # the row whose environment failed


def try_functions(
    algorithm: Any,
    *,
    prompts: int,
    minibatch_prompts: int,
    samples: int,
    tokens: int,
    cuts: bool = True,
) -> None:
    """Call loss and estimator of a config once, each if it is the user's, on numbers as of a run.

    The samples of every other prompt all earn the same; of the last sample the environment failed,
    and its row is masked.

    Args:
        prompts, minibatch_prompts: of a batch, which an estimator sees; of a minibatch, for a loss.
        samples: of each prompt.
        tokens: of the longest row.
        cuts: whether a loss must be the same for half of the rows, and with other numbers outside
            the mask.

    Raises:
        ContractError: a loss that is not finite, has no gradient, or depends on what it must not;
            advantages that are not finite; or see `bind_estimator`, `PolicyLoss`. Names function,
            finding and the user's line.
    """
    tokens = max(min(tokens, _WIDEST), 12)
    estimator = AdvantageEstimatorRegistry.resolve(algorithm.advantage_estimator)
    if estimator not in AdvantageEstimatorRegistry._builtin.values():
        _try_estimator(algorithm, estimator, _batch(prompts, samples, tokens))
    loss = make_policy_loss(algorithm)
    if loss.fn not in PolicyLossRegistry._builtin.values():
        _try_loss(loss, _batch(minibatch_prompts, samples, tokens), cuts)


def _try_estimator(algorithm: Any, func: Function, batch: TrainBatch) -> None:
    names = "response_mask", "index", "loss_mask", "valid_mask", "old_log_probs", "ref_log_probs"
    arrays = {"token_level_rewards": batch.rewards, "values": batch.values}
    arrays |= {name: getattr(batch, name) for name in names}
    assert batch.valid_mask is not None  # `_batch`
    arrays["response_mask"] = batch.response_mask * batch.valid_mask[:, None]  # as in a run
    arrays["reward_terms"] = np.asarray(batch.rewards).sum(-1, keepdims=True)
    arrays["reward_weights"] = np.ones(1, np.float32)
    arrays["turn_rewards"] = arrays["greedy_rewards"] = np.asarray(batch.rewards).sum(-1)
    arrays["turn_states"] = arrays["trajectory"] = np.arange(len(batch.lengths), dtype=np.int32)
    estimate = bind_estimator(algorithm)
    state = as_arrays(estimate.label, initial_state_of(func)) or None
    _, advantages, _ = jax.jit(lambda state, arrays: estimate(state, **arrays))(state, arrays)
    wrong = ~np.isfinite(advantages) & (np.asarray(batch.loss_mask) != 0)
    if not wrong.any():
        return
    row, token = np.argwhere(wrong)[0]
    scores = np.asarray(batch.rewards).sum(-1)
    group = scores[np.asarray(batch.index) == batch.index[row]]
    same = group.max() == group.min()
    fix = "; divide by their deviation + 1e-6, which is 0 here" * bool(same)
    raise ContractError(
        f"advantage estimator '{algorithm.advantage_estimator}' gives the advantage "
        f"{advantages[row, token]:g} to a sample of a prompt whose samples earned "
        f"{np.round(group, 2).tolist()}{fix}{_where(func)}"
    )


def _try_loss(loss: PolicyLoss, batch: TrainBatch, cuts: bool) -> None:
    rng = np.random.default_rng(1)
    assert batch.old_log_probs is not None
    log_probs = _near(batch.old_log_probs, rng, 0.1)
    entropy = np.abs(rng.normal(0, 1, log_probs.shape)).astype(np.float32)

    def total(outputs: tuple[Array, Array], batch: TrainBatch, key: Array) -> Array:
        found, _ = loss(*outputs, batch, key)
        return masked_sum(found, batch.loss_mask) if found.ndim else found

    slope = jax.jit(jax.value_and_grad(total))
    value, gradients = slope((log_probs, entropy), batch, jax.random.key(0))
    if not all(np.isfinite(x).all() for x in (value, *gradients)):
        raise ContractError(
            f"{loss.label} gives the loss {float(value):g}, and a gradient that is not finite "
            "everywhere, for a small batch in which one row is masked everywhere, as where an "
            "environment failed: look for a log or a quotient of 0 (a mean over a mask divides by "
            f"at least 1), and let jnp.where choose before it{_where(loss.fn)}"
        )
    if not any(np.any(x) for x in gradients):
        raise ContractError(
            f"{loss.label} has no gradient: nothing would be learnt. It must depend on log_probs, "
            f"its first argument, and not only on old_log_probs, or on jax.lax.stop_gradient of "
            f"log_probs{_where(loss.fn)}"
        )
    # one number is taken of the whole minibatch, as is a loss that is registered so
    whole = PolicyLossRegistry.has_batch_statistics(loss.algorithm.policy_loss_type)
    if not cuts or whole or loss_ndim(loss.algorithm, log_probs.shape) == 0:
        return

    def slopes(outputs: tuple[Array, Array], batch: TrainBatch) -> np.ndarray:
        return np.stack(slope(outputs, batch, jax.random.key(0))[1], axis=1)  # [B, 2, T]

    outputs, even = (log_probs, entropy), len(log_probs) // 2 * 2
    expected, halves = np.stack(gradients, axis=1), np.zeros((even, 2, log_probs.shape[1]))
    for half in (np.arange(start, even, 2) for start in (0, 1) if even):
        halves[half] = slopes(*jax.tree.map(lambda x, rows=half: x[rows], (outputs, batch)))
    if not _apart(expected[:even], halves) <= SAME_LOSS:
        raise ContractError(
            f"{loss.label}: the loss of a token depends on the other rows of its microbatch, as "
            f"with a mean over them: {REDUCE} (random draws: by row_ids). See `jaxrl doctor "
            f"--only=mask,gradients`{_where(loss.fn)}"
        )
    if not _apart(expected, slopes(*_changed_outside_mask(outputs, batch, rng))) <= SAME_LOSS:
        raise ContractError(
            f"{loss.label} reads numbers of tokens outside loss_mask: {OVER_MASK}. See `jaxrl "
            f"doctor --only=mask,gradients`{_where(loss.fn)}"
        )


def _apart(expected: np.ndarray, found: np.ndarray) -> float:
    """Return how far arrays are apart, relative to the first; NaN where one is not finite."""
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


def _changed_outside_mask(
    outputs: tuple[np.ndarray, np.ndarray], batch: TrainBatch, rng: np.random.Generator
) -> tuple[tuple[np.ndarray, np.ndarray], TrainBatch]:
    """Return outputs and batch with other numbers of the tokens that are not trained."""

    def changed(x: Any, sign: int = 1) -> np.ndarray:
        other = sign * np.abs(rng.normal(0, 1, x.shape)).astype(np.float32)
        return np.where(np.asarray(batch.loss_mask) != 0, x, other)

    log_probs = {
        name: changed(getattr(batch, name), -1)
        for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs")
    }
    batch = batch.replace(advantages=changed(batch.advantages), **log_probs)
    return (changed(outputs[0], -1), changed(outputs[1])), batch


def _where(func: Function) -> str:
    place = place_of_function(func)
    return f" ({place})" if place else ""


def _near(log_probs: Array, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Return other log-probs of the same tokens: below 0, as all are."""
    noise = rng.normal(0, scale, np.shape(log_probs)).astype(np.float32)
    return np.minimum(log_probs + noise, np.float32(-1e-3))


def _batch(prompts: int, samples: int, tokens: int) -> TrainBatch:
    """Make rows of three prompt tokens and a response of some, rewarded on its last one."""
    rng, rows = np.random.default_rng(0), prompts * samples

    def normal(scale: float) -> np.ndarray:
        return rng.normal(0, scale, (rows, tokens)).astype(np.float32)

    lengths = rng.integers(5, tokens + 1, rows).astype(np.int32)
    lengths[0] = tokens
    place, index = np.arange(tokens), np.repeat(np.arange(prompts, dtype=np.int32), samples)
    response = ((place >= 3) & (place < lengths[:, None])).astype(np.float32)
    mask, valid = response.copy(), np.ones(rows, bool)
    scores = rng.uniform(0, 1, rows).astype(np.float32)
    scores = np.where(index % 4 == 0, 1, np.where(index % 4 == 1, 0, scores)).astype(np.float32)
    if rows > 1:  # else nothing is left
        mask[_FAILED], valid[_FAILED], scores[_FAILED] = 0, False, 0
    old = -np.abs(normal(1.0)) - np.float32(1e-3)
    versions = np.where(mask != 0, 3, -1).astype(np.int32)
    return TrainBatch(
        tokens=rng.integers(0, 9, response.shape).astype(np.int32),
        lengths=lengths,
        response_mask=response,
        loss_mask=mask,
        rewards=scores[:, None] * (place == lengths[:, None] - 1).astype(np.float32),
        rollout_log_probs=_near(old, rng, 0.05) * response,
        index=index,
        policy_versions=np.full(rows, 3, np.int32),
        row_ids=np.arange(rows, dtype=np.int32),
        old_log_probs=old * response,
        ref_log_probs=_near(old, rng, 0.3) * response,
        advantages=normal(1.0) * mask,
        values=normal(0.3) * response,
        valid_mask=valid,
        token_versions=versions,
        context_versions=versions,
        demonstrated=np.arange(rows) % samples == samples - 1,
        staleness=(rng.integers(0, 3, response.shape) * mask).astype(np.int32),
    )
