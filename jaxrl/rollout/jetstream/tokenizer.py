"""A tokenizer in the form that JetStream's orchestrator calls."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.rollout.jetstream.protocol import prefill_length


class PaddingTokenizer:
    """Wrap a Hugging Face tokenizer as JetStream's orchestrator calls it: prompts come out padded.

    Args:
        stop_token_ids: besides the end-of-sequence token.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.eos_id: int = tokenizer.eos_token_id
        self.bos_id: int | None = tokenizer.bos_token_id
        self.pad_id: int = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.stop_tokens = {self.eos_id, *stop_token_ids}

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray, int]:
        """Return the padded tokens [P] of a text, and how many of them are real."""
        ids = self.tokenizer(s, add_special_tokens=False)["input_ids"]
        if kwargs.get("is_bos") and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        padded = np.full(prefill_length(len(ids)), self.pad_id, np.int32)
        padded[: len(ids)] = ids
        return padded, len(ids)

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """Return the text of tokens."""
        del kwargs
        return self.tokenizer.decode(token_ids)
