"""The `Engine` protocol of JetStream's newest source, by shape: nothing of JetStream is imported.

https://github.com/AI-Hypercomputer/JetStream, jetstream/engine/engine_api.py, read at acd4f5a.
An engine holds slots. A prompt is prefilled to a prefix and its first token, a prefix is inserted
into slots, and each call of `generate` draws the next token of every slot. State is explicit:
`prefix` and `decode_state` are whatever the engine likes, and inserting may use them up.

Shape legend: S slots, n samples per slot, k tokens of one call.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax import struct

from jaxrl.types import Array

PREFILL_LENGTHS = tuple(2**i for i in range(4, 16))  # 16 to 32768: what prompts are padded to


def prefill_length(tokens: int) -> int:
    """Return the length that a prompt of so many tokens is padded to.

    Raises:
        ValueError: JetStream has none that long.
    """
    for length in PREFILL_LENGTHS:
        if length >= tokens:
            return length
    raise ValueError(
        f"a prompt of {tokens} tokens is longer than JetStream's longest prefill, "
        f"{PREFILL_LENGTHS[-1]}; shorten generator.max_input_length"
    )


class SlotData(struct.PyTreeNode):
    """Hold what a call drew in one slot."""

    tokens: Array  # [n, k]
    valid: Array  # [n, k], 0 where nothing was drawn
    lengths: Array  # [n], tokens drawn of each sample so far
    log_prob: Array | None = None  # [n, k]


class ResultTokens(struct.PyTreeNode):
    """Hold what a call drew in all slots, as one array, so that one copy brings it to the host."""

    data: Array  # [S * n, tokens, valid and lengths side by side]
    tokens_idx: tuple[int, int] = struct.field(pytree_node=False)  # columns of `data`
    valid_idx: tuple[int, int] = struct.field(pytree_node=False)
    length_idx: tuple[int, int] = struct.field(pytree_node=False)
    samples_per_slot: int = struct.field(pytree_node=False)
    log_prob: Array | None = None  # [S * n, k]

    def copy_to_host_async(self) -> None:
        """Begin to copy the arrays to the host."""
        for x in (self.data, self.log_prob):
            if isinstance(x, jax.Array):
                x.copy_to_host_async()

    def convert_to_numpy(self) -> "ResultTokens":
        """Return the arrays on the host; wait for them."""
        return jax.tree.map(np.asarray, self)

    def get_result_at_slot(self, slot: int) -> SlotData:
        """Return the rows of one slot."""
        first = slot * self.samples_per_slot
        return self._rows(slice(first, first + self.samples_per_slot))

    def get_result_at_slots(self, slots: Sequence[int]) -> SlotData:
        """Return one row for each of several slots."""
        return self._rows(np.asarray(slots))

    def _rows(self, rows: Any) -> SlotData:
        data, log_prob = self.data[rows], self.log_prob
        return SlotData(
            tokens=data[:, slice(*self.tokens_idx)],
            valid=data[:, slice(*self.valid_idx)],
            lengths=data[:, self.length_idx[0]],
            log_prob=None if log_prob is None else log_prob[rows],
        )


@runtime_checkable
class JetStreamEngine(Protocol):
    """Describe what the driver needs of an engine.

    It may also have `prefill_multisampling` and `bulk_insert`, which make one prefill serve a
    group, and `free_resource`.
    """

    def load_params(self, *args: Any, **kwargs: Any) -> Any:
        """Return the parameters that the other calls take."""
        ...

    def init_decode_state(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of decoding before the first prompt: all slots are empty."""
        ...

    def prefill(
        self, *, params: Any, padded_tokens: Array, true_length: int
    ) -> tuple[Any, ResultTokens]:
        """Return the prefix of a prompt, and the first token after it."""
        ...

    def insert(self, prefix: Any, decode_state: Any, slot: int) -> Any:
        """Return the state with the prefix in a slot."""
        ...

    def generate(self, params: Any, decode_state: Any) -> tuple[Any, ResultTokens]:
        """Draw the next token of every slot."""
        ...

    @property
    def max_concurrent_decodes(self) -> int:
        """Return the number of slots."""
        ...

    @property
    def max_prefill_length(self) -> int:
        """Return the most tokens of a padded prompt."""
        ...
