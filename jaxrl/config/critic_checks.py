"""Checks of actor-critic training and of a moving reference."""

import inspect
import warnings

from jaxrl.advantages import ROWS
from jaxrl.config.errors import fail
from jaxrl.config.objective_requirements import has_critic, needs_reference
from jaxrl.config.train_config import TrainConfig
from jaxrl.config.trainer import TrainerConfig
from jaxrl.registry import AdvantageEstimatorRegistry

_ESTIMATOR = "trainer.algorithm.advantage_estimator"


def check_critic(config: TrainConfig) -> None:
    """Refuse values that nobody computes, and a critic that cannot be trained as it is told to.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    trainer, name = config.trainer, config.trainer.algorithm.advantage_estimator
    parameters = inspect.signature(AdvantageEstimatorRegistry.resolve(name)).parameters
    values = parameters.get("values")
    row = ROWS.get(name)
    required = (row is not None and row.needs_values) or (
        values is not None and values.default is values.empty
    )
    if required and not has_critic(trainer):
        fail(
            _ESTIMATOR,
            name,
            "needs the values of a critic, and trainer.critic.model.path=None; set that, e.g. to "
            "the policy's model, or an estimator without values, e.g. 'grpo' or 'reinforce++'",
        )
    if not has_critic(trainer):
        return
    _check_head(trainer)
    rest = [p for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    if (row and not row.needs_values) or not (values or rest):
        warnings.warn(
            f"{_ESTIMATOR}={name!r} takes no values: the critic of trainer.critic.model.path="
            f"{trainer.critic.model.path!r} is trained, and has no effect",
            stacklevel=3,
        )
    elif config.generator.step_wise_trajectories:
        fail(
            "generator.step_wise_trajectories",
            True,
            "a trajectory's advantage is that of its last row, so the values of the rows before it "
            f"would not be looked at; set it to False, or {_ESTIMATOR} to one without values",
        )


def _check_head(trainer: TrainerConfig) -> None:
    prefix, clip = trainer.algorithm.value_head_prefix, trainer.algorithm.value_clip
    if not prefix.isidentifier() or prefix in ("model", "lm_head"):
        field, fix = "trainer.algorithm.value_head_prefix", "must be a name that no other weight"
        fail(field, prefix, f"{fix} begins with, e.g. 'value_head'")
    if clip is not None and clip <= 0:
        fail("trainer.algorithm.value_clip", clip, "must be > 0, e.g. 0.2; None is no clip")


def check_moving_reference(trainer: TrainerConfig) -> None:
    """Refuse a moving reference on another base than that of a policy with adapters.

    Raises:
        ValueError: the reference has another base, or lies elsewhere.
    """
    if not trainer.update_ref_every_epoch:
        return
    field, lora = "trainer.update_ref_every_epoch", trainer.policy.model.lora.rank > 0
    ref, policy = trainer.ref, trainer.policy
    if lora and (ref.model.path, ref.model.random_init) != (
        policy.model.path,
        policy.model.random_init,
    ):
        fix = "with trainer.policy.model.lora the reference has adapters on the policy's base, and "
        fail(field, True, f"{fix}trainer.ref.model.path={ref.model.path!r} is another; set it None")
    if lora and not trainer.placement.colocate_policy_ref:
        fix = "with trainer.policy.model.lora needs trainer.placement.colocate_policy_ref=True; "
        fail(field, True, f"{fix}set it, or this one to False")
    if lora and ref.mesh is not None:
        fail(field, True, "with trainer.policy.model.lora needs trainer.ref.mesh=None")
    if not needs_reference(trainer.algorithm):
        warnings.warn(
            f"{field}=True has no effect: no KL counts, and the loss asks for no ref_log_probs",
            stacklevel=3,
        )
