"""Log-probs and entropy of whole batches, in microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl.data.microbatches import Microbatching, microbatches
from jaxrl.models.lora import with_token_keys
from jaxrl.types import Array, TrainBatch

Forward = Callable[..., tuple[Array, Array]]  # (params, rows) -> log_probs, entropy [B, T]


class Scorer:
    """A forward pass, jitted on one mesh: that of the policy, or of a reference on its own.

    Args:
        forward: `(params, ModelRows) -> (log_probs, entropy)`.
        place: puts a tree of row arrays on the devices.
        microbatching: how batches are cut.
    """

    def __init__(
        self, forward: Forward, place: Callable[[Any], Any], microbatching: Microbatching
    ) -> None:
        self.forward = jax.jit(forward, static_argnames="with_entropy")
        self.place, self.microbatching = place, microbatching

    def __call__(
        self,
        params: Any,
        batch: TrainBatch,
        *,
        microbatching: Microbatching | None = None,
        with_entropy: bool = False,
        key: Array | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs and entropy [B, T], on the host.

        Args:
            microbatching: another cut than the scorer's own.
            key: of the update that will pull back through this pass: the same dropout; None: none.
        """
        pending, settings = [], microbatching or self.microbatching
        for chosen, rows, row_ids in microbatches(batch.row_ids, batch, settings):
            given = self.place(with_token_keys(params, rows, row_ids, key))
            pending.append((chosen, self.forward(params, given, with_entropy=with_entropy)))
        log_probs = np.zeros(batch.tokens.shape, np.float32)
        entropy = np.zeros_like(log_probs)
        for chosen, parts in jax.device_get(pending):
            for output, part in zip((log_probs, entropy), parts, strict=True):
                output[chosen, : part.shape[1]] = part[: len(chosen)]
        return log_probs, entropy
