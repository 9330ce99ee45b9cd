"""Rewards on their way from the environment to the advantages, and what is learnt from them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.advantages.normalize import normalize_advantages
from jaxrl.array_ops import Array, BoolB, FloatBT, FloatScalar, MaskBT, masked_mean
from jaxrl.config import AlgorithmConfig, GeneratorConfig, KLCtrlConfig
from jaxrl.config.objective_requirements import demonstrations_apart, entropy_is_adaptive
from jaxrl.data.columns import last_steps, trajectory_numbers
from jaxrl.data.packing import length_bucket, token_level
from jaxrl.data.selection import soft_overlong_punishment, zero_variance_groups
from jaxrl.losses.adaptive_entropy import adaptive_entropy_coef, used_entropy_coef
from jaxrl.losses.kl import adaptive_kl_coef, approximate_kl, penalized_rewards
from jaxrl.parallel.jit_once import Bound
from jaxrl.registry.bind import AdvantageFunction, bind_estimator
from jaxrl.types import GeneratorOutput, TrainBatch

Metrics = dict[str, float]


def shape_rewards(
    output: GeneratorOutput,
    uids: Sequence[str],
    generator: GeneratorConfig,
    algorithm: AlgorithmConfig,
) -> tuple[GeneratorOutput, Metrics]:
    """Make rewards per token; treat truncated and overlong responses, prompts without differences.

    In this order: what a truncated response loses, soft overlong punishment, zero-variance filter.

    Args:
        uids: prompt of each trajectory.
    """
    metrics: Metrics = {}
    sampled = output["loss_masks"]
    output = token_level(
        output,
        zero_reward_on_non_stop=generator.zero_reward_on_non_stop,
        apply_overlong_filtering=generator.apply_overlong_filtering,
    )
    if algorithm.overlong_buffer is not None:
        output = _punish_overlong(output, sampled, generator, algorithm)
    if algorithm.zero_variance_filter:
        last, tol = last_steps(output), algorithm.zero_variance_filter_tol
        apart = np.zeros(len(uids), bool)  # demonstrations are neither compared nor filtered
        if demonstrations_apart(algorithm):
            apart |= last.get("demonstrated", False)
        judged = [[] if a else mask for mask, a in zip(last["loss_masks"], apart, strict=True)]
        same = zero_variance_groups(last["rewards"], uids, judged, tol=tol) & ~apart
        masks = output["loss_masks"]
        trajectory_of_row = trajectory_numbers(output.get("is_last_step", [True] * len(masks)))
        masks = [
            [0] * len(m) if s else m for m, s in zip(masks, same[trajectory_of_row], strict=True)
        ]
        output = GeneratorOutput({**output, "loss_masks": masks})
        metrics["reward/num_zero_variance_filtered"] = int(same.sum())
    return output, metrics


def _punish_overlong(
    output: GeneratorOutput,
    sampled: Sequence[Sequence[int]],
    generator: GeneratorConfig,
    algorithm: AlgorithmConfig,
) -> GeneratorOutput:
    """Reduce the reward on the last sampled token of every long turn.

    max_generate_length bounds a turn, so each turn is judged by its own length. Of a row per turn
    the last row, which has the reward, has the reductions of all.

    Args:
        sampled: per row 1 where the policy sampled the token: the runs are the turns.
    """
    assert algorithm.overlong_buffer is not None
    buffer, longest = algorithm.overlong_buffer, generator.sampling_params.max_generate_length
    shaped, owed = [], 0.0
    last = output.get("is_last_step", [True] * len(sampled))
    for rewards, mask, is_last in zip(output["rewards"], sampled, last, strict=True):
        edges = np.diff([0, *mask, 0])
        starts, ends = np.flatnonzero(edges > 0), np.flatnonzero(edges < 0)
        lost = soft_overlong_punishment(ends - starts, longest, buffer.len, buffer.penalty_factor)
        if not is_last:
            owed += float(lost.sum())
            shaped.append(rewards)
            continue
        left = np.array(rewards, np.float64)
        left[ends - 1] -= lost
        left[ends[-1:] - 1] -= owed
        shaped.append(left.tolist())
        owed = 0.0
    return GeneratorOutput({**output, "rewards": shaped})


def penalize_kl(
    batch: TrainBatch, coef: FloatScalar, algorithm: AlgorithmConfig
) -> tuple[TrainBatch, Metrics]:
    """Subtract the KL of the old policy to the reference from the rewards.

    Args:
        batch: with old_log_probs and ref_log_probs.
        coef: [] `TrainState.kl_coef`.

    Returns:
        The batch; avg_kl is the mean over sampled rows of their token mean, avg_kl_max that of
        their largest |kl|.
    """
    given = batch.demonstrated  # of what nobody sampled k is no estimate of the KL
    penalized = _penalize_kl(
        batch.rewards,
        batch.old_log_probs,
        batch.ref_log_probs,
        batch.loss_mask,
        np.asarray(coef),
        None if given is None else ~np.asarray(given),
        kind=algorithm.kl_estimator_type,
    )
    rewards, metrics = jax.device_get(penalized)
    return batch.replace(rewards=rewards), {name: float(x) for name, x in metrics.items()}


@functools.partial(jax.jit, static_argnames="kind")
def _penalize_kl(
    rewards: FloatBT,
    old: FloatBT,
    ref: FloatBT,
    mask: MaskBT,
    coef: FloatScalar,
    sampled: BoolB | None,
    *,
    kind: str,
) -> tuple[Array, dict[str, Array]]:
    kl = approximate_kl(old, ref, mask, kind)
    metrics = {
        "loss/avg_kl": masked_mean(masked_mean(kl, mask, -1), sampled),
        "loss/avg_kl_max": masked_mean(jnp.abs(kl).max(-1), sampled),
        "loss/kl_loss_coef": coef,
    }
    return penalized_rewards(rewards, kl, mask, coef), metrics


def next_kl_coef(coef: float, metrics: Metrics, control: KLCtrlConfig, rows: int) -> float:
    """Return the coefficient of the KL in the reward for the next step.

    Args:
        metrics: of `penalize_kl`.
        rows: trajectories of the step.
    """
    if control.type == "fixed" or "loss/avg_kl" not in metrics:
        return coef
    target, horizon = control.kl_target, control.horizon
    kl = metrics["loss/avg_kl"]
    return float(adaptive_kl_coef(coef, kl, kl_target=target, horizon=horizon, rows=rows))


class EntropyControl:
    """Keep the coefficient of the entropy in the loss from step to step, where it is adaptive.

    Attributes:
        initial_state: what it keeps, see `registry.memory`: the coefficient, and the one that the
            next step uses. In the first step this is 0: its entropy is not known yet.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._settings, adaptive = algorithm.entropy_ctrl, entropy_is_adaptive(algorithm)
        first = {"entropy_coef": algorithm.entropy_loss_coef, "entropy_coef_used": 0.0}
        self.initial_state = first if adaptive else {}

    def known(self, memory: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the objective of this step must know, of what is kept."""
        return {"entropy_coef": memory["entropy_coef_used"]} if self.initial_state else {}

    def after(self, memory: Mapping[str, Any], metrics: Metrics) -> dict[str, Any]:
        """Return what is kept after a step with these metrics; {} where nothing is."""
        if not self.initial_state or "policy/policy_entropy" not in metrics:
            return {}
        control, entropy = self._settings, metrics["policy/policy_entropy"]
        coef = adaptive_entropy_coef(
            memory["entropy_coef"],
            entropy,
            target=control.target,
            delta=control.delta,
            maximum=control.max_coef,
        )
        used = used_entropy_coef(coef, entropy, target=control.target)
        return {"entropy_coef": np.float32(coef), "entropy_coef_used": np.float32(used)}


Estimate = Callable[..., tuple[Any, FloatBT, FloatBT]]  # (state, **arrays)


def make_estimate(algorithm: AlgorithmConfig) -> Estimate:
    """Return the configured estimator with the normalisation of its advantages.

    See `bind_estimator`.
    """
    return Bound(
        state_advantages_and_returns,
        bind_estimator(algorithm),
        algorithm.advantage_batch_normalize,
    )


def state_advantages_and_returns(
    estimate: AdvantageFunction, normalize: bool, state: Any = None, **arrays: Array
) -> tuple[Any, FloatBT, FloatBT]:
    """Return the estimator's state, advantages and returns, those normalised if that is asked."""
    state, advantages, returns = estimate(state, **arrays)
    if normalize:
        sampled = arrays["loss_mask"] * arrays["response_mask"]
        advantages = normalize_advantages(advantages, sampled)
    return state, advantages, returns


def of_evidence(batch: TrainBatch, *, apart: bool) -> TrainBatch:
    """Empty rewards and masks of the rows that say nothing about what the policy does.

    Those are trajectories whose environment failed and, where they are `apart`, demonstrations. All
    that an estimator or a critic looks at beside a row goes by a mask: groups, deviations, counts,
    what is normalised over the batch. So neither need know why a row is no evidence.

    Args:
        batch: without a `valid_mask`, failures are the rows that are masked everywhere.
        apart: the loss keeps demonstrations apart, see `losses.row.Loss.demonstrations`.
    """
    valid = batch.valid_mask
    rows = np.asarray(np.any(batch.loss_mask, axis=-1) if valid is None else valid, bool)
    if apart and batch.demonstrated is not None:
        rows = rows & ~np.asarray(batch.demonstrated)
    if rows.all():
        return batch
    names = "rewards", "response_mask", "loss_mask"
    emptied = {name: np.where(rows[:, None], getattr(batch, name), 0) for name in names}
    return batch.replace(valid_mask=rows, **emptied)


def advantages_of(
    estimate: Estimate,
    batch: TrainBatch,
    state: Any = None,
    weights: Mapping[str, float] = MappingProxyType({}),
    per_turn: bool = False,
    apart: bool = False,
) -> tuple[Any, FloatBT, FloatBT]:
    """Return the estimator's state after the batch, advantages and returns [B, T], on the host.

    Of a trajectory with a row per step, the last step's advantage is that of all its rows: the
    estimator sees the last rows alone, every token of them a response. One that is `per_turn` sees
    all rows, and what their turns earned and began with.

    Args:
        estimate: `make_estimate`.
        batch: the whole batch of a step.
        state: of an estimator with memory, before the batch.
        weights: of rewards by name; empty = each counts once.
        per_turn: see `Estimator`; rows are turns.
        apart: samples are not compared with demonstrations, see `of_evidence`; each of these is a
            group of its own.
    """
    seen = of_evidence(batch, apart=apart)
    arrays = {  # by keyword: an estimator may take them all as **kwargs
        "token_level_rewards": seen.rewards,
        "response_mask": seen.response_mask,
        "index": seen.index,
        "loss_mask": seen.loss_mask,
    }
    optional = ("valid_mask", "values", "old_log_probs", "ref_log_probs", "reward_terms")
    optional += ("greedy_rewards",)
    more = {name: getattr(seen, name) for name in optional}
    arrays |= {name: x for name, x in more.items() if x is not None}
    if apart and batch.demonstrated is not None:
        own = int(np.max(batch.index)) + np.cumsum(batch.demonstrated)
        arrays["index"] = np.where(batch.demonstrated, own, batch.index).astype(np.int32)
    known = {}
    if (terms := batch.reward_terms) is not None:
        ones = [1.0] * terms.shape[1]
        known["reward_weights"] = np.array([weights[x] for x in sorted(weights)] or ones, "float32")
    if per_turn:
        assert batch.is_last_step is not None  # validation: rows are turns
        arrays["turn_rewards"], arrays["turn_states"] = batch.turn_rewards, turn_states(batch)
        arrays["trajectory"] = trajectory_numbers(batch.is_last_step)
        rows = len(arrays["index"])
        # the number of turns is another in every step: rows that count nowhere make few of them
        more = length_bucket(rows) - rows
        arrays = {name: _with_rows(np.asarray(x), more) for name, x in arrays.items()}
        arrays["valid_mask"][rows:] = False
        for name in ("index", "turn_states", "trajectory"):
            arrays[name][rows:] = rows + more - 1
        state, advantages, returns = jax.device_get(estimate(state, **arrays, **known))
        return state, advantages[:rows], returns[:rows]
    if batch.is_last_step is None:
        return jax.device_get(estimate(state, **arrays, **known))
    arrays = {name: np.asarray(x)[batch.is_last_step] for name, x in arrays.items()}
    ones = np.ones_like(arrays["response_mask"])
    arrays["response_mask"] = ones * arrays.get("valid_mask", ones[:, 0])[:, None]
    state, advantages, returns = jax.device_get(estimate(state, **arrays, **known))
    trajectory_of_row = trajectory_numbers(batch.is_last_step)
    mask = np.asarray(batch.response_mask)
    return state, advantages[trajectory_of_row] * mask, returns[trajectory_of_row] * mask


def _with_rows(x: np.ndarray, more: int) -> np.ndarray:
    return np.concatenate([x, np.zeros((more, *x.shape[1:]), x.dtype)])


def turn_states(batch: TrainBatch) -> np.ndarray:
    """Return a number [B] for the state in which each turn began, equal where states are.

    A state is a prompt group and what its tokens are since the turn before: what the environment
    said. First turns, and those whose history is not the turn before, have all that they are given.
    """
    tokens, responses = np.asarray(batch.tokens), np.asarray(batch.response_mask)
    assert batch.is_last_step is not None
    trajectory, index = trajectory_numbers(batch.is_last_step), np.asarray(batch.index)
    given = np.where(responses.any(-1), responses.argmax(-1), np.asarray(batch.lengths))
    states: dict[tuple[int, bytes], int] = {}
    found = np.empty(len(tokens), np.int32)
    for row, end in enumerate(given):
        start = 0
        if row and trajectory[row] == trajectory[row - 1]:
            before = int(batch.lengths[row - 1])
            if before <= end and np.array_equal(tokens[row, :before], tokens[row - 1, :before]):
                start = before
        state = int(index[row]), tokens[row, start:end].tobytes()
        found[row] = states.setdefault(state, len(states))
    return found


def nan_advantages(batch: TrainBatch, estimator: str) -> str:
    """Say which advantages are not finite where all that the estimator was given is; "" = none.

    Where that is not, as log-probs of weights that are not finite, the estimator is not to blame;
    the updates are then skipped, and an alarm goes off.

    Args:
        batch: with advantages, before any update uses them.
        estimator: its name, for the error.
    """
    wrong = ~np.isfinite(np.asarray(batch.advantages)) & (np.asarray(batch.loss_mask) != 0)
    if not wrong.any():
        return ""
    given = (batch.rewards, batch.values, batch.old_log_probs, batch.ref_log_probs)
    if not all(np.isfinite(x).all() for x in given if x is not None):
        return ""
    row, token = np.argwhere(wrong)[0]
    group = np.asarray(batch.index) == np.asarray(batch.index)[row]
    earned = np.round(np.asarray(batch.rewards).sum(-1)[group], 4).tolist()
    return (
        f"advantage estimator '{estimator}' gives the advantage "
        f"{np.asarray(batch.advantages)[row, token]:g} to {int(wrong.any(-1).sum())} of "
        f"{len(wrong)} samples; the samples of the first one's prompt earned {earned}. Look "
        "for a quotient or a log of 0"
    )
