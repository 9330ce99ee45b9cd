"""Describe the model behind a server: its name, its tokenizer, its limits."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.data.tokenizer import encode_prompt
from jaxrl.rollout.server.answer_formats import AnswerFormat
from jaxrl.rollout.server.errors import ApiError, refuse
from jaxrl.types import Message


@dataclass(frozen=True)
class ServedModel:
    """Describe the model behind the server.

    Attributes:
        name: that requests must give.
        eos_token_ids: end an answer.
        variables: of the chat template, unless a request has others.
        answer_format: reads thoughts and calls of tools in an answer; None: it is plain text.
    """

    name: str
    tokenizer: Any
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    answer_format: AnswerFormat | None = None

    def check_name(self, name: str | None) -> None:
        """Raise 404 for another model's name; None: the request names none."""
        if name not in (None, self.name):
            message = (
                f"the model {name!r} does not exist; this server has {self.name!r}: write "
                f"model={self.name!r}, or leave it out"
            )
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_ids(self, field_name: str, ids: Sequence[int]) -> tuple[int, ...]:
        """Return token ids of the vocabulary as a tuple; refuse others."""
        for token in ids:
            if not 0 <= token < self.vocab_size:
                fix = f"is no token id; they are integers from 0 to {self.vocab_size - 1}"
                refuse(field_name, token, fix)
        return tuple(ids)

    @functools.cached_property
    def most_characters(self) -> int:
        """Return the characters of the longest tokens that fill the context."""
        return self.max_model_len * max(map(len, self.tokenizer.get_vocab()))

    def check_length(self, field_name: str, characters: int) -> None:
        """Refuse a text that is too long whatever its tokens are, before they are looked for."""
        if characters > self.most_characters:
            raise ApiError(
                400,
                f"{field_name} has {characters} characters; the longest tokens of a context of "
                f"{self.max_model_len} have {self.most_characters}. Shorten it",
                param=field_name,
                code="context_length_exceeded",
            )

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text."""
        self.check_length("prompt", len(text))
        try:
            return tuple(self.tokenizer(text, add_special_tokens=special)["input_ids"])
        except Exception as error:  # lone surrogates, for example
            message = f"prompt: the tokenizer refuses it: {error}"
            raise ApiError(400, message, param="prompt") from error

    def encode_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation, up to where the assistant shall speak."""
        said = (message.get("content") for message in messages)
        self.check_length("messages", sum(len(text) for text in said if isinstance(text, str)))
        try:
            return tuple(encode_prompt(self.tokenizer, messages, **variables))
        except Exception as error:  # whatever a template raises
            message = f"messages: the chat template refuses them: {error}"
            raise ApiError(400, message, param="messages") from error
