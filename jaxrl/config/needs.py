"""What an objective needs, read off its config: log-probs of which policies, which reductions."""

from typing import Literal

from jaxrl.config.algorithm import AlgorithmConfig
from jaxrl.config.train_config import TrainConfig
from jaxrl.config.trainer import TrainerConfig
from jaxrl.losses import LOSSES
from jaxrl.losses.off_policy import correction_enabled
from jaxrl.losses.reduction import REDUCTIONS
from jaxrl.registry import AdvantageEstimatorRegistry, PolicyLossRegistry
from jaxrl.registry.bind import loss_ndim
from jaxrl.registry.contracts import asks_for

Anchor = Literal["old", "rollout"]


def loss_name(algorithm: AlgorithmConfig) -> str:
    """Return the name of the built-in policy loss, however it is set; else what is set.

    Checks ask for it, since the same function is the same loss.
    """
    return PolicyLossRegistry.builtin_name(algorithm.policy_loss_type)


def estimator_name(algorithm: AlgorithmConfig) -> str:
    """Return the name of the built-in advantage estimator, as `loss_name` does."""
    return AdvantageEstimatorRegistry.builtin_name(algorithm.advantage_estimator)


def ratio_anchor(algorithm: AlgorithmConfig) -> Anchor | None:
    """The policy that the loss takes its ratio against; None = the loss has no ratio.

    "old" is the policy at the start of the step, recomputed by the trainer; "rollout" the sampler,
    by the log-probs that it recorded. A user's loss is offered both, and taken to use the first.
    """
    name = loss_name(algorithm)
    if name == "cross_entropy":
        return None
    by_sampler = (
        name in ("rollout_is", "dppo")
        or (name == "cispo" and algorithm.cispo.cispo_anchor == "rollout")
        or (name == "decoupled_ppo" and algorithm.decoupled_ppo.proximal == "log_linear")
        or algorithm.old_log_probs == "rollout"
    )
    return "rollout" if by_sampler else "old"


def corrects_itself(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss itself accounts for the difference between trainer and sampler."""
    return ratio_anchor(algorithm) == "rollout" or loss_name(algorithm) == "decoupled_ppo"


def allowed_reductions(policy_loss_type: str) -> tuple[str, ...]:
    """The values of loss_reduction under which a loss means something."""
    is_gmpo = PolicyLossRegistry.builtin_name(policy_loss_type) == "gmpo"
    return ("sequence_mean",) if is_gmpo else REDUCTIONS


def is_builtin_loss(policy_loss_type: str) -> bool:
    """Whether the policy loss is one of the library's.

    Raises:
        ValueError: there is none of this name.
    """
    return PolicyLossRegistry.resolve(policy_loss_type) in LOSSES.values()


def reduces_by_itself(config: TrainConfig) -> bool:
    """Whether the policy loss is a user's that returns one number; loss_reduction is then inert.

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


def has_critic(trainer: TrainerConfig) -> bool:
    """Whether a critic is trained beside the policy."""
    return trainer.critic.model.path is not None


def updates_per_step(trainer: TrainerConfig) -> int:
    """Optimizer updates on one batch."""
    minibatches = trainer.train_batch_size // trainer.policy_mini_batch_size
    return minibatches * trainer.update_epochs_per_batch


def needs_old_log_probs(trainer: TrainerConfig) -> bool:
    """Whether a step has to recompute the log-probs of its batch before the first update.

    The first update on a batch has the old policy itself; only later ones must know it.
    """
    algorithm = trainer.algorithm
    if algorithm.old_log_probs == "rollout":
        return False
    return (
        (ratio_anchor(algorithm) == "old" and updates_per_step(trainer) > 1)
        or correction_enabled(algorithm.off_policy_correction)
        or kl_in_reward(algorithm)
        or _estimator_asks_for(algorithm, "old_log_probs")
    )


def kl_in_loss(algorithm: AlgorithmConfig) -> bool:
    """Whether the KL to the reference counts as a term of the loss."""
    return algorithm.use_kl_loss and algorithm.kl_loss_coef != 0


def kl_in_reward(algorithm: AlgorithmConfig) -> bool:
    """Whether the KL to the reference counts in the rewards."""
    return algorithm.use_kl_in_reward and algorithm.kl_loss_coef != 0


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether a KL counts, or the loss or the estimator asks for ref_log_probs."""
    func = PolicyLossRegistry.resolve(algorithm.policy_loss_type)
    return (
        kl_in_loss(algorithm)
        or kl_in_reward(algorithm)
        or asks_for(func, "ref_log_probs")
        or _estimator_asks_for(algorithm, "ref_log_probs")
    )


def _estimator_asks_for(algorithm: AlgorithmConfig, name: str) -> bool:
    return asks_for(AdvantageEstimatorRegistry.resolve(algorithm.advantage_estimator), name)
