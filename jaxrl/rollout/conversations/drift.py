"""How far a conversation, turn by turn, is from what its chat template writes of it as a whole.

A conversation is trained as it went: the tokens that were sampled, and behind each turn what the
template writes up to the next (`turns.TurnTemplate`). Who renders it once more as a whole, for
supervised training or to continue it elsewhere, may get other tokens: templates drop what was
thought in earlier turns, trim words, or write calls of tools otherwise, and a tokenizer may join
what stood apart. This finds where, for a few conversations that any agent has.
"""

from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from jaxrl.data.tokenizer import encode_prompt
from jaxrl.rollout.conversations.turns import TurnTemplate
from jaxrl.types import Message

_ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
_ASK, _MORE = ({"role": "user", "content": text} for text in ("What is 2 + 2?", "And 3 + 3?"))
# By name: messages, and variables of the template.
CONVERSATIONS: dict[str, tuple[list[Message], dict[str, Any]]] = {
    "two turns": (
        [
            _ASK,
            {"role": "assistant", "content": "It is 4."},
            _MORE,
            {"role": "assistant", "content": "6"},
        ],
        {},
    ),
    "blanks at the ends": (
        [
            _ASK,
            {"role": "assistant", "content": "\n4 \n"},
            _MORE,
            {"role": "assistant", "content": "6"},
        ],
        {},
    ),
    "thinking": (
        [
            _ASK,
            {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\n4"},
            _MORE,
            {"role": "assistant", "content": "<think>\nThree, twice.\n</think>\n\n6"},
        ],
        {},
    ),
    "tools": (
        [
            _ASK,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "name": "add", "content": "4"},
            {"role": "assistant", "content": "It is 4."},
        ],
        {"tools": [_ADD]},
    ),
}


class Drift(NamedTuple):
    """Hold where the whole conversation differs from its turns.

    Attributes:
        lost: sampled tokens that the whole has not.
        unsampled: tokens of the whole that would be trained as the assistant's, and that it did not
            sample.
        turns, whole: text from the first difference, of both.
    """

    lost: int
    unsampled: int
    turns: str
    whole: str

    def __str__(self) -> str:
        return (
            f"{self.lost} sampled tokens are not there, {self.unsampled} others are: "
            f"{self.whole!r} where {self.turns!r} was sampled or given"
        )


def drifts(
    tokenizer: Any, variables: Mapping[str, Any], stop_token_ids: Collection[int]
) -> dict[str, Drift | None | Exception]:
    """Return by conversation where it drifts; None = nowhere; what the template raises for it."""
    found: dict[str, Drift | None | Exception] = {}
    for name, (messages, more) in CONVERSATIONS.items():
        try:
            found[name] = drift_of(tokenizer, messages, {**variables, **more}, stop_token_ids)
        except Exception as error:  # templates raise anything: they know no tools, or no such role
            found[name] = error
    return found


def drift_of(
    tokenizer: Any,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    stop_token_ids: Collection[int],
) -> Drift | None:
    """Compare a conversation turn by turn with the whole; None = the same tokens.

    Args:
        messages: the last one is the assistant's, whose words are sampled as they stand.

    Raises:
        Exception: whatever the template raises.
    """
    template = TurnTemplate(tokenizer, variables)
    speaks = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    tokens = encode_prompt(tokenizer, messages[: speaks[0]], **variables)
    sampled = [False] * len(tokens)
    for i, following in zip(speaks, [*speaks[1:], len(messages)], strict=True):
        words = template.encode(_words(tokenizer, messages[: i + 1], variables))
        end, given = template.between(messages[i + 1 : following], stop_token_ids)
        if following == len(messages):
            given = []
        tokens += words + end + given
        sampled += [True] * len(words) + [False] * len(end + given)
    whole = encode_prompt(tokenizer, messages, **{**variables, "add_generation_prompt": False})
    if whole[: len(tokens)] == tokens:
        return None
    blocks = SequenceMatcher(None, tokens, whole, autojunk=False).get_opcodes()
    different = [block for block in blocks if block[0] != "equal"]
    if different and different[-1][0] == "insert" and different[-1][1] == len(tokens):
        different.pop()  # what ends the text
    if not different:
        return None
    lost = sum(sum(sampled[a:b]) for _, a, b, _, _ in different)
    unsampled = sum(d - c for _, _, _, c, d in different)
    at, there = different[0][1], different[0][3]
    return Drift(
        lost,
        unsampled,
        tokenizer.decode(tokens[at : at + 12]),
        tokenizer.decode(whole[there : there + 12]),
    )


def _words(tokenizer: Any, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """Return what the last assistant samples: its words, or a call as the template writes it."""
    *before, last = messages
    if not last.get("tool_calls"):
        return last["content"]

    def text(messages: Sequence[Message], *, generates: bool) -> str:
        given = {**variables, "add_generation_prompt": generates}
        return tokenizer.apply_chat_template(list(map(dict, messages)), tokenize=False, **given)

    prompt, whole = text(before, generates=True), text(messages, generates=False)
    plain = text([*before, {"role": "assistant", "content": "x"}], generates=False)
    if not whole.startswith(prompt):
        raise ValueError("the template writes the prompt of an answer otherwise than the answer")
    return whole[len(prompt) :].removesuffix(plain[plain.rindex("x") + 1 :])
