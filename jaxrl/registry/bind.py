"""A policy loss bound to its config: from a name to a function of log-probs, entropy and batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.registry import PolicyLossRegistry, accepted_keywords, check_hyperparameters
from jaxrl.registry.contracts import (
    BATCH_FIELDS,
    LOSS_ARGUMENTS,
    LOSS_KEYWORDS,
    call,
    check_loss_signature,
    check_parameters,
    loss_and_metrics,
)
from jaxrl.types import Array, TrainBatch

Metrics = dict[str, Any]
# fields of a batch that few losses ask for
OPTIONAL = ("token_versions", "context_versions", "staleness")
PolicyLoss = Callable[..., tuple[Array, Metrics]]  # (log_probs, entropy, batch, key)


def make_policy_loss(algorithm: Any) -> PolicyLoss:
    """The configured loss as `(log_probs, entropy, batch, key) -> (loss, metrics)`.

    The function gets the keywords that its signature names, and its hyperparameters from
    `algorithm.policy_loss_kwargs`.

    Raises:
        ValueError: it requires a parameter that it will not get. When it is traced: it raised, or
            returned something of another form; the message names the function and the part.
    """
    name, kwargs = algorithm.policy_loss_type, algorithm.policy_loss_kwargs
    func, label = PolicyLossRegistry.resolve(name), f"policy loss '{name}'"
    check_loss_signature(label, func)
    supplied = (*LOSS_ARGUMENTS, *LOSS_KEYWORDS)
    check_hyperparameters(func, kwargs, "trainer.algorithm.policy_loss_kwargs", supplied)
    names = dict.fromkeys((*LOSS_KEYWORDS, *kwargs))
    check_parameters(label, func, LOSS_ARGUMENTS, accepted_keywords(func, names))

    def policy_loss(
        log_probs: Array, entropy: Array, batch: TrainBatch, key: Array
    ) -> tuple[Array, Metrics]:
        offered = {name: getattr(batch, name) for name in BATCH_FIELDS}
        offered |= {"group_ids": batch.index, "entropy": entropy, "key": key, **kwargs}
        offered["rollout_logprobs"] = batch.rollout_log_probs  # SkyRL's name
        old_log_probs = batch.old_log_probs
        if old_log_probs is None:  # the first update on a batch: the policy is the old policy
            old_log_probs = jax.lax.stop_gradient(log_probs)
        given = log_probs, old_log_probs, batch.advantages, algorithm
        result = call(label, func, *given, **accepted_keywords(func, offered))
        return loss_and_metrics(label, result, log_probs.shape)

    return policy_loss


def loss_ndim(algorithm: Any, shape: tuple[int, int]) -> int:
    """2 for a loss of each token, 0 for one number; the loss is traced on rows x tokens.

    Raises:
        ValueError: see `make_policy_loss`.
    """
    array, number = jax.ShapeDtypeStruct(shape, jnp.float32), jnp.int32
    row = jax.ShapeDtypeStruct(shape[:1], number)
    batch = TrainBatch(
        tokens=jax.ShapeDtypeStruct(shape, number),
        **dict.fromkeys(("lengths", "index", "policy_versions", "row_ids"), row),
        **dict.fromkeys(("response_mask", "loss_mask", "rewards", "rollout_log_probs"), array),
        **dict.fromkeys(("old_log_probs", "ref_log_probs", "advantages"), array),
        **dict.fromkeys(OPTIONAL, jax.ShapeDtypeStruct(shape, number)),
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(make_policy_loss(algorithm), array, array, batch, key)[0].ndim
