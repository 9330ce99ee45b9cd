"""One optimizer update: objective, gradients in microbatches, apply.

    objective = sum_bt w_bt loss_bt + kl_loss_coef sum_bt k_bt kl_bt - entropy_loss_coef sum_bt e_bt
    H_bt

with weights w, k, e of the whole minibatch. Only sums are taken afterwards, so the gradient does
not depend on the number of microbatches, on padding, or on the mesh.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.array_ops import Array, masked_sum
from jaxrl.data.packing import length_sorted, row_slices
from jaxrl.losses.kl import approximate_kl
from jaxrl.losses.reduction import reduction_weights
from jaxrl.registry import PolicyLossRegistry, accepted_keywords, check_hyperparameters
from jaxrl.types import TrainBatch, TrainState

Metrics = dict[str, Array]
Forward = Callable[
    ..., tuple[Array, Array]
]  # (params, tokens, lengths, mask) -> log_probs, entropy [B, T]


class TokenWeights(struct.PyTreeNode):
    """Weights [B, T] of the terms of the objective, fixed by the whole minibatch."""

    policy: Array
    kl: Array  # sequence mean, as SkyRL's
    entropy: Array  # token mean; also the weight of every logged mean


@functools.partial(jax.jit, static_argnames="algorithm")
def minibatch_weights(loss_mask: Array, algorithm: Any) -> TokenWeights:
    """The weights of a minibatch with mask [B, T]."""
    return TokenWeights(
        policy=reduction_weights(
            loss_mask, algorithm.loss_reduction, max_seq_len=algorithm.max_seq_len
        ),
        kl=reduction_weights(loss_mask, "sequence_mean"),
        entropy=reduction_weights(loss_mask, "token_mean"),
    )


def make_policy_loss(algorithm: Any) -> Callable[..., tuple[Array, Metrics]]:
    """The configured loss as `(log_probs, entropy, batch, key) -> (loss, metrics)`.

    The function gets the keywords that its signature names, and its hyperparameters from
    `algorithm.policy_loss_kwargs`. A plain number as second result is its clip ratio.
    """
    func = PolicyLossRegistry.resolve(algorithm.policy_loss_type)
    check_hyperparameters(
        func, algorithm.policy_loss_kwargs, "trainer.algorithm.policy_loss_kwargs"
    )

    def policy_loss(
        log_probs: Array, entropy: Array, batch: TrainBatch, key: Array
    ) -> tuple[Array, Metrics]:
        offered = {
            "loss_mask": batch.loss_mask,
            "rollout_log_probs": batch.rollout_log_probs,
            "ref_log_probs": batch.ref_log_probs,
            "entropy": entropy,
            "group_ids": batch.index,
            "rewards": batch.rewards,
            "policy_versions": batch.policy_versions,
            "key": key,
            **algorithm.policy_loss_kwargs,
        }
        old_log_probs = batch.old_log_probs
        if old_log_probs is None:  # the first update on a batch: the policy is the old policy
            old_log_probs = jax.lax.stop_gradient(log_probs)
        loss, metrics = func(
            log_probs,
            old_log_probs,
            batch.advantages,
            algorithm,
            **accepted_keywords(func, offered),
        )
        if loss.shape not in ((), log_probs.shape):
            raise ValueError(
                f"policy loss '{algorithm.policy_loss_type}' returned the shape {loss.shape}; "
                f"it must be one number, or the loss of each token {log_probs.shape}"
            )
        metrics = metrics if isinstance(metrics, Mapping) else {"clip_ratio": metrics}
        return loss, {name: jnp.asarray(value) for name, value in metrics.items()}

    return policy_loss


def make_objective(
    algorithm: Any, policy_loss: Callable[..., tuple[Array, Metrics]]
) -> Callable[..., tuple[Array, Metrics]]:
    """`(log_probs, entropy, batch, weights, key) -> (objective, metrics)`, all terms summed."""

    def objective(
        log_probs: Array, entropy: Array, batch: TrainBatch, weights: TokenWeights, key: Array
    ) -> tuple[Array, Metrics]:
        mask = batch.loss_mask
        with jax.named_scope("loss"):
            loss, own = policy_loss(log_probs, entropy, batch, key)
            policy = loss if loss.ndim == 0 else masked_sum(loss, weights.policy)
            mean_entropy = masked_sum(entropy, weights.entropy)
            total = policy
            metrics = {"policy_loss": policy, "policy_entropy": mean_entropy}
            if batch.old_log_probs is None:
                metrics |= mismatch(log_probs, batch, weights)
            if algorithm.use_entropy_loss:
                total -= algorithm.entropy_loss_coef * mean_entropy
            if batch.ref_log_probs is not None:
                kl = approximate_kl(
                    log_probs, batch.ref_log_probs, mask, algorithm.kl_estimator_type
                )
                metrics["policy_kl"] = masked_sum(kl, weights.kl)
                total += algorithm.kl_loss_coef * metrics["policy_kl"]
        metrics["final_loss"] = total
        for name, value in own.items():
            metrics[f"loss_metrics/{name}"] = reduce_metric(name, value, mask, weights.entropy)
        return total, jax.lax.stop_gradient(metrics)

    return objective


def mismatch(log_probs: Array, batch: TrainBatch, weights: TokenWeights) -> Metrics:
    """How far sampler and trainer are apart on the log-probs of the sampled tokens."""
    difference = jnp.abs(log_probs - batch.rollout_log_probs)
    name = "rollout_train_logprobs_abs_diff"
    return {
        f"{name}_mean": masked_sum(difference, weights.entropy),
        f"{name}_max": jnp.max(difference * (batch.loss_mask != 0)),
    }


def reduce_metric(name: str, value: Array, mask: Array, weights: Array) -> Array:
    """A loss's metric [B, T] or [] -> this microbatch's part of it.

    `_max` and `_min` by name; else the share of the masked mean (a number counts by its tokens).
    """
    if name.endswith("_max"):
        return jnp.max(value, initial=-jnp.inf, where=mask != 0) if value.ndim else value
    if name.endswith("_min"):
        return jnp.min(value, initial=jnp.inf, where=mask != 0) if value.ndim else value
    return masked_sum(jnp.broadcast_to(value, mask.shape), weights)


def merge_metrics(
    parts: Sequence[Mapping[str, Any]], merge: Callable[[Sequence[float]], Any] = sum
) -> dict[str, float]:
    """Metrics of a whole from those of its parts: `merge`d, but for `_max` and `_min`.

    Microbatches hold shares of a minibatch's means (sum); a step's are the mean over minibatches.
    """
    by_name = {"_max": max, "_min": min}
    return {
        name: float(by_name.get(name[-4:], merge)([float(part[name]) for part in parts]))
        for name in parts[0]
    }


class Updater:
    """The jitted pieces of an update, compiled once per shape.

    Args:
        forward: `(params, tokens, lengths, mask) -> (log_probs, entropy)`.
        apply: `(state, gradients) -> (state, metrics)`.
        algorithm: the AlgorithmConfig.
        shardings: the TrainState's; gradients are placed like the parameters.
        microbatch_rows: rows of one backward pass, over all devices.
        place: puts a tree of row arrays on the devices.
    """

    def __init__(
        self,
        forward: Forward,
        apply: Callable[..., tuple[TrainState, Metrics]],
        *,
        algorithm: Any,
        shardings: TrainState,
        microbatch_rows: int,
        place: Callable[[Any], Any],
    ) -> None:
        self.algorithm, self.microbatch_rows, self.place = algorithm, microbatch_rows, place
        self.policy_loss = make_policy_loss(algorithm)
        objective = make_objective(algorithm, self.policy_loss)

        def accumulate(
            grads: Any, params: Any, batch: TrainBatch, weights: TokenWeights, key: Array
        ) -> tuple[Any, Metrics]:
            def loss_fn(params: Any) -> tuple[Array, Metrics]:
                log_probs, entropy = forward(params, batch.tokens, batch.lengths, batch.loss_mask)
                return objective(log_probs, entropy, batch, weights, key)

            new, metrics = jax.grad(loss_fn, has_aux=True)(params)
            return jax.tree.map(jnp.add, grads, new), metrics

        def pull_back(grads: Any, params: Any, batch: TrainBatch, cotangents: Any) -> Any:
            outputs, vjp = jax.vjp(
                lambda p: forward(p, batch.tokens, batch.lengths, batch.loss_mask), params
            )
            del outputs
            return jax.tree.map(jnp.add, grads, vjp(cotangents)[0])

        like_params = shardings.params
        self.forward = jax.jit(forward, static_argnames="with_entropy")
        self.zeros = jax.jit(
            lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=like_params
        )
        self.accumulate = jax.jit(accumulate, donate_argnums=0, out_shardings=(like_params, None))
        self.pull_back = jax.jit(pull_back, donate_argnums=0, out_shardings=like_params)
        self.cotangents = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))
        self.apply = jax.jit(apply, donate_argnums=0, out_shardings=(shardings, None))
        self._whole: bool | None = None

    def update(
        self, state: TrainState, minibatch: TrainBatch, weights: TokenWeights, key: Array
    ) -> tuple[TrainState, list[Metrics], Metrics]:
        """One optimizer update on a minibatch of host arrays; `state` is donated.

        Args:
            weights: `minibatch_weights` of the minibatch, on the host.
            key: for losses that draw.

        Returns:
            The new state, the metrics of each microbatch (see `merge_metrics`), those of `apply`.
        """
        grads, metrics = self.gradients(state.params, minibatch, weights, key)
        state, applied = self.apply(state, grads)
        return state, metrics, applied

    def gradients(
        self, params: Any, minibatch: TrainBatch, weights: TokenWeights, key: Array
    ) -> tuple[Any, list[Metrics]]:
        """Gradient of the objective of a minibatch, accumulated over its microbatches.

        A loss that returns a number sees the minibatch as a whole: its cotangent is taken on the
        [B, T] log-probs of a gradient-free pass and pulled back microbatch by microbatch.
        """
        rows, lengths = self.microbatch_rows, np.asarray(minibatch.lengths)
        grads, metrics = self.zeros(params), []
        if self._sees_whole_minibatch(minibatch) and minibatch.tokens.shape[0] != rows:
            outputs = self.forward_rows(params, minibatch, rows, with_entropy=True)
            cotangents, metrics = self.cotangents(*outputs, minibatch, weights, key)
            parts = length_sorted((minibatch, jax.device_get(cotangents)), lengths, rows)
            for _, (batch, cotangent) in parts:
                grads = self.pull_back(grads, params, self.place(batch), self.place(cotangent))
            return grads, [metrics]
        for _, (batch, weight) in length_sorted((minibatch, weights), lengths, rows):
            grads, part = self.accumulate(grads, params, self.place(batch), self.place(weight), key)
            metrics.append(part)
        return grads, metrics

    def warm_up(self, params: Any, minibatch: TrainBatch) -> None:
        """Compile `update`, all but `apply`, for minibatches of this shape."""
        weights = jax.device_get(minibatch_weights(minibatch.loss_mask, self.algorithm))
        if not self._sees_whole_minibatch(minibatch):  # then one microbatch will do
            minibatch, weights = next(row_slices((minibatch, weights), self.microbatch_rows))
        self.gradients(params, minibatch, weights, jax.random.key(0))

    def forward_rows(
        self, params: Any, batch: TrainBatch, rows: int, *, with_entropy: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs and entropy [B, T] of a whole batch, `rows` rows at a time, on the host."""
        given = (batch.tokens, batch.lengths, batch.loss_mask)
        slices, pending = [], []
        for chosen, part in length_sorted(given, np.asarray(batch.lengths), rows):
            slices.append((chosen, part[0].shape[1]))
            pending.append(self.forward(params, *self.place(part), with_entropy=with_entropy))
        log_probs = np.zeros(batch.tokens.shape, np.float32)
        entropy = np.zeros_like(log_probs)
        for (chosen, width), (part, part_entropy) in zip(
            slices, jax.device_get(pending), strict=True
        ):
            log_probs[chosen, :width] = part[: len(chosen)]
            entropy[chosen, :width] = part_entropy[: len(chosen)]
        return log_probs, entropy

    def _sees_whole_minibatch(self, minibatch: TrainBatch) -> bool:
        if self._whole is None:  # a property of the function: asked once
            array = jax.ShapeDtypeStruct(minibatch.tokens.shape, jnp.float32)
            key = jax.eval_shape(lambda: jax.random.key(0))
            loss, _ = jax.eval_shape(self.policy_loss, array, array, minibatch, key)
            self._whole = bool(loss.ndim == 0)
        return bool(self._whole)
