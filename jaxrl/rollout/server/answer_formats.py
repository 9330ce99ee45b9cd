"""How the text of an answer is read: its thoughts, its calls of tools, and what it says."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxrl.functions import import_function

_THOUGHTS = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Said:
    """Hold what an answer says to a client.

    Attributes:
        calls: of tools, each a name and its arguments.
    """

    content: str
    thoughts: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


AnswerFormat = Callable[[str, bool], Said]  # of a text, and whether calls of tools are read


def answer_format(name: str) -> AnswerFormat | None:
    """Return the function that a config names; None: answers are plain text.

    Args:
        name: "text", "tags", or "my_pkg.my_module:function".

    Raises:
        ValueError: there is no such function.
    """
    if name == "text":
        return None
    return tags if name == "tags" else import_function(name, "answer format")


def tags(text: str, with_calls: bool) -> Said:
    """Read `<think>..</think>` and `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.

    This is how Qwen's and Hermes' models write them. Thoughts may begin in the prompt: then the
    text has only their end. A call that is not whole, or is no such JSON, stays a part of the
    content, so that the client sees what the model wrote.
    """
    thoughts = ""
    if found := _THOUGHTS.match(text):
        thoughts, text = found[1].strip(), text[found.end() :]
    calls, rest, end = [], [], 0
    for found in _CALL.finditer(text) if with_calls else ():
        if (call := _call(found[1])) is not None:
            calls.append(call)
            rest.append(text[end : found.start()])
            end = found.end()
    content = "".join([*rest, text[end:]])
    return Said(content.strip() if calls else content, thoughts, tuple(calls))


def _call(text: str) -> tuple[str, dict[str, Any]] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return (call["name"], arguments) if isinstance(arguments, dict) else None
