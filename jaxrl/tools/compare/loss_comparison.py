"""Losses and estimators on one minibatch of a run: what each would do to the parameters.

Every choice is the objective of a run with that loss and that estimator: its own log-probs,
advantages, reduction, KL and entropy terms, through the update that such a run makes.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl import config as cfg
from jaxrl.config.objective_requirements import needs_reference
from jaxrl.parallel.offload import on_device
from jaxrl.tools.compare.loss_choices import Choice
from jaxrl.trainer import Trainer
from jaxrl.training.build import assemble_update
from jaxrl.training.forward_pass import ForwardPass
from jaxrl.training.objective import merge_metrics
from jaxrl.training.ratios import ratio_metrics, ratio_sums
from jaxrl.training.rewards import make_estimate
from jaxrl.training.update import Updater, minibatches_of_step
from jaxrl.types import Array, GeneratorOutput, TrainBatch, TrainState

_CHUNK = 1 << 20  # parameters whose products are added at a time


@dataclass(frozen=True)
class Evaluated:
    """Hold what a choice would do to the parameters.

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
    """Hold what choices do on one minibatch.

    Attributes:
        cosine: [N, N] between the gradients; NaN for one that is 0.
        tokens: that the policy sampled.
        ratios: of the minibatch, whatever the loss: `watching.ratios.ratio_metrics`.
        length: a tenth of the first choice's update, near enough for a KL to be of second order.
        notes: how the state before the step was come to, in words: where that began, and what was
            not as the run recorded it.
    """

    choices: list[Evaluated]
    cosine: np.ndarray
    tokens: int
    ratios: dict[str, float]
    length: float
    notes: Sequence[str] = ()


# ---------------------------------------------------------------- on what


def compare_choices(
    trainer: Trainer,
    rollouts: tuple[GeneratorOutput, Sequence[str]],
    choices: Sequence[Choice],
    *,
    step: int,
    minibatch: int = 1,
) -> Comparison:
    """Compare the gradients of all choices on one minibatch of a step.

    Args:
        trainer: its state is that before the step, and afterwards that before the minibatch: the
            run's own updates on those before it are made.
        rollouts: of the step, and their uids.
        minibatch: from 1, over all passes of the step.

    Raises:
        ValueError: the step has no such minibatch, or nothing counts in it; a loss or an estimator
            raised.
    """
    check_minibatch(trainer.config, rollouts[1], step, minibatch)
    runs, settings = OtherRuns(trainer, rollouts), trainer.config.trainer
    own = runs.batch(trainer.config)
    # ratios are to the policy before the step, whether or not the run's loss needs its log-probs
    blind = own.rollout_log_probs is None  # as the batch has scored it, if it has
    old, *_ = runs.forward_pass(trainer.params, own, with_entropy=blind)
    measured = own.replace(old_log_probs=old)
    batches = [runs.batch(choice.config) for choice in choices]
    named = {
        "prompts": settings.policy_mini_batch_size,
        "passes": settings.update_epochs_per_batch,
        "names": (settings.seed, step),
    }
    before = minibatches_of_step(own, **named)[: minibatch - 1]
    of_run, *parts = (
        minibatches_of_step(batch, **named)[minibatch - 1] for batch in (measured, *batches)
    )
    names = ["the run's own objective", *(choice.name for choice in choices)]
    for name, (part, _) in zip(names, (of_run, *parts), strict=True):
        if not np.asarray(part.loss_mask).any():
            raise ValueError(
                f"minibatch {minibatch} of step {step} has no sampled token that counts for "
                f"{name}; take another --minibatch"
            )
    advance(trainer, before)
    updaters = [runs.updater(choice.config) for choice in choices]
    return evaluate_choices(trainer, of_run[0], choices, updaters, parts)


def check_minibatch(
    config: cfg.TrainConfig, uids: Sequence[str], step: int, minibatch: int
) -> None:
    """Check that a step has a minibatch of this number, over all its passes.

    Args:
        uids: of the trajectories of the step.

    Raises:
        ValueError: it has not.
    """
    settings = config.trainer
    prompts = len(uids) // config.generator.n_samples_per_prompt
    count = -(-prompts // settings.policy_mini_batch_size) * settings.update_epochs_per_batch
    if not 1 <= minibatch <= count:
        raise ValueError(f"--minibatch={minibatch}: step {step} has 1 to {count}; take one")


class OtherRuns:
    """Do a step as runs of other objectives would do it, from the same state and rollouts."""

    def __init__(self, trainer: Trainer, rollouts: tuple[GeneratorOutput, Sequence[str]]) -> None:
        self.trainer, self.rollouts = trainer, rollouts
        self.forward_pass, self.ref_forward_pass = (
            ScoredOnce(trainer.forward_pass),
            ScoredOnce(trainer.ref_forward_pass),
        )
        self.reference = trainer.ref_params
        self.updaters: dict[Any, Updater] = {}
        self.updaters[without_estimator(trainer.config)] = trainer.updater

    def batch(self, config: cfg.TrainConfig) -> TrainBatch:
        """Return the batch with the log-probs and advantages of a run with this config.

        They are made by the trainer's own methods.

        Args:
            config: differs from the trainer's in `trainer.algorithm` alone.
        """
        run: Any = copy.copy(self.trainer)
        run.config, run.metrics, run.updater = config, {}, self.updater(config)
        run.forward_pass, run.ref_forward_pass = self.forward_pass, self.ref_forward_pass
        run.estimate = jax.jit(make_estimate(config.trainer.algorithm))
        run.ref_params = self._reference(config)
        coef, own = (x.trainer.algorithm.kl_loss_coef for x in (config, self.trainer.config))
        if coef != own:  # else that of the KL in the reward is where its controller has brought it
            run.state = run.state.replace(kl_coef=np.float32(coef))
        output, uids = self.rollouts
        output = run.postprocess_generator_output(GeneratorOutput({**output}), uids)
        return run.add_advantages(run.add_log_probs(run.collate(output)))

    def updater(self, config: cfg.TrainConfig) -> Updater:
        """Return the updater of a run with this config, on the trainer's pass and devices."""
        key: Any = without_estimator(config)  # hashable, which pyright cannot see
        if key not in self.updaters:
            trainer, policy = self.trainer, self.trainer.policy
            given = key, trainer.forward_pass, policy.placement, trainer.total_steps, policy.trained
            self.updaters[key] = assemble_update(*given)[2]
        return self.updaters[key]

    def _reference(self, config: cfg.TrainConfig) -> Any:
        """Return the reference; None for a config that needs none.

        It is loaded for the first that needs it, should the run itself have none.
        """
        if not needs_reference(config.trainer.algorithm):
            return None
        if self.reference is None:
            self.reference = self.trainer.reference.params(self.trainer.state.ref_params)
        return self.reference


class ScoredOnce:
    """Score rows with one set of weights, the same tokens only once."""

    def __init__(self, forward_pass: ForwardPass) -> None:
        self.forward_pass, self.found = forward_pass, {}

    def __call__(self, params: Any, batch: TrainBatch, **options: Any) -> tuple[np.ndarray, ...]:
        wanted = np.asarray(batch.loss_mask).tobytes(), *sorted(options.items())
        if wanted not in self.found:
            self.found[wanted] = self.forward_pass(params, batch, **options)
        return self.found[wanted]


def advance(trainer: Trainer, parts: Iterable[tuple[TrainBatch, Array]]) -> None:
    """Make the run's own updates on minibatches; a critic and a reference stay where they are."""
    state = trainer.state.replace(critic=None, ref_params=None)
    for part, key in parts:
        weights, _ = trainer.updater.weights(part)
        whole = trainer.policy.whole(state.params)
        state, _, _ = trainer.updater.update(state, part, weights, key, whole)
    trainer.state = state


# ---------------------------------------------------------------- what they do


def evaluate_choices(
    trainer: Trainer,
    own: TrainBatch,
    choices: Sequence[Choice],
    updaters: Sequence[Updater],
    parts: Sequence[tuple[TrainBatch, Array]],
) -> Comparison:
    """Compare the gradients of the choices, each on its form of the same minibatch.

    Args:
        trainer: its state is that before the minibatch, without critic and reference.
        own: the minibatch as the run has it, with log-probs before the step; its loss mask says on
            which tokens KLs and ratios are measured.
        updaters, parts: of each choice; a part has the key of the update.
    """
    params = trainer.params
    before = scored(trainer, params, own)
    found, gradients, length = [], [], 0.0
    for choice, updater, (part, key) in zip(choices, updaters, parts, strict=True):
        weights, _ = updater.weights(part)
        grads, pieces = updater.gradients(params, part, weights, key)
        metrics, norm = merge_metrics(jax.device_get(pieces)), float(optax.global_norm(grads))
        updated, along = updated_params(trainer, grads), None
        if not found:
            length = float(distance(updated, trainer.state.params)) / 10
        if norm and length:
            moved = moved_along(trainer.state.params, grads, length / norm)
            along = measured_kl(before, scored(trainer, trainer.policy.whole(moved), own), own)
        evaluated = Evaluated(
            choice.name,
            metrics["final_loss"],
            norm,
            metrics.get("loss_metrics/clip_ratio"),
            weight_ess(updater, scored(trainer, params, part, key), part, weights, key),
            measured_kl(before, scored(trainer, trainer.policy.whole(updated), own), own),
            along,
        )
        found.append(evaluated)
        gradients.append(jax.device_get(grads))
    tokens = int((np.asarray(own.loss_mask) > 0).sum())
    clip = trainer.config.trainer.algorithm
    sums = ratio_sums(jnp.asarray(before[0]), own, clip.eps_clip_low, clip.eps_clip_high)
    ratios = ratio_metrics(jax.device_get(sums))
    return Comparison(found, cosines(gradients), tokens, ratios, length)


def without_estimator(config: cfg.TrainConfig) -> cfg.TrainConfig:
    """Return a config that choices of one loss share: its update does not know the estimator."""
    algorithm = {"advantage_estimator": "grpo", "advantage_kwargs": {}}
    changes = {f"trainer.algorithm.{name}": value for name, value in algorithm.items()}
    return cfg.apply_overrides(config, changes)


def scored(
    trainer: Trainer, params: Any, minibatch: TrainBatch, key: Array | None = None
) -> tuple[np.ndarray, ...]:
    """Return log-probs and entropy [B, T], in the cuts of the update."""
    cut = trainer.updater.microbatching
    return trainer.forward_pass(params, minibatch, microbatching=cut, with_entropy=True, key=key)


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
    of_loss = updater.objective.seen(minibatch), no_kl, key
    (slopes, _), _ = updater.cotangents(*outputs, *of_loss)
    advantages = np.asarray(minibatch.advantages, np.float64)
    counted = (np.asarray(minibatch.loss_mask) > 0) & (advantages != 0)
    given = np.abs(np.asarray(slopes, np.float64)[counted] / advantages[counted])
    squares = float(np.square(given).sum())
    return float(given.sum()) ** 2 / (given.size * squares) if squares else None


def updated_params(trainer: Trainer, grads: Any) -> Any:
    """Return the trained parameters after one update by the run's optimizer; its state stays."""
    state: TrainState = jax.tree.map(jnp.copy, on_device(trainer.state))
    return trainer.updater.apply(state, grads)[0].params


@jax.jit
def distance(after: Any, before: Any) -> Array:
    """Return the L2 norm of a step."""
    return optax.global_norm(jax.tree.map(jnp.subtract, after, before))


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
