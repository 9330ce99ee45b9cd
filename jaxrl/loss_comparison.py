"""Losses and estimators on one minibatch of a run: what each would do to the parameters.

Every choice is the objective of a run with that loss and that estimator: its own log-probs,
advantages, reduction, KL and entropy terms, through the update that such a run makes.
"""

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl import config as cfg
from jaxrl.assemble import assemble_update
from jaxrl.config.needs import needs_reference
from jaxrl.config.objective_checks import check_objective
from jaxrl.config.overrides import parse_assignments
from jaxrl.objective import RATIOS, merge_metrics
from jaxrl.offload import on_device
from jaxrl.rewards import make_estimate
from jaxrl.scorer import Scorer
from jaxrl.trainer import Trainer
from jaxrl.types import Array, GeneratorOutput, TrainBatch, TrainState
from jaxrl.update import Updater, minibatches_of_step
from jaxrl.watching.ratios import add_ratio_sums, ratio_metrics

_BETWEEN = re.compile(r",(?![^\[\](){}]*[\])}])")  # commas, but for those inside of brackets
_CHANGE = re.compile(r"\+(?=[A-Za-z_][\w.]*=)")
_CHUNK = 1 << 20  # parameters whose products are added at a time


@dataclass(frozen=True)
class Choice:
    """A loss and an estimator, and the config of a run that has them."""

    name: str
    config: cfg.TrainConfig


@dataclass(frozen=True)
class Evaluated:
    """What a choice would do to the parameters.

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
    """Choices on one minibatch.

    Attributes:
        cosine: [N, N] between the gradients; NaN for one that is 0.
        tokens: that the policy sampled.
        ratios: of the minibatch, whatever the loss: `watching.ratios.ratio_metrics`.
        length: a tenth of the first choice's update, near enough for a KL to be of second order.
    """

    choices: list[Evaluated]
    cosine: np.ndarray
    tokens: int
    ratios: dict[str, float]
    length: float


# ---------------------------------------------------------------- which


def parse_choices(config: cfg.TrainConfig, losses: str, estimators: str | None) -> list[Choice]:
    """Every loss with every estimator, as configs.

    Args:
        config: of the run, resolved.
        losses: names or "module:function", separated by commas, each with changes of
            `trainer.algorithm`: "regular+eps_clip_high=0.28+loss_reduction=sequence_mean".
        estimators: likewise; None: the run's own.

    Raises:
        ValueError: there is no such loss, estimator or field; the objective is incoherent.
    """
    own = config.trainer.algorithm.advantage_estimator
    found = {}
    for loss in _listed(losses, "--losses"):
        for estimator in _listed(estimators or own, "--estimators"):
            name = f"{loss} | {estimator}" if estimators else loss
            changes = _changes(config, "policy_loss", loss)
            changes |= _changes(config, "advantage", estimator)
            try:
                given = cfg.resolve(cfg.apply_overrides(config, changes))
                check_objective(given)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            found[name] = Choice(name, given)
    return list(found.values())


def _listed(text: str, flag: str) -> list[str]:
    names = [name.strip() for name in _BETWEEN.split(text)]
    if not all(names):
        raise ValueError(f"{flag}={text!r} has an empty name; write e.g. {flag}=regular,gspo")
    return names


def _changes(config: cfg.TrainConfig, kind: str, text: str) -> dict[str, Any]:
    """Overrides of a config for "name+field=value"; hyperparameters of another function go."""
    name, *assignments = _CHANGE.split(text)
    field = {"policy_loss": "policy_loss_type", "advantage": "advantage_estimator"}[kind]
    changes: dict[str, Any] = {field: name}
    if name != getattr(config.trainer.algorithm, field):
        changes[f"{kind}_kwargs"] = {}
    changes |= parse_assignments(assignments)
    return {f"trainer.algorithm.{key}": value for key, value in changes.items()}


# ---------------------------------------------------------------- on what


def compare_choices(
    trainer: Trainer,
    rollouts: tuple[GeneratorOutput, Sequence[str]],
    choices: Sequence[Choice],
    *,
    step: int,
    minibatch: int = 1,
) -> Comparison:
    """Gradients of all choices on one minibatch of a step.

    Args:
        trainer: its state is that before the step, and afterwards that before the minibatch: the
            run's own updates on those before it are made.
        rollouts: of the step, and their uids.
        minibatch: from 1, over all passes of the step.

    Raises:
        ValueError: the step has no such minibatch; a loss or an estimator raised.
    """
    pose = Poser(trainer, rollouts)
    own = pose(trainer.config)
    batches = [pose(choice.config) for choice in choices]
    settings = trainer.config.trainer
    named = {
        "prompts": settings.policy_mini_batch_size,
        "passes": settings.update_epochs_per_batch,
        "names": (settings.seed, step),
    }
    order = minibatches_of_step(own, **named)
    if not 1 <= minibatch <= len(order):
        raise ValueError(f"--minibatch={minibatch}: step {step} has 1 to {len(order)}; take one")
    advance(trainer, order[: minibatch - 1])
    parts = [minibatches_of_step(batch, **named)[minibatch - 1] for batch in batches]
    updaters = [pose.updater(choice.config) for choice in choices]
    return evaluate_choices(trainer, order[minibatch - 1][0], choices, updaters, parts)


class Poser:
    """Makes the batch of a step as runs of other objectives would, from the same rollouts."""

    def __init__(self, trainer: Trainer, rollouts: tuple[GeneratorOutput, Sequence[str]]) -> None:
        self.trainer, self.rollouts = trainer, rollouts
        self.scorer, self.ref_scorer = ScoredOnce(trainer.scorer), ScoredOnce(trainer.ref_scorer)
        self.reference = trainer.ref_params
        self.updaters = {without_estimator(trainer.config): trainer.updater}

    def __call__(self, config: cfg.TrainConfig) -> TrainBatch:
        """With the log-probs and advantages of a run with this config; the trainer's own methods.

        Args:
            config: differs from the trainer's in `trainer.algorithm` alone.
        """
        run: Any = copy.copy(self.trainer)
        run.config, run.metrics, run.updater = config, {}, self.updater(config)
        run.scorer, run.ref_scorer = self.scorer, self.ref_scorer
        run.estimate = jax.jit(make_estimate(config.trainer.algorithm))
        run.ref_params = self._reference(config)
        output, uids = self.rollouts
        output = run.postprocess_generator_output(GeneratorOutput({**output}), uids)
        return run.add_advantages(run.add_log_probs(run.collate(output)))

    def updater(self, config: cfg.TrainConfig) -> Updater:
        """That of a run with this config, on the trainer's forward pass and devices."""
        config = without_estimator(config)
        if config not in self.updaters:
            trainer, policy = self.trainer, self.trainer.policy
            given = config, trainer.scorer, policy.placement, trainer.total_steps, policy.trained
            self.updaters[config] = assemble_update(*given)[2]
        return self.updaters[config]

    def _reference(self, config: cfg.TrainConfig) -> Any:
        """Loaded for the first that needs it, should the run itself have none."""
        if not needs_reference(config.trainer.algorithm):
            return None
        if self.reference is None:
            policy = copy.copy(self.trainer.policy)
            policy.trainer = config.trainer
            self.reference = policy.reference(self.trainer.state.ref_params)
        return self.reference


class ScoredOnce:
    """A scorer of one set of weights and rows, which scores the same tokens once."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer, self.found = scorer, {}

    def __call__(self, params: Any, batch: TrainBatch, **options: Any) -> tuple[np.ndarray, ...]:
        wanted = np.asarray(batch.loss_mask).tobytes(), *sorted(options.items())
        if wanted not in self.found:
            self.found[wanted] = self.scorer(params, batch, **options)
        return self.found[wanted]


def advance(trainer: Trainer, parts: Iterable[tuple[TrainBatch, Array]]) -> None:
    """The run's own updates on minibatches; a critic and a reference stay where they are."""
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
    """Gradients of the choices, each on its form of the same minibatch.

    Args:
        trainer: its state is that before the minibatch, without critic and reference.
        own: the minibatch as the run has it; its loss mask says on which tokens KLs are measured.
        updaters, parts: of each choice; a part has the key of the update.
    """
    params = trainer.params
    before = scored(trainer, params, own)
    found, gradients, ratios, length = [], [], {}, 0.0
    for choice, updater, (part, key) in zip(choices, updaters, parts, strict=True):
        weights, _ = updater.weights(part)
        grads, pieces = updater.gradients(params, part, weights, key)
        metrics, norm = merge_metrics(jax.device_get(pieces)), float(optax.global_norm(grads))
        updated, along = updated_params(trainer, grads), None
        if not found:
            sums = jax.device_get([piece[RATIOS] for piece in pieces])
            ratios = ratio_metrics(add_ratio_sums(sums))
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
    return Comparison(found, cosines(gradients), tokens, ratios, length)


def without_estimator(config: cfg.TrainConfig) -> cfg.TrainConfig:
    """A config that choices of one loss share: its update does not know the estimator."""
    algorithm = {"advantage_estimator": "grpo", "advantage_kwargs": {}}
    changes = {f"trainer.algorithm.{name}": value for name, value in algorithm.items()}
    return cfg.apply_overrides(config, changes)


def scored(
    trainer: Trainer, params: Any, minibatch: TrainBatch, key: Array | None = None
) -> tuple[np.ndarray, ...]:
    """Log-probs and entropy [B, T], in the cuts of the update."""
    cut = trainer.updater.microbatching
    return trainer.scorer(params, minibatch, microbatching=cut, with_entropy=True, key=key)


def weight_ess(
    updater: Updater,
    outputs: tuple[np.ndarray, ...],
    minibatch: TrainBatch,
    weights: Any,
    key: Array,
) -> float | None:
    """Effective sample size of the weights that a loss gives to tokens, as a share of them.

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
    """The trained parameters after one update by the run's optimizer; its state stays."""
    state: TrainState = jax.tree.map(jnp.copy, on_device(trainer.state))
    return trainer.updater.apply(state, grads)[0].params


@jax.jit
def distance(after: Any, before: Any) -> Array:
    """L2 norm of a step."""
    return optax.global_norm(jax.tree.map(jnp.subtract, after, before))


@jax.jit
def moved_along(params: Any, grads: Any, scale: Array) -> Any:
    """Parameters after a step of plain gradient descent."""
    return jax.tree.map(lambda x, g: x - scale * g, params, grads)


def measured_kl(
    before: tuple[np.ndarray, ...], after: tuple[np.ndarray, ...], minibatch: TrainBatch
) -> float:
    """KL(before || after), nats per token: mean of r - 1 - log r, r = after / before.

    Estimated on the recorded tokens, unbiased for those that `before` sampled. Schulman,
    http://joschu.net/blog/kl-approx.html (k3).
    """
    mask = np.asarray(minibatch.loss_mask) > 0
    log_ratio = after[0].astype(np.float64)[mask] - before[0].astype(np.float64)[mask]
    return float(np.mean(np.expm1(log_ratio) - log_ratio))


def cosines(gradients: Sequence[Any]) -> np.ndarray:
    """Between gradients [N, N], all parameters as one vector, products summed in float64."""
    total = np.zeros((len(gradients),) * 2)
    for leaves in zip(*map(jax.tree.leaves, gradients), strict=True):
        flat = [np.ravel(leaf) for leaf in leaves]
        for start in range(0, flat[0].size, _CHUNK):
            part = np.stack([x[start : start + _CHUNK] for x in flat]).astype(np.float64)
            total += part @ part.T
    norms = np.sqrt(np.diag(total))
    with np.errstate(invalid="ignore"):
        return np.clip(total / np.outer(norms, norms), -1, 1)
