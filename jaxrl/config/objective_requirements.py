"""What the objective of a config is, and what it requires: log-probs, a critic, a reference."""

import inspect
from collections.abc import Mapping

from jaxrl.advantages import ROWS as ESTIMATOR_ROWS
from jaxrl.advantages.row import Estimator
from jaxrl.config.algorithm import AlgorithmConfig
from jaxrl.config.train_config import TrainConfig
from jaxrl.config.trainer import TrainerConfig
from jaxrl.losses import LOSSES, ROWS
from jaxrl.losses.off_policy import correction_enabled
from jaxrl.losses.reduction import REDUCTIONS
from jaxrl.losses.row import Anchor, Loss
from jaxrl.registry import AdvantageEstimatorRegistry, PolicyLossRegistry
from jaxrl.registry.bind import loss_ndim
from jaxrl.registry.contracts import asks_for


def loss_name(algorithm: AlgorithmConfig) -> str:
    """Return the name of the built-in policy loss, however it is set; else what is set.

    Checks ask for it, since the same function is the same loss.
    """
    return PolicyLossRegistry.builtin_name(algorithm.policy_loss_type)


def estimator_name(algorithm: AlgorithmConfig) -> str:
    """Return the name of the built-in advantage estimator, as `loss_name` does."""
    return AdvantageEstimatorRegistry.builtin_name(algorithm.advantage_estimator)


def loss_row(algorithm: AlgorithmConfig) -> Loss | None:
    """Return what is true of the built-in policy loss; None for a user's."""
    return ROWS.get(loss_name(algorithm))


def estimator_row(algorithm: AlgorithmConfig) -> Estimator | None:
    """Return what is true of the built-in advantage estimator; None for a user's."""
    return ESTIMATOR_ROWS.get(estimator_name(algorithm))


def ratio_anchor(algorithm: AlgorithmConfig) -> Anchor | None:
    """Return the policy that the loss takes its ratio against, see `losses.row.Loss.anchor`.

    A user's loss is offered the log-probs of both, and taken to use those of "old".
    """
    row = loss_row(algorithm)
    anchor = row.anchor(algorithm) if row else "old"
    return "rollout" if anchor == "old" and algorithm.old_log_probs == "rollout" else anchor


def corrects_itself(algorithm: AlgorithmConfig) -> bool:
    """Return whether the loss itself accounts for the difference between trainer and sampler."""
    row = loss_row(algorithm)
    return ratio_anchor(algorithm) == "rollout" or (row is not None and row.corrects_itself)


def corrects_for_sampler(algorithm: AlgorithmConfig) -> bool:
    """Return whether something accounts for a sampler that is another distribution by design.

    That is an off-policy correction, or the loss; one of a user's if it asks for the sampler's
    log-probs.
    """
    if correction_enabled(algorithm.off_policy_correction) or corrects_itself(algorithm):
        return True
    func = PolicyLossRegistry.resolve(algorithm.policy_loss_type)
    names = "rollout_log_probs", "rollout_logprobs"
    return loss_row(algorithm) is None and any(asks_for(func, name) for name in names)


def allowed_reductions(policy_loss_type: str) -> tuple[str, ...]:
    """Return the values of loss_reduction under which a loss means something."""
    row = ROWS.get(PolicyLossRegistry.builtin_name(policy_loss_type))
    return (row and row.reductions) or REDUCTIONS


def is_builtin_loss(policy_loss_type: str) -> bool:
    """Return whether the policy loss is one of the library's.

    Raises:
        ValueError: there is none of this name.
    """
    return PolicyLossRegistry.resolve(policy_loss_type) in LOSSES.values()


def reduces_by_itself(config: TrainConfig) -> bool:
    """Return whether a user's policy loss returns one number; loss_reduction is then inert.

    Raises:
        ValueError: it cannot be traced; see `jaxrl.registry.bind.make_policy_loss`.
    """
    trainer, name = config.trainer, config.trainer.algorithm.policy_loss_type
    try:
        if is_builtin_loss(name):
            return False
    except ValueError:  # unknown: validation says so
        return False
    rows = trainer.policy_mini_batch_size * config.generator.n_samples_per_prompt
    return loss_ndim(trainer.algorithm, (rows, 8)) == 0


def takes_values(algorithm: AlgorithmConfig) -> bool:
    """Return whether the advantage estimator looks at the values of a critic."""
    if row := estimator_row(algorithm):
        return row.needs_values
    parameters = _estimator_parameters(algorithm)
    offered = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "values" in parameters or offered or "batch" in parameters  # of one with memory


def requires_values(algorithm: AlgorithmConfig) -> bool:
    """Return whether the advantage estimator cannot do without the values of a critic."""
    if row := estimator_row(algorithm):
        return row.needs_values
    values = _estimator_parameters(algorithm).get("values")
    return values is not None and values.default is values.empty


def needs_greedy(algorithm: AlgorithmConfig) -> bool:
    """Return whether the advantage estimator asks what greedy answers earn."""
    if row := estimator_row(algorithm):
        return row.needs_greedy
    return "greedy_rewards" in _estimator_parameters(algorithm)


def demonstrations_apart(algorithm: AlgorithmConfig) -> bool:
    """Return whether the loss keeps samples from being compared with demonstrations."""
    row = loss_row(algorithm)
    return row is not None and row.demonstrations == "apart"


def has_critic(trainer: TrainerConfig) -> bool:
    """Return whether a critic is trained beside the policy."""
    return trainer.critic.model.path is not None


def updates_per_step(trainer: TrainerConfig) -> int:
    """Return the number of optimizer updates on one batch."""
    minibatches = trainer.train_batch_size // trainer.policy_mini_batch_size
    return minibatches * trainer.update_epochs_per_batch


def needs_old_log_probs(trainer: TrainerConfig) -> bool:
    """Return whether a step must recompute the log-probs of its batch before the first update."""
    sampled = trainer.algorithm.old_log_probs == "rollout" or sampled_are_exact(trainer)
    return wants_old_log_probs(trainer) and not sampled


def sampled_are_exact(trainer: TrainerConfig) -> bool:
    """Return whether the sampler's log-probs are the policy's at the start of the step, all bits.

    The exact mode gives that, where the policy has not moved on while there was sampling.
    """
    moves = trainer.fully_async.enabled and trainer.fully_async.max_staleness_steps > 0
    return trainer.exact != "off" and not moves


def wants_old_log_probs(trainer: TrainerConfig) -> bool:
    """Return whether a step must know the log-probs of its batch before the first update.

    The first update on a batch has the old policy itself; only later ones must know it.
    """
    algorithm = trainer.algorithm
    return (
        (ratio_anchor(algorithm) == "old" and updates_per_step(trainer) > 1)
        or correction_enabled(algorithm.off_policy_correction)
        or kl_in_reward(algorithm)
        or (unbiased_kl_in_loss(algorithm) and updates_per_step(trainer) > 1)
        or "old_log_probs" in _estimator_parameters(algorithm)
    )


def kl_in_loss(algorithm: AlgorithmConfig) -> bool:
    """Return whether the KL to the reference counts as a term of the loss."""
    return algorithm.use_kl_loss and algorithm.kl_loss_coef != 0


def unbiased_kl_in_loss(algorithm: AlgorithmConfig) -> bool:
    """Return whether that term is weighed by the ratio to the old policy."""
    return kl_in_loss(algorithm) and algorithm.use_unbiased_kl


def entropy_is_adaptive(algorithm: AlgorithmConfig) -> bool:
    """Return whether the coefficient of the entropy in the loss changes from step to step."""
    return algorithm.use_entropy_loss and algorithm.entropy_ctrl.type == "adaptive"


def distills(algorithm: AlgorithmConfig) -> bool:
    """Return whether the policy learns the distributions of a teacher."""
    return algorithm.distillation.coef > 0


def distills_hindsight(algorithm: AlgorithmConfig) -> bool:
    """Return whether the teacher is the policy that knows what became of its answer."""
    return distills(algorithm) and algorithm.distillation.teacher == "hindsight"


def kl_in_reward(algorithm: AlgorithmConfig) -> bool:
    """Return whether the KL to the reference counts in the rewards."""
    return algorithm.use_kl_in_reward and algorithm.kl_loss_coef != 0


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Return whether a KL counts, a teacher, or a function that asks for ref_log_probs."""
    func = PolicyLossRegistry.resolve(algorithm.policy_loss_type)
    return (
        kl_in_loss(algorithm)
        or (distills(algorithm) and not distills_hindsight(algorithm))
        or kl_in_reward(algorithm)
        or asks_for(func, "ref_log_probs")
        or "ref_log_probs" in _estimator_parameters(algorithm)
    )


def _estimator_parameters(algorithm: AlgorithmConfig) -> Mapping[str, inspect.Parameter]:
    func = AdvantageEstimatorRegistry.resolve(algorithm.advantage_estimator)
    return inspect.signature(func).parameters
