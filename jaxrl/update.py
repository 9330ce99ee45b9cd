"""One optimizer update: gradients in microbatches, apply."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.array_ops import Array
from jaxrl.data.packing import length_sorted, one_per_row, row_slices
from jaxrl.models.lora import trained, with_token_keys, with_trained
from jaxrl.objective import (
    Metrics,
    TokenWeights,
    make_objective,
    make_policy_loss,
    minibatch_weights,
)
from jaxrl.registry import PolicyLossRegistry
from jaxrl.types import ModelRows, TrainBatch, TrainState

Forward = Callable[..., tuple[Array, Array]]  # (params, rows) -> log_probs, entropy [B, T]

Apply = Callable[..., tuple[TrainState, Metrics]]  # (state, gradients) -> state, metrics


class Updater:
    """The jitted pieces of an update, compiled once per shape.

    Args:
        forward: `(params, ModelRows) -> (log_probs, entropy)`. Where params have adapters
            (`lora.attach`) only these get a gradient.
        apply: `(state, gradients) -> (state, metrics)`.
        algorithm: the AlgorithmConfig.
        shardings: the TrainState's; gradients are placed like the parameters.
        microbatch_rows: rows of one backward pass, over all devices.
        block_rows: those of one device, which token_mean_legacy takes its means over.
        place: puts a tree of row arrays on the devices.
    """

    def __init__(
        self,
        forward: Forward,
        apply: Apply,
        *,
        algorithm: Any,
        shardings: TrainState,
        microbatch_rows: int,
        block_rows: int,
        place: Callable[[Any], Any],
    ) -> None:
        self.algorithm, self.microbatch_rows, self.place = algorithm, microbatch_rows, place
        self.block_rows = block_rows
        self.policy_loss = make_policy_loss(algorithm)
        objective = make_objective(algorithm, self.policy_loss)

        def accumulate(grads: Any, params: Any, rows: ModelRows, *of_loss: Any) -> Any:
            def loss_fn(new: Any) -> tuple[Array, Metrics]:
                outputs = forward(with_trained(params, new), rows)
                return objective(*outputs, *of_loss)  # batch, weights, key

            new, metrics = jax.grad(loss_fn, has_aux=True)(trained(params))
            return jax.tree.map(jnp.add, grads, new), metrics

        def pull_back(grads: Any, params: Any, rows: ModelRows, cotangents: Any) -> Any:
            outputs, vjp = jax.vjp(
                lambda p: forward(with_trained(params, p), rows), trained(params)
            )
            del outputs
            return jax.tree.map(jnp.add, grads, vjp(cotangents)[0])

        like_params = shardings.params
        self.forward = jax.jit(forward, static_argnames="with_entropy")
        self.zeros = jax.jit(
            lambda params: jax.tree.map(jnp.zeros_like, trained(params)), out_shardings=like_params
        )
        self.accumulate = jax.jit(accumulate, donate_argnums=0, out_shardings=(like_params, None))
        self.pull_back = jax.jit(pull_back, donate_argnums=0, out_shardings=like_params)
        self.cotangents = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))
        self.apply = jax.jit(apply, donate_argnums=0, out_shardings=(shardings, None))
        self._whole: bool | None = None

    def weights(self, minibatch: TrainBatch) -> tuple[TokenWeights, Metrics]:
        """`minibatch_weights`, on the host."""
        return jax.device_get(
            minibatch_weights(minibatch, self.algorithm, block_rows=self.block_rows)
        )

    def update(
        self,
        state: TrainState,
        minibatch: TrainBatch,
        weights: TokenWeights,
        key: Array,
        params: Any = None,
    ) -> tuple[TrainState, list[Metrics], Metrics]:
        """One optimizer update on a minibatch of host arrays; `state` is donated.

        Args:
            weights: `self.weights` of the minibatch.
            key: for losses that draw, and for dropout.
            params: of the policy, where they are more than `state.params`: adapters on their base.

        Returns:
            The new state, the metrics of each microbatch (see `merge_metrics`), those of `apply`.
        """
        params = state.params if params is None else params
        grads, metrics = self.gradients(params, minibatch, weights, key)
        state, applied = self.apply(state, grads)
        return state, metrics, applied

    def gradients(
        self, params: Any, minibatch: TrainBatch, weights: TokenWeights, key: Array
    ) -> tuple[Any, list[Metrics]]:
        """Gradient of the objective of a minibatch, accumulated over its microbatches.

        A loss that returns a number, or has batch statistics, sees the minibatch as a whole,
        longest rows first and cut to the bucket of the longest: its cotangent is taken on the [B,
        T] log-probs of a gradient-free pass and pulled back microbatch by microbatch.
        """
        rows, lengths = self.microbatch_rows, np.asarray(minibatch.lengths)
        grads, metrics = self.zeros(params), []
        if self._sees_whole_minibatch(minibatch) and minibatch.tokens.shape[0] != rows:
            # as if it were one microbatch: a scalar loss may count what is masked
            whole = length_sorted((minibatch, weights), lengths, len(lengths))
            _, (minibatch, weights) = next(whole)
            lengths = minibatch.lengths
            outputs = self.forward_rows(params, minibatch, rows, with_entropy=True, key=key)
            cotangents, metrics = self.cotangents(*outputs, minibatch, weights, key)
            parts = length_sorted((minibatch, jax.device_get(cotangents)), lengths, rows)
            for _, (batch, cotangent) in parts:
                given = self.place((_rows_of(batch, params, key), cotangent))
                grads = self.pull_back(grads, params, *given)
            return grads, [metrics]
        for _, (batch, weight) in length_sorted((minibatch, weights), lengths, rows):
            of_loss = self.place((_rows_of(batch, params, key), batch, weight))
            grads, part = self.accumulate(grads, params, *of_loss, key)
            metrics.append(part)
        return grads, metrics

    def warm_up(self, params: Any, minibatch: TrainBatch) -> None:
        """Compile `update`, all but `apply`, for minibatches of this shape."""
        weights, _ = self.weights(minibatch)
        if not self._sees_whole_minibatch(minibatch):  # then one microbatch will do
            minibatch, weights = next(row_slices((minibatch, weights), self.microbatch_rows))
        self.gradients(params, minibatch, weights, jax.random.key(0))

    def forward_rows(
        self,
        params: Any,
        batch: TrainBatch,
        rows: int,
        *,
        with_entropy: bool = False,
        key: Array | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs and entropy [B, T] of a whole batch, `rows` rows at a time, on the host.

        Args:
            key: of the update that will pull back through this pass: the same dropout; None: none.
        """
        slices, pending = [], []
        for chosen, part in length_sorted(batch, np.asarray(batch.lengths), rows):
            slices.append((chosen, part.tokens.shape[1]))
            given = self.place(_rows_of(part, params, key))
            pending.append(self.forward(params, given, with_entropy=with_entropy))
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
            name = self.algorithm.policy_loss_type
            self._whole = loss.ndim == 0 or PolicyLossRegistry.has_batch_statistics(name)
        return bool(self._whole)


def _rows_of(batch: TrainBatch, params: Any, key: Array | None) -> ModelRows:
    rows = one_per_row(batch.tokens, batch.lengths, batch.loss_mask)
    return rows if key is None else with_token_keys(params, rows, batch.row_ids, key)
