"""Conversations to imitate: reading rows, tokenising them, and marking what the assistant said.

A row has `messages`, or `prompt` and `completion` (each a list of messages, or a string: what the
user said, what the assistant answered); `tools`, a list of schemas, reaches the chat template.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.data.messages import BadRow, messages_of
from jaxrl.data.packing import collate, length_bucket
from jaxrl.data.prompts import convert_rows
from jaxrl.types import GeneratorOutput, Message, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OVERLONG = ("truncate", "drop")
TRAIN_ON_WHAT = ("all_assistant_messages", "last_assistant_message")
# {% generation %} ... {% endgeneration %} around what the assistant says
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Conversation:
    """Hold a tokenised conversation.

    Example: "42>24<eos>" as `Conversation((4, 2, 13, 2, 4, 45), (0, 0, 0, 1, 1, 1))`.
    """

    tokens: tuple[int, ...]
    loss_mask: tuple[int, ...]  # 1 = imitated; never the first token, which nothing predicts
    source: int = 0  # its number in the config


def load_conversations(
    sources: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int | None = None,
    overlong: str = "truncate",
    train_on_what: str = "all_assistant_messages",
    stop_token_ids: Collection[int] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[Conversation], dict[str, int]]:
    """Read and tokenise data sets.

    Args:
        sources: what `data.prompts.load_rows` takes, one or more.
        max_length: in tokens; None = any.
        overlong: of longer ones "truncate" takes the beginning, "drop" nothing.
        train_on_what, stop_token_ids, chat_template_kwargs: see `encode_conversation`.

    Returns:
        The conversations in order; numbers of "truncated", "dropped", "untrained" (no mask) ones.

    Raises:
        ValueError: a bad source, bad rows (the first few listed by number), or nothing is left.
    """
    counts: Counter[str] = Counter()

    def convert(row: dict[str, Any]) -> Conversation | None:
        conversation = encode_conversation(
            tokenizer,
            _messages(row),
            train_on_what=train_on_what,
            stop_token_ids=stop_token_ids,
            **({"tools": row["tools"]} if row.get("tools") else {}),
            **(chat_template_kwargs or {}),
        )
        if max_length is not None and len(conversation.tokens) > max_length:
            counts["truncated" if overlong == "truncate" else "dropped"] += 1
            if overlong == "drop":
                return None
            conversation = _beginning(conversation, max_length)
        if not any(conversation.loss_mask):
            counts["untrained"] += 1
            return None
        return conversation

    found = [(i, row) for i, source in enumerate(sources) for row in convert_rows(source, convert)]
    usable = [replace(row, source=i) for i, row in found if row is not None]
    if not usable:
        raise _nothing_left(sources, counts, max_length)
    return usable, {name: counts[name] for name in ("truncated", "dropped", "untrained")}


def _beginning(conversation: Conversation, length: int) -> Conversation:
    return Conversation(conversation.tokens[:length], conversation.loss_mask[:length])


def _nothing_left(
    sources: Sequence[str], counts: Mapping[str, int], max_length: int | None
) -> ValueError:
    reasons = ", ".join(f"{number} {reason}" for reason, number in counts.items())
    return ValueError(
        f"no conversation is left of {', '.join(sources)}: {reasons}; sft.max_length="
        f"{max_length} is too short for them"
    )


def encode_conversation(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    *,
    train_on_what: str = "all_assistant_messages",
    stop_token_ids: Collection[int] = (),
    **chat_template_kwargs: Any,
) -> Conversation:
    """Tokenise a whole conversation in its chat template, and mark the tokens that are imitated.

    Where the template marks what the assistant says (`{% generation %}`), that is imitated.
    Elsewhere it is what a policy would have sampled: from the end of the generation prompt to the
    end-of-turn token. Both are found by rendering the conversation up to before and after the
    message, which must be beginnings of the whole, token by token.

    Args:
        train_on_what: "all_assistant_messages" or "last_assistant_message".
        stop_token_ids: tokens that end a turn; what a template writes after the last of them in a
            message is not imitated. A message without one is imitated to its end.
        **chat_template_kwargs: variables of the template.

    Raises:
        BadRow: no message is the assistant's; the template refuses the messages, or renders a part
            of them otherwise than the whole.
    """
    chosen = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if not chosen:
        roles = [message["role"] for message in messages]
        raise BadRow(f"no message has the role 'assistant', there is nothing to imitate: {roles}")
    last_only = train_on_what == "last_assistant_message"
    template = _Template(tokenizer, messages, chat_template_kwargs)
    if _MARKER.search(str(tokenizer.chat_template)):
        tokens, mask = template.marked()
        if last_only:
            mask[: _last_run(mask)] = 0
    else:
        tokens = template.render(len(messages))
        mask = np.zeros(len(tokens), np.int8)
        for number in chosen[-1:] if last_only else chosen:
            start, end = template.span(number, tokens)
            stops = [t for t in range(start, end) if tokens[t] in stop_token_ids]
            mask[start : stops[-1] + 1 if stops else end] = 1
    mask[:1] = 0
    return Conversation(tuple(tokens), tuple(mask.tolist()))


def conversation_batch(
    conversations: Sequence[Conversation], width_of: Callable[[int], int] = length_bucket
) -> TrainBatch:
    """Put one conversation in each row [B, T]; a response starts with its first imitated token.

    Args:
        width_of: tokens of the longest -> T.
    """
    starts = [conversation.loss_mask.index(1) for conversation in conversations]
    pairs = list(zip(conversations, starts, strict=True))
    masks = [list(c.loss_mask[start:]) for c, start in pairs]
    rows = len(conversations)
    output: GeneratorOutput = {
        "prompt_token_ids": [list(c.tokens[:start]) for c, start in pairs],
        "response_ids": [list(c.tokens[start:]) for c, start in pairs],
        "rewards": [[0.0] * len(mask) for mask in masks],
        "loss_masks": masks,
        "stop_reasons": ["stop"] * rows,
        "rollout_logprobs": None,
        "policy_versions": [0] * rows,
        "rollout_metrics": {},
    }
    return collate(output, range(rows), width_of)


class _Template:
    """Apply a chat template to the first messages of a conversation."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        messages: Sequence[Message],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.tokenizer, self.kwargs = tokenizer, kwargs
        self.messages = [dict(message) for message in messages]

    def render(self, count: int, *, prompt: bool = False) -> list[int]:
        """Tokenise the first `count` messages; with `prompt` up to where the assistant speaks."""
        return self._apply(count, add_generation_prompt=prompt)["input_ids"]

    def marked(self) -> tuple[list[int], np.ndarray]:
        """Return the tokens of the whole, and what its template marks of them."""
        found = self._apply(len(self.messages), return_assistant_tokens_mask=True)
        return found["input_ids"], np.asarray(found["assistant_masks"], np.int8)

    def span(self, number: int, whole: Sequence[int]) -> tuple[int, int]:
        """Find where in the tokens of the whole a message of the assistant starts and ends."""
        before, after = self.render(number, prompt=True), self.render(number + 1)
        for part, what in ((before, "the generation prompt before"), (after, "the end of")):
            agree = [a == b for a, b in zip(part, whole, strict=False)]
            if len(part) <= len(whole) and all(agree):
                continue
            at = agree.index(False) if False in agree else len(agree)
            shown = [self.tokenizer.decode(list(x[at : at + 8])) for x in (part, whole)]
            raise BadRow(
                f"message {number}: up to {what} it the chat template renders {shown[0]!r} where "
                f"the whole conversation has {shown[1]!r}, so which tokens are the assistant's is "
                "not known. Give a template with {% generation %} markers "
                "(generator.chat_template.source='file'), or if it rewrites earlier turns set "
                "sft.train_on_what='last_assistant_message'"
            )
        return len(before), len(after)

    def _apply(self, count: int, **options: Any) -> dict[str, Any]:
        options = {
            "tokenize": True,
            "return_dict": True,
            "add_generation_prompt": False,
            **self.kwargs,
            **options,
        }
        try:
            rendered: Any = self.tokenizer.apply_chat_template(self.messages[:count], **options)
            return dict(rendered)
        except Exception as error:  # whatever a Jinja template may raise
            raise BadRow(
                f"the chat template refuses its first {count} messages: "
                f"{type(error).__name__}: {error}"
            ) from error


def _messages(row: Mapping[str, Any]) -> list[Message]:
    if row.get("messages") is not None:
        return messages_of(row["messages"], "messages")
    if row.get("prompt") is None or row.get("completion") is None:
        raise BadRow(
            "neither 'messages' nor 'prompt' and 'completion'; the columns are "
            f"{sorted(map(str, row))}"
        )
    prompt = messages_of(row["prompt"], "prompt")
    return prompt + messages_of(row["completion"], "completion", "assistant")


def _last_run(mask: np.ndarray) -> int:
    """Return where the last run of ones starts, or 0."""
    starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
    return int(starts[-1]) if len(starts) else 0
