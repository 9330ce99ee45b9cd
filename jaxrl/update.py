"""One optimizer update: gradients in microbatches, apply."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.array_ops import Array
from jaxrl.data.microbatches import Microbatching, computed_tokens, microbatches
from jaxrl.data.packing import row_slices
from jaxrl.objective import (
    Metrics,
    TokenWeights,
    make_objective,
    make_policy_loss,
    minibatch_weights,
)
from jaxrl.offload import on_device
from jaxrl.registry import PolicyLossRegistry
from jaxrl.types import ModelRows, TrainBatch, TrainState

Forward = Callable[..., tuple[Array, Array]]  # (params, rows) -> log_probs, entropy [B, T]

Apply = Callable[..., tuple[TrainState, Metrics]]  # (state, gradients) -> state, metrics


class Updater:
    """The jitted pieces of an update, compiled once per shape.

    Args:
        forward: `(params, ModelRows) -> (log_probs, entropy)`.
        apply: `(state, gradients) -> (state, metrics)`.
        algorithm: the AlgorithmConfig.
        shardings: the TrainState's; gradients are placed like the parameters.
        microbatching: how minibatches are cut.
        block_rows: rows that token_mean_legacy takes its means over.
        place: puts a tree of row arrays on the devices.
        resting: the optimizer state's shardings between updates; None = as in an update.
    """

    def __init__(
        self,
        forward: Forward,
        apply: Apply,
        *,
        algorithm: Any,
        shardings: TrainState,
        microbatching: Microbatching,
        block_rows: int,
        place: Callable[[Any], Any],
        resting: Any = None,
    ) -> None:
        self.resting = resting
        self.algorithm, self.microbatching, self.place = algorithm, microbatching, place
        self.block_rows = block_rows
        self.policy_loss = make_policy_loss(algorithm)
        objective = make_objective(algorithm, self.policy_loss)

        def accumulate(grads: Any, params: Any, rows: ModelRows, *of_loss: Any) -> Any:
            def loss_fn(params: Any) -> tuple[Array, Metrics]:
                return objective(*forward(params, rows), *of_loss)  # batch, weights, key

            new, metrics = jax.grad(loss_fn, has_aux=True)(params)
            return jax.tree.map(jnp.add, grads, new), metrics

        def pull_back(grads: Any, params: Any, rows: ModelRows, cotangents: Any) -> Any:
            outputs, vjp = jax.vjp(lambda p: forward(p, rows), params)
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

    def weights(self, minibatch: TrainBatch) -> tuple[TokenWeights, Metrics]:
        """`minibatch_weights`, on the host."""
        return jax.device_get(
            minibatch_weights(minibatch, self.algorithm, block_rows=self.block_rows)
        )

    def update(
        self, state: TrainState, minibatch: TrainBatch, weights: TokenWeights, key: Array
    ) -> tuple[TrainState, list[Metrics], Metrics]:
        """One optimizer update on a minibatch of host arrays; `state` is donated.

        Args:
            weights: `self.weights` of the minibatch.
            key: for losses that draw.

        Returns:
            The new state, the metrics of each microbatch (see `merge_metrics`), those of `apply`.
        """
        grads, metrics = self.gradients(state.params, minibatch, weights, key)
        if self.resting is not None:
            state = state.replace(opt_state=on_device(state.opt_state))
        state, applied = self.apply(state, grads)
        return self.rest(state), metrics, applied

    def rest(self, state: TrainState) -> TrainState:
        """The state as it is kept between updates: its optimizer state where it rests."""
        if self.resting is None:
            return state
        return state.replace(opt_state=jax.device_put(state.opt_state, self.resting))

    def gradients(
        self, params: Any, minibatch: TrainBatch, weights: TokenWeights, key: Array
    ) -> tuple[Any, list[Metrics]]:
        """Gradient of the objective of a minibatch, accumulated over its microbatches.

        A loss that returns a number, or has batch statistics, sees the minibatch as a whole,
        longest rows first and cut to the bucket of the longest: its cotangent is taken on the [B,
        T] log-probs of a gradient-free pass and pulled back microbatch by microbatch.
        """
        lengths, grads, metrics = np.asarray(minibatch.lengths), self.zeros(params), []
        if self._sees_whole_minibatch(minibatch) and not self.microbatching.is_single(lengths):
            # as if it were one microbatch: a scalar loss may count what is masked
            one = Microbatching(rows=len(lengths), total=len(lengths))
            _, _, (minibatch, weights) = next(microbatches((minibatch, weights), minibatch, one))
            outputs = self.forward_rows(params, minibatch, self.microbatching, with_entropy=True)
            cotangents, metrics = self.cotangents(*outputs, minibatch, weights, key)
            return self.pulled_back(grads, params, minibatch, jax.device_get(cotangents)), [metrics]
        parts = microbatches((minibatch, weights), minibatch, self.microbatching)
        for _, rows, of_loss in parts:
            given = self.place((rows, *of_loss))
            grads, part = self.accumulate(grads, params, *given, key)
            metrics.append(part)
        return grads, metrics

    def pulled_back(self, grads: Any, params: Any, batch: TrainBatch, cotangents: Any) -> Any:
        """`grads` plus the gradient from the cotangents of log-probs and entropy, [B, T] each."""
        for _, rows, cotangent in microbatches(cotangents, batch, self.microbatching):
            grads = self.pull_back(grads, params, *self.place((rows, cotangent)))
        return grads

    def warm_up(self, params: Any, minibatch: TrainBatch) -> None:
        """Compile `update`, all but `apply`, for all microbatches of trajectories of this length.

        Args:
            minibatch: all its trajectories are equally long.
        """
        (weights, _), key = self.weights(minibatch), jax.random.key(0)
        lengths = np.asarray(minibatch.lengths)
        whole = self._sees_whole_minibatch(minibatch)
        if whole:
            self.gradients(params, minibatch, weights, key)
        if whole and self.microbatching.is_single(lengths):
            return
        for size in self.microbatching.batch_sizes(self.microbatching.width(int(lengths[0]))):
            part, weight = next(row_slices((minibatch, weights), size))
            if not whole:
                self.gradients(params, part, weight, key)
                continue
            outputs = self.forward_rows(params, part, self.microbatching, with_entropy=True)
            self.pulled_back(self.zeros(params), params, part, outputs)

    def forward_rows(
        self,
        params: Any,
        batch: TrainBatch,
        microbatching: Microbatching,
        *,
        with_entropy: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs and entropy [B, T] of a whole batch, in microbatches, on the host."""
        pending = [
            (chosen, self.forward(params, self.place(rows), with_entropy=with_entropy))
            for chosen, rows, _ in microbatches((), batch, microbatching)
        ]
        log_probs = np.zeros(batch.tokens.shape, np.float32)
        entropy = np.zeros_like(log_probs)
        for chosen, parts in jax.device_get(pending):
            for output, part in zip((log_probs, entropy), parts, strict=True):
                output[chosen, : part.shape[1]] = part[: len(chosen)]
        return log_probs, entropy

    def packing_efficiency(self, minibatches: Sequence[TrainBatch]) -> float:
        """Tokens of the trajectories / tokens that the model runs on, in one pass over them."""
        lengths = [np.asarray(minibatch.lengths) for minibatch in minibatches]
        computed = sum(computed_tokens(x, self.microbatching) for x in lengths)
        return float(sum(x.sum() for x in lengths) / computed)

    def _sees_whole_minibatch(self, minibatch: TrainBatch) -> bool:
        if self._whole is None:  # a property of the function: asked once
            array = jax.ShapeDtypeStruct(minibatch.tokens.shape, jnp.float32)
            key = jax.eval_shape(lambda: jax.random.key(0))
            loss, _ = jax.eval_shape(self.policy_loss, array, array, minibatch, key)
            name = self.algorithm.policy_loss_type
            self._whole = loss.ndim == 0 or PolicyLossRegistry.has_batch_statistics(name)
        return bool(self._whole)
