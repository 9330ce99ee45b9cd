"""A policy loss and an advantage estimator bound to their config: from names to functions."""

from dataclasses import dataclass, replace
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
    state_and_pair,
)
from jaxrl.registry.memory import (
    EstimatorBatch,
    as_arrays,
    check_pure,
    initial_state_of,
    same_form,
    unjitted,
)
from jaxrl.registry.table import AdvantageEstimatorRegistry, PolicyLossRegistry
from jaxrl.types import Array, FloatBT, TrainBatch

Metrics = dict[str, Any]
# fields of a batch that few losses ask for
OPTIONAL = ("token_versions", "context_versions", "staleness", "demonstrated")


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


@dataclass(frozen=True)
class AdvantageFunction:
    """Hold the estimator of a config with what it is called with.

    Attributes:
        fn: gets the keywords that its signature names, its hyperparameters among them.
        label: how an error calls it.
    """

    fn: Function
    label: str
    algorithm: Any

    @property
    def settings(self) -> dict[str, Any]:
        """Return what the estimator is offered beside the arrays of a step, by SkyRL's names."""
        return {
            "grpo_norm_by_std": self.algorithm.grpo_norm_by_std,
            "gamma": self.algorithm.gamma,
            "lambd": self.algorithm.lambd,
            "config": self.algorithm,
            **self.algorithm.advantage_kwargs,
        }

    def __call__(self, state: Any = None, **arrays: Array) -> tuple[Any, FloatBT, FloatBT]:
        """Return the state after the step, advantages and returns [B, T].

        Args:
            state: of an estimator with memory, see `registry.memory`; None of any other.
            arrays: by keyword, because an estimator may take everything as `**kwargs`; values are
                those of a critic, None where there is none.

        Raises:
            ValueError: an array is not of its shape or kind; it raised, or returned something of
                another form. The message names the function and the part.
        """
        label = self.label
        check_arrays(label, arrays)
        offered: dict[str, Any] = {"values": None} | arrays | self.settings
        keywords = accepted_keywords(self.fn, offered)
        shape = arrays["token_level_rewards"].shape
        if not initial_state_of(self.fn):
            with raised_by(label):
                pair = self.fn(**keywords)
            return None, *advantages_and_returns(label, pair, shape)
        fields: dict[str, Any] = {name: offered.get(name) for name in EstimatorBatch._fields}
        batch = EstimatorBatch(**fields)
        with raised_by(label):
            result = self.fn(state, batch, **keywords)
        new, pair = state_and_pair(label, result)
        return same_form(label, state, new), *advantages_and_returns(label, pair, shape)


def bind_estimator(algorithm: Any) -> AdvantageFunction:
    """Return the configured estimator, to be called with a state and the arrays by keyword.

    It is offered the settings of the config under SkyRL's names, and its hyperparameters from
    `algorithm.advantage_kwargs`.

    Raises:
        ValueError: it requires a parameter that it will not get.
    """
    name, kwargs = algorithm.advantage_estimator, algorithm.advantage_kwargs
    func, label = AdvantageEstimatorRegistry.resolve(name), f"advantage estimator '{name}'"
    check_estimator_signature(label, func)
    check_hyperparameters(func, kwargs, "trainer.algorithm.advantage_kwargs", ESTIMATOR_DATA)
    estimator = AdvantageFunction(func, label, algorithm)
    offered: dict[str, Any] = {**dict.fromkeys(ESTIMATOR_DATA), **estimator.settings}
    positional = ("state", "batch") if initial_state_of(func) else ()
    check_parameters(label, func, positional, accepted_keywords(func, offered))
    return estimator


def loss_ndim(algorithm: Any, shape: tuple[int, int]) -> int:
    """Return 2 for a loss of each token, 0 for one number; the loss is traced on rows x tokens.

    Raises:
        ValueError: see `make_policy_loss`.
    """
    return jax.eval_shape(make_policy_loss(algorithm), *_of_a_loss(shape))[0].ndim


def check_pure_functions(
    algorithm: Any, *, rows: int, minibatch_rows: int, tokens: int, has_values: bool
) -> None:
    """Refuse a loss or an estimator of the user's that keeps something outside of its arguments.

    Args:
        rows: of a batch, which an estimator sees.
        minibatch_rows: which a loss sees.
        tokens: of the longest row.
        has_values: of a critic.

    Raises:
        ValueError: see `check_pure`; or one of the two cannot be traced.
    """
    loss = make_policy_loss(algorithm)
    if loss.fn not in PolicyLossRegistry._builtin.values():
        loss = replace(loss, fn=unjitted(loss.fn))
        check_pure(loss.label, loss.fn, loss, *_of_a_loss((minibatch_rows, tokens)))
    estimator = bind_estimator(algorithm)
    if estimator.fn in AdvantageEstimatorRegistry._builtin.values():
        return
    state = as_arrays(estimator.label, initial_state_of(estimator.fn)) or None
    estimator = replace(estimator, fn=unjitted(estimator.fn))
    floats = jax.ShapeDtypeStruct((rows, tokens), jnp.float32)
    names = "token_level_rewards", "response_mask", "loss_mask", "old_log_probs", "ref_log_probs"
    arrays: dict[str, Any] = {name: floats for name in names}
    if has_values:
        arrays["values"] = floats
    arrays["index"] = jax.ShapeDtypeStruct((rows,), jnp.int32)
    arrays["valid_mask"] = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    arrays["reward_terms"] = jax.ShapeDtypeStruct((rows, 2), jnp.float32)
    arrays["reward_weights"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    arrays["turn_rewards"] = jax.ShapeDtypeStruct((rows,), jnp.float32)
    arrays["greedy_rewards"] = arrays["turn_rewards"]
    arrays["turn_states"] = arrays["trajectory"] = arrays["index"]

    def estimate(state: Any, arrays: dict[str, Array]) -> Any:
        return estimator(state, **arrays)

    check_pure(estimator.label, estimator.fn, estimate, state, arrays)


def _of_a_loss(shape: tuple[int, int]) -> tuple[Any, Any, TrainBatch, Any]:
    """Return shapes and dtypes of what `PolicyLoss` is called with, for rows x tokens."""
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
        demonstrated=jax.ShapeDtypeStruct(shape[:1], jnp.bool_),
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    return floats, floats, batch, key
