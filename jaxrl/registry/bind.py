"""A policy loss and an advantage estimator bound to their config: from names to functions."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.functions import Function
from jaxrl.registry.contracts import (
    BATCH_FIELDS,
    ESTIMATOR_DATA,
    LOSS_ARGUMENTS,
    LOSS_KEYWORDS,
    accepted_keywords,
    advantages_and_returns,
    check_arrays,
    check_estimator_signature,
    check_hyperparameters,
    check_loss_signature,
    check_parameters,
    loss_and_metrics,
    raised_by,
)
from jaxrl.registry.table import AdvantageEstimatorRegistry, PolicyLossRegistry
from jaxrl.types import Array, FloatBT, TrainBatch

Metrics = dict[str, Any]
# fields of a batch that few losses ask for
OPTIONAL = ("token_versions", "context_versions", "staleness")


@dataclass(frozen=True)
class PolicyLoss:
    """Hold the loss of a config with what it is called with.

    Attributes:
        fn: gets the keywords that its signature names, its hyperparameters among them.
        label: how an error calls it.
    """

    fn: Function
    label: str
    algorithm: Any

    def arguments(
        self, log_probs: FloatBT, entropy: FloatBT, batch: TrainBatch, key: Array
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what `fn` is called with, by position and by name.

        Raises:
            ValueError: an array is not of its shape or kind.
        """
        old_log_probs = batch.old_log_probs
        if old_log_probs is None:  # the first update on a batch: the policy is the old policy
            old_log_probs = jax.lax.stop_gradient(log_probs)
        offered = {name: getattr(batch, name) for name in BATCH_FIELDS}
        offered |= {"group_ids": batch.index, "entropy": entropy, "key": key}
        arrays = {
            "log_probs": log_probs,
            "old_log_probs": old_log_probs,
            "advantages": batch.advantages,
            **offered,
        }
        check_arrays(self.label, arrays)
        offered |= self.algorithm.policy_loss_kwargs
        offered["rollout_logprobs"] = batch.rollout_log_probs  # SkyRL's name
        positional = log_probs, old_log_probs, batch.advantages, self.algorithm
        return positional, accepted_keywords(self.fn, offered)

    def __call__(
        self, log_probs: FloatBT, entropy: FloatBT, batch: TrainBatch, key: Array
    ) -> tuple[Array, Metrics]:
        """Return the loss, [B, T] or [], and its metrics.

        Raises:
            ValueError: an array is not of its shape or kind; it raised, or returned something of
                another form.
        """
        positional, by_name = self.arguments(log_probs, entropy, batch, key)
        with raised_by(self.label):
            result = self.fn(*positional, **by_name)
        return loss_and_metrics(self.label, result, log_probs.shape)


def make_policy_loss(algorithm: Any) -> PolicyLoss:
    """Return the configured loss, checked against what it will be called with.

    Raises:
        ValueError: it requires a parameter that it will not get.
    """
    name, kwargs = algorithm.policy_loss_type, algorithm.policy_loss_kwargs
    func, label = PolicyLossRegistry.resolve(name), f"policy loss '{name}'"
    check_loss_signature(label, func)
    supplied = (*LOSS_ARGUMENTS, *LOSS_KEYWORDS)
    check_hyperparameters(func, kwargs, "trainer.algorithm.policy_loss_kwargs", supplied)
    names = dict.fromkeys((*LOSS_KEYWORDS, *kwargs))
    check_parameters(label, func, LOSS_ARGUMENTS, accepted_keywords(func, names))
    return PolicyLoss(func, label, algorithm)


def bind_estimator(algorithm: Any) -> Function:
    """Return the configured estimator, a function of keywords alone.

    It is `(*, token_level_rewards, response_mask, index, loss_mask, ...)`: by keyword, because an
    estimator may take everything as `**kwargs`; the values of a critic are one more, None where
    there is none. It is offered the settings of the config under SkyRL's names, and its
    hyperparameters from `algorithm.advantage_kwargs`.

    Raises:
        ValueError: it requires a parameter that it will not get. When it is called: an array is not
            of its shape or kind; it raised, or returned something of another form. The message
            names the function and the part.
    """
    name, kwargs = algorithm.advantage_estimator, algorithm.advantage_kwargs
    func, label = AdvantageEstimatorRegistry.resolve(name), f"advantage estimator '{name}'"
    check_estimator_signature(label, func)
    check_hyperparameters(func, kwargs, "trainer.algorithm.advantage_kwargs", ESTIMATOR_DATA)
    settings = {
        "grpo_norm_by_std": algorithm.grpo_norm_by_std,
        "gamma": algorithm.gamma,
        "lambd": algorithm.lambd,
        "config": algorithm,
        **kwargs,
    }
    offered: dict[str, Any] = {**dict.fromkeys(ESTIMATOR_DATA), **settings}
    check_parameters(label, func, (), accepted_keywords(func, offered))
    no_values = {"values": None}  # without a critic

    def estimate(**arrays: Array) -> tuple[FloatBT, FloatBT]:
        check_arrays(label, arrays)
        with raised_by(label):
            result = func(**accepted_keywords(func, no_values | arrays | settings))
        return advantages_and_returns(label, result, arrays["token_level_rewards"].shape)

    return estimate


def loss_ndim(algorithm: Any, shape: tuple[int, int]) -> int:
    """Return 2 for a loss of each token, 0 for one number; the loss is traced on rows x tokens.

    Raises:
        ValueError: see `make_policy_loss`.
    """
    floats = jax.ShapeDtypeStruct(shape, jnp.float32)
    ints, row_ints = (jax.ShapeDtypeStruct(s, jnp.int32) for s in (shape, shape[:1]))
    batch = TrainBatch(
        tokens=ints,
        lengths=row_ints,
        response_mask=floats,
        loss_mask=floats,
        rewards=floats,
        rollout_log_probs=floats,
        index=row_ints,
        policy_versions=row_ints,
        row_ids=row_ints,
        old_log_probs=floats,
        ref_log_probs=floats,
        advantages=floats,
        token_versions=ints,
        context_versions=ints,
        staleness=ints,
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(make_policy_loss(algorithm), floats, floats, batch, key)[0].ndim
