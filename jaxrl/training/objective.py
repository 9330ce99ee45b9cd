"""The objective of a minibatch, from the outputs of the model to a number: policy and critic.

    objective = sum_bt w_bt loss_bt + kl_loss_coef sum_bt k_bt kl_bt - entropy_loss_coef sum_bt e_bt
    H_bt - positive_nll_coef sum_bt p_bt log_probs_bt
    + distillation.coef sum_bt d_bt D(teacher, student)_bt
    + router_balance_loss_coef balance + router_z_loss_coef z                     (policy)
    objective = sum_bt v_bt value_loss_bt                                         (critic)

with weights w, k, e, p, d of the whole minibatch; w and d hold the reduction and the off-policy
correction. With a teacher w has distillation.policy_loss_coef before it.
Only sums are taken afterwards, so the gradient does not depend on the number of microbatches, on
padding, or on the mesh.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.array_ops import Array, BoolBT, FloatBT, FloatScalar, MaskBT, masked_sum
from jaxrl.config.objective_requirements import distills, entropy_is_adaptive
from jaxrl.data.packing import beside_tokens
from jaxrl.losses.kl import approximate_kl, unbiased_kl
from jaxrl.losses.off_policy import correction_enabled, off_policy_correction
from jaxrl.losses.opsm import off_policy_sequence_mask
from jaxrl.losses.reduction import reduction_weights
from jaxrl.losses.top_entropy import top_entropy_mask
from jaxrl.losses.value import value_loss
from jaxrl.parallel import fetch
from jaxrl.parallel.jit_once import Bound, shapes_once
from jaxrl.registry import PolicyLossRegistry, accepted_keywords
from jaxrl.registry.bind import OPTIONAL, PolicyLoss, make_policy_loss
from jaxrl.registry.contracts import loss_and_metrics, raised_by
from jaxrl.training.loads import load_metrics
from jaxrl.training.ratios import add_ratio_sums, ratio_metrics, ratio_sums
from jaxrl.types import TrainBatch

Metrics = dict[str, Any]  # arrays; under RATIOS and LOADS a dict of them, which are sums
RATIOS, LOADS = "ratios", "loads"
ROUTER_LOSSES = {  # by field of `RouterTerms` the coefficient
    "balance": "router_balance_loss_coef",
    "z": "router_z_loss_coef",
}
MISMATCH = "rollout_train_logprobs_abs_diff"
OF_FIRST_UPDATE = (MISMATCH, "router_differs")  # of sampler and trainer; later ones are farther


@dataclass(frozen=True)
class Objective:
    """Describe what an update minimises, of the outputs [B, T] of a forward pass.

    Equal ones are one program, see `jit_once`.

    Attributes:
        loss: (*outputs, batch, weights, key) -> (number, metrics); a sum over tokens, which
            microbatches take in parts.
        weights: minibatch, and by keyword what the run knows at this step -> (weights of its
            tokens, metrics), fixed by the whole minibatch.
        sees_whole: minibatch -> whether it is no such sum, and `loss` must see it as a whole.
        reads: which of `OPTIONAL` it looks at.
    """

    loss: Callable[..., tuple[Array, Metrics]]
    weights: Callable[..., tuple[Any, Metrics]]
    sees_whole: Callable[[TrainBatch], bool] = lambda minibatch: False
    reads: frozenset[str] = frozenset()

    def seen(self, minibatch: TrainBatch) -> TrainBatch:
        """Return what `loss` is called with: nothing it does not read is moved, or compiled for."""
        unread = set(OPTIONAL) - self.reads
        # the model's rows have what is beside tokens
        return minibatch.replace(**dict.fromkeys((*beside_tokens(minibatch), "taught", *unread)))


class TokenWeights(struct.PyTreeNode):
    """Hold the weights [B, T] of the terms of the policy's objective."""

    policy: FloatBT  # the reduction, times the off-policy correction
    kl: FloatBT  # sequence mean, as SkyRL's
    entropy: FloatBT  # token mean; also the weight of every logged mean
    kl_as_loss: FloatBT | None = None  # of the KL, where it is averaged as the loss is
    bonus: FloatBT | None = None  # of the entropy with its coefficient, where this one is adaptive
    positive: FloatBT | None = None  # mean over the tokens of rows with a reward above 0
    taught: FloatBT | None = None  # as `policy`, over the tokens that a teacher has a word on


def minibatch_weights(
    minibatch: TrainBatch,
    algorithm: Any,
    *,
    block_rows: int,
    entropy_coef: FloatScalar | None = None,
) -> tuple[TokenWeights, Metrics]:
    """Return the weights of a minibatch, and the metrics of its off-policy correction.

    Args:
        minibatch: with old_log_probs if there is a correction.
        block_rows: rows of a block of token_mean_legacy.
        entropy_coef: of this step, where it is adaptive; None = that of the config.
    """
    adaptive = entropy_is_adaptive(algorithm)
    if adaptive and entropy_coef is None:
        entropy_coef = algorithm.entropy_loss_coef
    settings = algorithm.off_policy_correction
    corrected = correction_enabled(settings)
    log_probs = (minibatch.old_log_probs, minibatch.rollout_log_probs) if corrected else None
    return _minibatch_weights(
        minibatch.loss_mask,
        minibatch.index,
        log_probs,
        np.float32(entropy_coef) if adaptive else None,
        minibatch.rewards if algorithm.positive_nll_coef else None,
        minibatch.taught if distills(algorithm) else None,
        settings=settings,
        kl_as_loss=algorithm.use_kl_loss and algorithm.kl_loss_reduction == "loss",
        reduction=algorithm.loss_reduction,
        max_seq_len=algorithm.max_seq_len,
        block_rows=block_rows,
    )


@functools.partial(
    jax.jit,
    static_argnames=("settings", "reduction", "kl_as_loss", "max_seq_len", "block_rows"),
)
def _minibatch_weights(
    mask: Array,
    index: Array,
    log_probs: tuple[Array, Array] | None,
    entropy_coef: FloatScalar | None,
    rewards: FloatBT | None,
    taught: MaskBT | None,
    *,
    settings: Any,
    reduction: str,
    kl_as_loss: bool,
    max_seq_len: int | None,
    block_rows: int,
) -> tuple[TokenWeights, Metrics]:
    correction, counted, metrics = jnp.ones_like(mask), mask, {}
    if log_probs is not None:
        correction, kept, metrics = off_policy_correction(*log_probs, mask, settings)
        correction *= kept != 0
        counted = kept if settings.renormalize else mask
    as_loss = functools.partial(
        reduction_weights,
        kind=reduction,
        max_seq_len=max_seq_len,
        group_ids=jnp.unique(index, return_inverse=True, size=index.shape[0])[1],
        microbatch_rows=block_rows,
    )
    token_mean, positive = reduction_weights(mask, "token_mean"), None
    if rewards is not None:
        right = mask * (rewards.sum(-1, keepdims=True) > 0)
        positive = reduction_weights(right, "token_mean")
    weights = TokenWeights(
        policy=as_loss(counted) * correction,
        kl=reduction_weights(mask, "sequence_mean"),
        entropy=token_mean,
        kl_as_loss=as_loss(mask) if kl_as_loss else None,
        bonus=None if entropy_coef is None else entropy_coef * token_mean,
        positive=positive,
        taught=None if taught is None else as_loss(counted * taught) * correction,
    )
    return weights, metrics


def policy_objective(algorithm: Any, block_rows: int, routers: tuple[str, ...] = ()) -> Objective:
    """Make the objective of policy loss, KL and entropy of the config.

    The outputs that it takes are log-probs and entropy, the divergence from a teacher if there is
    one, and those of `routers`.

    Args:
        algorithm: the AlgorithmConfig.
        block_rows: rows that token_mean_legacy takes its means over.
        routers: fields of `RouterTerms`, of which two are losses and one is logged.

    Raises:
        ValueError: see `make_policy_loss`.
    """
    policy_loss = make_policy_loss(algorithm)
    return Objective(
        make_objective(policy_loss, routers),
        Bound(minibatch_weights, algorithm=algorithm, block_rows=block_rows),
        Bound(_sees_whole, policy_loss),
        frozenset(accepted_keywords(policy_loss.fn, dict.fromkeys(OPTIONAL))),
    )


def _sees_whole(policy_loss: PolicyLoss, minibatch: TrainBatch) -> bool:
    algorithm = policy_loss.algorithm
    array = jax.ShapeDtypeStruct(minibatch.tokens.shape, jnp.float32)
    key = shapes_once(jax.random.key, 0)
    loss, _ = shapes_once(policy_loss, array, array, minibatch, key)
    statistics = PolicyLossRegistry.has_batch_statistics(algorithm.policy_loss_type)
    return loss.ndim == 0 or statistics or chooses_tokens(algorithm)


def make_objective(
    policy_loss: PolicyLoss, routers: tuple[str, ...] = ()
) -> Callable[..., tuple[Array, Metrics]]:
    """Make `(log_probs, entropy, *others, batch, weights, key) -> (objective, metrics)`.

    The objective is the sum of all terms. The others are the divergence from a teacher, if there is
    one, and the `RouterTerms` named in `routers`.
    """

    if routers:
        return Bound(objective_with_routers, policy_loss, routers)
    return Bound(objective, policy_loss)


def objective(
    policy_loss: PolicyLoss, log_probs: FloatBT, entropy: FloatBT, *rest: Any
) -> tuple[Array, Metrics]:
    """Return the sum of all terms of a microbatch [] and its metrics, see `make_objective`."""
    algorithm = policy_loss.algorithm
    *others, batch, weights, key = rest
    mask = batch.loss_mask
    with jax.named_scope("loss"):
        # `policy_loss(...)`, written out: from here it is one frame to the formula
        positional, by_name = policy_loss.arguments(log_probs, entropy, batch, key)
        with raised_by(policy_loss.label):
            result = policy_loss.fn(*positional, **by_name)
        loss, loss_metrics = loss_and_metrics(policy_loss.label, result, log_probs.shape)
        kept, more = learnt_tokens(algorithm, log_probs, entropy, batch)
        if kept is not None:
            loss, loss_metrics = jnp.where(kept, loss, 0), loss_metrics | more
        policy = _reduced(loss, weights.policy, algorithm)
        taught = weights.taught is not None
        total = algorithm.distillation.policy_loss_coef * policy if taught else policy
        metrics = {
            "policy_loss": policy,
            "policy_entropy": masked_sum(entropy, weights.entropy),
            RATIOS: ratio_sums(log_probs, batch, algorithm.eps_clip_low, algorithm.eps_clip_high),
        }
        if batch.old_log_probs is None or algorithm.old_log_probs == "rollout":
            metrics |= mismatch(log_probs, batch, weights)
        if weights.bonus is not None:
            total -= masked_sum(entropy, weights.bonus)
        elif algorithm.use_entropy_loss:
            total -= algorithm.entropy_loss_coef * metrics["policy_entropy"]
        if algorithm.use_kl_loss and batch.ref_log_probs is not None:
            ref, kind = batch.ref_log_probs, algorithm.kl_estimator_type
            if algorithm.use_unbiased_kl:
                kl = unbiased_kl(log_probs, positional[1], ref, mask, kind)
            else:
                kl = approximate_kl(log_probs, ref, mask, kind)
            as_loss = weights.kl_as_loss
            metrics["policy_kl"] = masked_sum(kl, weights.kl if as_loss is None else as_loss)
            total += algorithm.kl_loss_coef * metrics["policy_kl"]
        if taught:
            metrics["teacher_divergence"] = masked_sum(others[0], weights.taught)
            total += algorithm.distillation.coef * metrics["teacher_divergence"]
        if weights.positive is not None:
            metrics["positive_nll"] = -masked_sum(log_probs, weights.positive)
            total += algorithm.positive_nll_coef * metrics["positive_nll"]
    metrics["final_loss"] = total
    for name, value in loss_metrics.items():
        metrics[f"loss_metrics/{name}"] = reduce_metric(name, value, mask, weights.entropy)
    return total, jax.lax.stop_gradient(metrics)


def objective_with_routers(
    policy_loss: PolicyLoss,
    routers: tuple[str, ...],
    log_probs: FloatBT,
    entropy: FloatBT,
    *rest: Any,
) -> tuple[Array, Metrics]:
    """Return the objective with the losses of routers, and its metrics, see `make_objective`."""
    batch, weights, key = rest[-3:]
    terms = rest[-3 - len(routers) : -3]
    total, metrics = objective(policy_loss, log_probs, entropy, *rest)
    share = weights.kl.sum(axis=1)  # of each trajectory in the mean over them
    for name, x in zip(routers, terms, strict=True):
        if name not in ROUTER_LOSSES:
            metrics[f"router_{name}"] = masked_sum(x, weights.entropy)
            continue
        loss = jnp.sum(share * x.sum(axis=1))
        total += getattr(policy_loss.algorithm, ROUTER_LOSSES[name]) * loss
        metrics[f"router_{name}_loss"] = loss
    return total, jax.lax.stop_gradient(metrics | {"final_loss": total})


def learnt_tokens(
    algorithm: Any, log_probs: FloatBT, entropy: FloatBT, batch: TrainBatch
) -> tuple[BoolBT | None, Metrics]:
    """Return which tokens [B, T] have a policy loss, None = all, and metrics of it.

    Beside those that the off-policy correction drops: it depends on the policy as it is now.
    """
    kept, metrics = None, {}
    if algorithm.opsm_delta is not None:
        sampled, advantages = batch.rollout_log_probs, batch.advantages
        assert sampled is not None  # validation asks for them
        assert advantages is not None
        delta = algorithm.opsm_delta
        mask, metrics = off_policy_sequence_mask(
            log_probs, sampled, advantages, batch.loss_mask, delta
        )
        kept = mask != 0
    if chooses_tokens(algorithm):
        share = algorithm.top_entropy_quantile
        high = top_entropy_mask(entropy, batch.loss_mask, share, batch.row_ids) != 0
        kept = high if kept is None else kept & high
    return kept, metrics


def chooses_tokens(algorithm: Any) -> bool:
    """Return whether only some tokens of a minibatch have a policy loss, by their entropy."""
    return algorithm.top_entropy_quantile < 1


class ValueWeights(struct.PyTreeNode):
    """Hold the weights [B, T] of the critic's loss."""

    loss: FloatBT  # sequence mean, as SkyRL's
    mean: FloatBT  # token mean, of every logged mean


def value_objective(value_clip: float | None) -> Objective:
    """Make the objective of the critic: its loss, averaged over each sequence and over sequences.

    The output that it takes is values.

    Args:
        value_clip: see `value_loss`.
    """

    return Objective(Bound(critic_objective, value_clip), _value_weights)


def critic_objective(
    value_clip: float | None, values: FloatBT, batch: TrainBatch, weights: ValueWeights, key: Array
) -> tuple[Array, Metrics]:
    """Return the critic's loss of a microbatch [] and its metrics, see `value_objective`."""
    del key  # nothing is drawn
    old_values, returns = batch.values, batch.returns
    assert old_values is not None
    assert returns is not None
    with jax.named_scope("value_loss"):
        per_token, loss_metrics = value_loss(
            values, old_values, returns, value_clip, batch.loss_mask
        )
        total = masked_sum(per_token, weights.loss)
    metrics = {
        "critic_loss": total,
        "values_mean": masked_sum(values, weights.mean),
        "values_clipfrac": masked_sum(loss_metrics["clipfrac"], weights.mean),
    }
    return total, jax.lax.stop_gradient(metrics)


@jax.jit
def _weights_of_values(mask: Array) -> ValueWeights:
    sequence_mean, token_mean = (
        reduction_weights(mask, kind) for kind in ("sequence_mean", "token_mean")
    )
    return ValueWeights(sequence_mean, token_mean)


def _value_weights(minibatch: TrainBatch) -> tuple[ValueWeights, Metrics]:
    return _weights_of_values(minibatch.loss_mask), {}


def _reduced(loss: Array, weights: Array, algorithm: Any) -> Array:
    """Sum the weighted loss [B, T]; a loss that is one number has done its own reduction."""
    if loss.ndim:
        return masked_sum(loss, weights)
    if correction_enabled(algorithm.off_policy_correction):
        raise ValueError(
            f"policy loss '{algorithm.policy_loss_type}' returned one number: "
            "trainer.algorithm.off_policy_correction weighs the loss of each token and would have "
            "no effect. Return the loss of each token [B, T], or turn the correction off"
        )
    return loss


def mismatch(log_probs: FloatBT, batch: TrainBatch, weights: TokenWeights) -> Metrics:
    """Measure how far sampler and trainer are apart on the log-probs of the sampled tokens.

    Args:
        log_probs: [B, T] of the policy.
        weights: of the minibatch's tokens, [B, T] each.
    """
    if batch.rollout_log_probs is None:
        return {}
    difference = jnp.abs(log_probs - batch.rollout_log_probs)
    return {
        f"{MISMATCH}_mean": masked_sum(difference, weights.entropy),
        f"{MISMATCH}_max": jnp.max(difference, initial=0.0, where=batch.loss_mask != 0),
    }


def reduce_metric(name: str, value: Array, mask: MaskBT, weights: FloatBT) -> Array:
    """Reduce a loss's metric [B, T] or [] to this microbatch's part of it.

    `_max` and `_min` by name; else the share of the masked mean (a number counts by its tokens).

    Args:
        mask, weights: [B, T]; the weights are those of a mean over the whole minibatch.
    """
    if name.endswith("_max"):
        return jnp.max(value, initial=-jnp.inf, where=mask != 0) if value.ndim else value
    if name.endswith("_min"):
        return jnp.min(value, initial=jnp.inf, where=mask != 0) if value.ndim else value
    return masked_sum(jnp.broadcast_to(value, mask.shape), weights)


def merge_metrics(
    parts: Sequence[Mapping[str, Any]], merge: Callable[[Sequence[float]], Any] = sum
) -> dict[str, float]:
    """Return the metrics of a whole from those of its parts: `merge`d, but for `_max` and `_min`.

    Microbatches hold shares of a minibatch's means (sum); a step's are the mean over minibatches.
    """
    by_name = {"_max": max, "_min": min}
    return {
        name: float(by_name.get(name[-4:], merge)([float(part[name]) for part in parts]))
        for name in parts[0]
        if name not in (RATIOS, LOADS)
    }


def step_metrics(
    updates: Sequence[tuple[Sequence[Metrics], Metrics]], role: str = "policy"
) -> dict[str, float]:
    """Return the metrics of a step from those of its updates: (of each microbatch, of the whole).

    Ratios are those of all its updates together. The difference of sampler and trainer is that of
    the first update; later ones would add what the updates before them have changed.
    """
    updates = fetch(updates)
    merged = [merge_metrics(parts) | whole for parts, whole in updates]
    metrics = merge_metrics(merged, np.mean)
    first = {name: x for name, x in merged[0].items() if name.startswith(OF_FIRST_UPDATE)}
    metrics |= {name: float(x) for name, x in first.items()}
    ratios = [part[RATIOS] for parts, _ in updates for part in parts if RATIOS in part]
    metrics |= ratio_metrics(add_ratio_sums(ratios)) if ratios else {}
    loads = [part[LOADS] for parts, _ in updates for part in parts if LOADS in part]
    metrics |= load_metrics(add_ratio_sums(loads)) if loads else {}
    skipped = sum(int(update["skipped_updates"]) for update in merged)
    return {f"{role}/{n}": x for n, x in metrics.items()} | {f"{role}/skipped_updates": skipped}
