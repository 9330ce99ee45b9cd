"""Compare what losses and estimators would do to the parameters, on one minibatch of a run.

Every variant is the objective of a run with that loss and that estimator: its own log-probs,
advantages, reduction, KL and entropy terms, through the update that such a run makes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl import config as cfg
from jaxrl.config.objective_requirements import needs_reference
from jaxrl.models.transformer import Params
from jaxrl.parallel.offload import on_device
from jaxrl.registry import AdvantageEstimatorRegistry
from jaxrl.registry.memory import first_algorithm_state
from jaxrl.tools.compare.variants import Variant
from jaxrl.training.build import assemble_update
from jaxrl.training.forward_pass import ForwardPass
from jaxrl.training.objective import merge_metrics
from jaxrl.training.ratios import ratio_metrics, ratio_sums
from jaxrl.training.reference import Reference
from jaxrl.training.rewards import make_estimate
from jaxrl.training.update import Updater, minibatches_of_step
from jaxrl.training.weights import Weights
from jaxrl.types import Array, TrainBatch, TrainState

_CHUNK = 1 << 20  # parameters whose products are added at a time


@dataclass(frozen=True)
class Evaluated:
    """Hold what a variant would do to the parameters.

    Attributes:
        loss: its objective, KL and entropy terms included.
        grad_norm: of the gradient with respect to all trained parameters.
        clip_fraction: share of the sampled tokens where its clip, mask or band took effect; None: a
            loss without the metric `clip_ratio`.
        effective_sample_size: see `weight_ess`.
        kl_of_update: `measured_kl` of one update by the run's optimizer, nats per token.
        kl_of_length: the same of a step straight along the gradient, of `Comparison.length`; None:
            the gradient is 0.
    """

    name: str
    loss: float
    grad_norm: float
    clip_fraction: float | None
    effective_sample_size: float | None
    kl_of_update: float
    kl_of_length: float | None


@dataclass(frozen=True)
class Comparison:
    """Hold what variants do on one minibatch.

    Attributes:
        cosine: [N, N] between the gradients; NaN for one that is 0.
        tokens: that the policy sampled.
        ratios: of the minibatch, whatever the loss: `training.ratios.ratio_metrics`.
        length: a tenth of the first variant's update, near enough for a KL to be of second order.
        notes: how the state before the step was come to, in words: where that began, and what was
            not as the run recorded it.
        minibatch: of the step, from 1.
    """

    choices: list[Evaluated]
    cosine: np.ndarray
    tokens: int
    ratios: dict[str, float]
    length: float
    notes: Sequence[str] = ()
    minibatch: int = 1


# ---------------------------------------------------------------- on what


def compare_variants(
    runs: "OtherRuns",
    uids: Sequence[str],
    variants: Sequence[Variant],
    *,
    step: int,
    minibatch: int,
) -> Comparison:
    """Compare the gradients of all variants on one minibatch of a step.

    Args:
        runs: at the state before the step, and afterwards before the minibatch: the run's own
            updates on those before it are made.
        uids: of the trajectories of the step.
        minibatch: from 1, over all passes of the step.

    Raises:
        ValueError: the step has no such minibatch, or nothing counts in it; a loss or an estimator
            raised.
    """
    chosen_minibatch(runs.config, uids, step, minibatch)
    settings = runs.config.trainer
    batch = runs.batch(runs.config)
    # ratios are to the policy before the step, whether or not the run's loss needs its log-probs
    blind = batch.rollout_log_probs is None  # as the batch has scored it, if it has
    old, *_ = runs.scored_once(runs.params, batch, with_entropy=blind)

    def minibatches(whole: TrainBatch) -> list[tuple[TrainBatch, Array]]:
        return minibatches_of_step(
            whole,
            prompts=settings.policy_mini_batch_size,
            passes=settings.update_epochs_per_batch,
            rng_path=(settings.seed, step),
        )

    before = minibatches(batch)[: minibatch - 1]
    measured, _ = minibatches(batch.replace(old_log_probs=old))[minibatch - 1]
    parts = [minibatches(runs.batch(x.config))[minibatch - 1] for x in variants]
    names = ["the run's own objective", *(variant.name for variant in variants)]
    for name, part in zip(names, (measured, *(part for part, _ in parts)), strict=True):
        if not np.asarray(part.loss_mask).any():
            raise ValueError(
                f"minibatch {minibatch} of step {step} has no sampled token that counts for "
                f"{name}; take another --minibatch"
            )
    runs.advance(before)
    return evaluate_variants(runs, variants, parts, measured)


def chosen_minibatch(
    config: cfg.TrainConfig, uids: Sequence[str], step: int, minibatch: int | None
) -> int:
    """Return the number of a minibatch that a step has, over all its passes.

    Args:
        uids: of the trajectories of the step.
        minibatch: that was asked for; None: the last, whose ratios differ most from 1.

    Raises:
        ValueError: it has not.
    """
    settings = config.trainer
    prompts = len(uids) // config.generator.n_samples_per_prompt
    count = -(-prompts // settings.policy_mini_batch_size) * settings.update_epochs_per_batch
    if minibatch is not None and not 1 <= minibatch <= count:
        raise ValueError(f"--minibatch={minibatch}: step {step} has 1 to {count}; take one")
    return count if minibatch is None else minibatch


@dataclass
class OtherRuns:
    """Do a step as runs of other objectives would do it, from the same state and rollouts.

    Attributes:
        make_batch: makes the batch of the step as the run's trainer does, with other parts in the
            place of its own: `config`, `state`, `estimate`, `updater`, `forward_pass`,
            `ref_forward_pass`, `ref_params`.
        config, policy, reference, forward_pass, ref_forward_pass, updater: those of the run.
        state: before the step.
        ref_params: of the reference; None where the run needs none.
        total_steps: of the run, for its learning rates.
    """

    make_batch: Callable[..., TrainBatch]
    config: cfg.TrainConfig
    state: TrainState
    policy: Weights
    reference: Reference
    ref_params: Params | None
    forward_pass: ForwardPass
    ref_forward_pass: ForwardPass
    updater: Updater
    total_steps: int

    def __post_init__(self) -> None:
        self.scored_once, self.ref_scored_once = map(
            ScoredOnce, (self.forward_pass, self.ref_forward_pass)
        )
        self.updaters: dict[Any, Updater] = {}  # a config is hashable, which pyright cannot see
        self.updaters[without_estimator(self.config)] = self.updater

    @property
    def params(self) -> Any:
        """Return all parameters of the policy, on its devices; adapters are on their base."""
        return on_device(self.policy.whole(self.state.params))

    def batch(self, config: cfg.TrainConfig) -> TrainBatch:
        """Return the batch with the log-probs and advantages of a run with this config.

        Args:
            config: differs from the run's in `trainer.algorithm` alone.
        """
        state, algorithm = self.state, config.trainer.algorithm
        coef = algorithm.kl_loss_coef
        if coef != self.config.trainer.algorithm.kl_loss_coef:
            # else that of the KL in the reward is where its controller has brought it
            state = state.replace(kl_coef=np.float32(coef))
        if algorithm.advantage_estimator != self.config.trainer.algorithm.advantage_estimator:
            func = AdvantageEstimatorRegistry.resolve(algorithm.advantage_estimator)
            if first := first_algorithm_state(func, ()):  # of its own memory the run has nothing
                state = state.replace(algorithm_state=(state.algorithm_state or {}) | first)
        return self.make_batch(
            config=config,
            state=state,
            estimate=jax.jit(make_estimate(algorithm)),
            updater=self.updater_of(config),
            forward_pass=self.scored_once,
            ref_forward_pass=self.ref_scored_once,
            ref_params=self._ref_params(config),
        )

    def updater_of(self, config: cfg.TrainConfig) -> Updater:
        """Return the updater of a run with this config, on this run's pass and devices."""
        key: Any = without_estimator(config)
        if key not in self.updaters:
            _, _, self.updaters[key] = assemble_update(
                key, self.forward_pass, self.policy.placement, self.total_steps, self.policy.trained
            )
        return self.updaters[key]

    def advance(self, parts: Iterable[tuple[TrainBatch, Array]]) -> None:
        """Make the run's own updates on minibatches; critic and reference stay where they are."""
        state = self.state.replace(critic=None, ref_params=None)
        for part, key in parts:
            weights, _ = self.updater.weights(part)
            params = self.policy.whole(state.params)
            state, _, _ = self.updater.update(state, part, weights, key, params)
        self.state = state

    def _ref_params(self, config: cfg.TrainConfig) -> Params | None:
        """Return the parameters of the reference; None for a config that needs none.

        They are loaded for the first that needs them, should the run itself have none.
        """
        if not needs_reference(config.trainer.algorithm):
            return None
        if self.ref_params is None:
            self.ref_params = self.reference.params(self.state.ref_params)
        return self.ref_params


class ScoredOnce:
    """Score rows with one set of weights, the same tokens only once."""

    def __init__(self, forward_pass: ForwardPass) -> None:
        self.forward_pass, self.found = forward_pass, {}
        self.microbatching = forward_pass.microbatching

    def __call__(self, params: Any, batch: TrainBatch, **options: Any) -> tuple[np.ndarray, ...]:
        """Return what the forward pass says of a batch; each question is computed once."""
        rows = (np.asarray(x).tobytes() for x in (batch.tokens, batch.loss_mask))
        wanted = *rows, *sorted(options.items())
        if wanted not in self.found:
            self.found[wanted] = self.forward_pass(params, batch, **options)
        return self.found[wanted]


# ---------------------------------------------------------------- what they do


def evaluate_variants(
    runs: OtherRuns,
    variants: Sequence[Variant],
    parts: Sequence[tuple[TrainBatch, Array]],
    measured: TrainBatch,
) -> Comparison:
    """Compare the gradients of the variants, each on its form of the same minibatch.

    Args:
        runs: at the state before the minibatch, without critic and reference.
        parts: of each variant, with the key of the update.
        measured: the minibatch as the run has it, with log-probs before the step; its loss mask
            says on which tokens KLs and ratios are measured.
    """
    policy, state, algorithm = runs.policy, runs.state, runs.config.trainer.algorithm

    def scored(params: Any, rows: TrainBatch, key: Array | None = None) -> tuple[np.ndarray, ...]:
        """Return log-probs and entropy [B, T], in the cuts of the update."""
        cut = runs.updater.microbatching
        return runs.forward_pass(params, rows, microbatching=cut, with_entropy=True, key=key)

    params = runs.params
    before = scored(params, measured)
    found, gradients, length = [], [], 0.0
    for variant, (part, key) in zip(variants, parts, strict=True):
        updater = runs.updater_of(variant.config)
        weights, _ = updater.weights(part)
        grads, pieces = updater.gradients(params, part, weights, key)
        metrics, norm = merge_metrics(jax.device_get(pieces)), float(optax.tree.norm(grads))
        copied: TrainState = jax.tree.map(jnp.copy, on_device(state))  # `apply` takes it over
        updated, along = runs.updater.apply(copied, grads)[0].params, None
        if not found:
            length = float(distance(updated, state.params)) / 10
        if norm and length:
            moved = moved_along(state.params, grads, length / norm)
            along = measured_kl(before, scored(policy.whole(moved), measured), measured)
        evaluated = Evaluated(
            name=variant.name,
            loss=metrics["final_loss"],
            grad_norm=norm,
            clip_fraction=metrics.get("loss_metrics/clip_ratio"),
            effective_sample_size=weight_ess(
                updater, scored(params, part, key), part, weights, key
            ),
            kl_of_update=measured_kl(before, scored(policy.whole(updated), measured), measured),
            kl_of_length=along,
        )
        found.append(evaluated)
        gradients.append(jax.device_get(grads))
    sums = ratio_sums(
        jnp.asarray(before[0]), measured, algorithm.eps_clip_low, algorithm.eps_clip_high
    )
    return Comparison(
        choices=found,
        cosine=cosines(gradients),
        tokens=int((np.asarray(measured.loss_mask) > 0).sum()),
        ratios=ratio_metrics(jax.device_get(sums)),
        length=length,
    )


def without_estimator(config: cfg.TrainConfig) -> cfg.TrainConfig:
    """Return a config that variants of one loss share: its update does not know the estimator."""
    algorithm = {"advantage_estimator": "grpo", "advantage_kwargs": {}}
    changes = {f"trainer.algorithm.{name}": value for name, value in algorithm.items()}
    return cfg.apply_overrides(config, changes)


def weight_ess(
    updater: Updater,
    outputs: tuple[np.ndarray, ...],
    minibatch: TrainBatch,
    weights: Any,
    key: Array,
) -> float | None:
    """Return the effective sample size, as a share, of the weights that a loss gives to tokens.

        u_t = (d loss / d log pi_t) / A_t        (sum |u_t|)^2 / (n sum u_t^2)

    over the n sampled tokens with A_t != 0: the gradient is sum_t u_t A_t grad log pi_t. 1 = every
    token counts alike; importance weights, clips, gates and the reduction make it less. The KL
    to the reference and the entropy are left out.

    Args:
        outputs: log-probs and entropy [B, T] of the parameters.

    Returns:
        None: all advantages are 0, or all weights.
    """
    no_kl = weights.replace(kl=np.zeros_like(weights.kl))
    log_probs, entropy = outputs
    # a teacher and losses of routers have no part in it, and no weight
    taught = updater.options.get("teacher_beta") is not None
    others = taught + len(updater.options.get("routers", ()))
    zeros = (np.zeros_like(minibatch.advantages),) * others
    seen = updater.objective.seen(minibatch)
    (slopes, *_), _ = updater.cotangents(log_probs, entropy, *zeros, seen, no_kl, key)
    advantages = np.asarray(minibatch.advantages, np.float64)
    counted = (np.asarray(minibatch.loss_mask) > 0) & (advantages != 0)
    weight = np.abs(np.asarray(slopes, np.float64)[counted] / advantages[counted])
    squares = float(np.square(weight).sum())
    return float(weight.sum()) ** 2 / (weight.size * squares) if squares else None


@jax.jit
def distance(after: Any, before: Any) -> Array:
    """Return the L2 norm of a step."""
    return optax.tree.norm(jax.tree.map(jnp.subtract, after, before))


@jax.jit
def moved_along(params: Any, grads: Any, scale: Array) -> Any:
    """Return the parameters after a step of plain gradient descent."""
    return jax.tree.map(lambda x, g: x - scale * g, params, grads)


def measured_kl(
    before: tuple[np.ndarray, ...], after: tuple[np.ndarray, ...], minibatch: TrainBatch
) -> float:
    """Return KL(before || after), nats per token: mean of r - 1 - log r, r = after / before.

    Estimated on the recorded tokens, unbiased for those that `before` sampled. Schulman,
    http://joschu.net/blog/kl-approx.html (k3).
    """
    mask = np.asarray(minibatch.loss_mask) > 0
    log_ratio = after[0].astype(np.float64)[mask] - before[0].astype(np.float64)[mask]
    return float(np.mean(np.expm1(log_ratio) - log_ratio))


def cosines(gradients: Sequence[Any]) -> np.ndarray:
    """Return the cosines between gradients [N, N], all parameters as one vector.

    Products are summed in float64.
    """
    total = np.zeros((len(gradients),) * 2)
    for leaves in zip(*map(jax.tree.leaves, gradients), strict=True):
        flat = [np.ravel(leaf) for leaf in leaves]
        for start in range(0, flat[0].size, _CHUNK):
            part = np.stack([x[start : start + _CHUNK] for x in flat]).astype(np.float64)
            total += part @ part.T
    norms = np.sqrt(np.diag(total))
    with np.errstate(invalid="ignore"):
        return np.clip(total / np.outer(norms, norms), -1, 1)
