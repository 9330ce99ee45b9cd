"""The tokens of a conversation: what was sampled, what was given, what stands between turns."""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxrl.data.columns import TOKEN_COLUMNS
from jaxrl.rollout.protocol import Completion
from jaxrl.types import Message

_WORDS = "I am an assistant."
_EXCHANGE = [{"role": "user", "content": "I am a user."}, {"role": "assistant", "content": _WORDS}]


@dataclass
class Transcript:
    """Hold the tokens of a conversation so far; they are only ever appended.

    Example: "3142>" was answered "12<eos>", the environment said "no" and the template asked again
    with ">": prompt [3, 1, 4, 2, 13], tokens [1, 2, 45, 33, 34, 13], loss_mask [1, 1, 1, 0, 0, 0],
    turns [(0, 3)].
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)  # 1 = sampled
    rollout_log_probs: list[float] = field(default_factory=list)  # 0 where not sampled
    rewards: list[float] = field(default_factory=list)
    # () = all, or not recorded
    sampling_mask_ids: list[tuple[int, ...]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the policy; -1 where not sampled
    context_versions: list[int] = field(default_factory=list)  # the oldest in its context, or -1
    turns: list[tuple[int, int]] = field(default_factory=list)  # first token, one after the last
    routes: np.ndarray | None = None  # [n, Lx, k] of the first n tokens, those of the prompt first

    @property
    def input(self) -> tuple[int, ...]:
        """Return the tokens that the next turn is sampled from."""
        return (*self.prompt, *self.tokens)

    @property
    def policy_version(self) -> int:
        """Return the older of the two versions of the first sampled token; -1 if there is none."""
        versions = zip(self.versions, self.context_versions, strict=True)
        return next((min(two) for two in versions if two[0] >= 0), -1)

    def add_sampled(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        sampling_mask_ids: Sequence[tuple[int, ...]] = (),
        versions: Sequence[int] = (),
        context_versions: Sequence[int] = (),
        routes: np.ndarray | None = None,
    ) -> None:
        """Add a turn of the policy; all but its tokens may be empty, as a whole.

        `context_versions` are `versions` where the engine does not say. Of `routes`, which begin
        with the prompt, what is known already stays: earlier turns were drawn from it.
        """
        if routes is not None:
            known = routes[:0] if self.routes is None else self.routes
            self.routes = np.concatenate([known, routes[len(known) :]])
        start = len(self.tokens)
        self._add(
            tokens,
            loss_mask=[1] * len(tokens),
            rollout_log_probs=log_probs,
            sampling_mask_ids=sampling_mask_ids,
            versions=versions,
            context_versions=context_versions or versions,
        )
        self.turns.append((start, len(self.tokens)))

    def add_given(self, tokens: Sequence[int]) -> None:
        """Add tokens that the policy did not sample."""
        self._add(tokens)

    def extend_turn(self, token: int) -> None:
        """Add a given token that belongs to the turn before it."""
        self.add_given([token])
        self.turns[-1] = self.turns[-1][0], len(self.tokens)

    def keep(self, sampled: int) -> None:
        """Keep the first `sampled` tokens of the last turn, which ends the transcript."""
        start = self.turns[-1][0]
        self._cut(start + sampled)
        self.turns[-1] = start, len(self.tokens)

    def end_at_turn(self) -> None:
        """Cut off what was given after the last turn: nothing followed from it."""
        self._cut(self.turns[-1][1] if self.turns else 0)

    def reward(self, rewards: float | Sequence[float]) -> None:
        """Reward the last turn, which ends the transcript: each of its tokens, or the last of them.

        What the environment gave to tokens that were not kept goes to the last one.
        """
        start, end = self.turns[-1]
        if isinstance(rewards, Sequence):
            kept, lost = rewards[: end - start], rewards[end - start :]
            self.rewards[start:end] = kept
            self.rewards[end - 1] += sum(lost)
        else:
            self.rewards[end - 1] += rewards

    def mask(self) -> None:
        """Mask the whole conversation: nothing is learnt from it."""
        self.loss_mask, self.rewards = [0] * len(self.tokens), [0.0] * len(self.tokens)

    @property
    def columns(self) -> dict[str, Any]:
        """Return the fields of `Trajectory` with an entry per response token."""
        return {column.field: getattr(self, column.field) for column in TOKEN_COLUMNS}

    def _add(self, tokens: Sequence[int], **entries: Sequence[Any]) -> None:
        """Append tokens, with blanks in the columns that are not given or empty."""
        self.tokens += tokens
        for column in TOKEN_COLUMNS:
            new = entries.get(column.field) or [column.blank] * len(tokens)
            getattr(self, column.field).extend(new)

    def _cut(self, length: int) -> None:
        if self.routes is not None:
            self.routes = self.routes[: len(self.prompt) + length]
        if length < len(self.tokens):
            for column in (self.tokens, *self.columns.values()):
                del column[length:]


class TurnTemplate:
    """Give what a chat template writes from the end of the assistant's words to its next ones.

    The template renders a fixed exchange of a user and an assistant, followed by the new messages;
    what stands after the assistant's words does not depend on what these were. So the tokens of a
    conversation are appended and never made again from text.

    Args:
        tokenizer: with a chat template.
        variables: of the template.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any]) -> None:
        self.tokenizer, self.variables = tokenizer, variables

    def between(
        self, messages: Sequence[Message], stop_token_ids: Collection[int]
    ) -> tuple[list[int], list[int]]:
        """Return the tokens that end the assistant's turn, and those from there to its next turn.

        Args:
            messages: what the environment says.
            stop_token_ids: a turn ends with the first of these that the template writes.

        Raises:
            Exception: whatever the template raises for such messages.
        """
        tokens = self._after_words(messages, add_generation_prompt=True)
        stops = [i for i, token in enumerate(self._closing) if token in stop_token_ids]
        end = stops[0] + 1 if stops else 0
        if tokens[:end] != self._closing[:end]:  # a template that looks at what follows
            end = 0
        return tokens[:end], tokens[end:]

    def encode(self, text: str) -> list[int]:
        """Tokenise text as it stands, without the template."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def _closing(self) -> list[int]:
        """Return the tokens that follow the words of an assistant who has the last word."""
        return self._after_words([], add_generation_prompt=False)

    def _after_words(self, messages: Sequence[Message], **options: Any) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            [*_EXCHANGE, *map(dict, messages)], tokenize=False, **{**options, **self.variables}
        )
        at = text.find(_WORDS)
        if at < 0:
            raise ValueError(
                "the chat template does not write what the assistant says, so a conversation "
                "cannot have several turns; set generator.chat_template to one that does"
            )
        head = self.encode(text[: at + len(_WORDS)])
        whole = self.encode(text)
        if whole[: len(head)] == head:
            return whole[len(head) :]
        return self.encode(text[at + len(_WORDS) :])  # a token reaches over the end of the words


def spoken_tokens(completion: Completion) -> list[int]:
    """Return a completion's tokens without the one that stopped it, if one did.

    The tokens of a stop string stay.
    """
    ended = completion.stop_reason == "stop" and completion.stop_string is None
    return completion.tokens[:-1] if ended else completion.tokens


def tokens_of_prefix(tokenizer: Any, tokens: Sequence[int], text: str) -> int:
    """Return how many of the sampled tokens it takes to say a prefix of their text, at least 1.

    Raises:
        ValueError: they do not say it: another text would have to be tokenised, and the policy
            trained on tokens that it did not sample.
    """

    def says(count: int) -> bool:
        return tokenizer.decode(tokens[:count], skip_special_tokens=True).startswith(text)

    count = bisect_left(range(1, len(tokens)), True, key=says) + 1
    if says(count):
        return count
    raise ValueError(
        f"postprocessed_action {text!r} is not a prefix of the response; sampled tokens can be "
        "cut off, never replaced"
    )
