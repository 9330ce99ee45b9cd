"""A forward pass over whole batches, in microbatches: log-probs and entropy, or values."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxrl.data.microbatches import Microbatching, microbatches
from jaxrl.models.kernels.choice import Choice
from jaxrl.models.lora import with_token_keys
from jaxrl.parallel import fetch
from jaxrl.parallel.jit_once import jit_once
from jaxrl.types import Array, TrainBatch

Forward = Callable[..., tuple[Array, ...]]  # (params, rows) -> log_probs, entropy [B, T]


class ForwardPass:
    """Run a forward pass, jitted on one mesh: that of the policy, or of a reference on its own.

    Args:
        forward: `(params, ModelRows, **options) -> (log_probs, entropy)`, or a critic's to
            `(values,)`; equal ones are one program, see `jit_once`.
        place: puts a tree of row arrays on the devices.
        microbatching: how batches are cut.
        options: of `forward`, static, with their values here.
        kernels: that `forward` was made with.
    """

    def __init__(
        self,
        forward: Forward,
        place: Callable[[Any], Any],
        microbatching: Microbatching,
        options: Mapping[str, Any] = MappingProxyType({"with_entropy": False}),
        kernels: Sequence[Choice] = (),
    ) -> None:
        self.forward = jit_once(forward, static_argnames=tuple(options))
        self.options = dict(options)
        self.place, self.microbatching = place, microbatching
        self.kernels = tuple(kernels)
        self.teacher_head: Any = None  # weights, where rows have a teacher's states

    def __call__(
        self,
        params: Any,
        batch: TrainBatch,
        *,
        microbatching: Microbatching | None = None,
        key: Array | None = None,
        **options: Any,
    ) -> tuple[np.ndarray, ...]:
        """Return the outputs of the forward pass, each [B, T, ...], on the host.

        Args:
            microbatching: another cut than the pass's own.
            key: of the update that will pull back through this pass: the same dropout; None: none.
            options: in place of the pass's own.
        """
        pending, settings = [], microbatching or self.microbatching
        for chosen, rows, row_ids in microbatches(batch.row_ids, batch, settings):
            placed_rows = self.place(with_token_keys(params, rows, row_ids, key))
            if options.get("teacher_beta") is not None:
                placed_rows = placed_rows.replace(teacher_head=self.teacher_head)
            outputs = self.forward(params, placed_rows, **(self.options | options))
            pending.append((chosen, outputs))
        shape = batch.tokens.shape
        whole = tuple(np.zeros((*shape, *x.shape[2:]), x.dtype) for x in pending[0][1])
        for chosen, parts in fetch(pending):
            for output, part in zip(whole, parts, strict=True):
                output[chosen, : part.shape[1]] = part[: len(chosen)]
        return whole
