"""Read the messages of a row of a data set, and say what is wrong with it."""

import json
from typing import Any

from jaxrl.types import Message


class BadRow(ValueError):
    """Say what is wrong with a row of a data set; `convert_rows` adds its number."""


def messages_of(value: Any, column: str, role: str = "user") -> list[Message]:
    """Return the messages of a column: a list of them, or a string, which is one message.

    Args:
        role: of a string.

    Raises:
        BadRow: it is neither, or empty, or a message has no role or no content.
    """
    if not isinstance(value, str | list | tuple):
        kind = type(value).__name__
        raise BadRow(f"the {column} is neither text nor a list of messages but {kind} {value!r}")
    if not value:
        raise BadRow(f"the {column} is empty")
    if isinstance(value, str):
        if _is_json_of_messages(value):
            raise BadRow(
                f"the {column} is messages written as JSON text: write the list itself, "
                "json.loads(text); if the text is what is said, [{'role': ..., 'content': text}]"
            )
        return [{"role": role, "content": value}]
    for number, message in enumerate(value):
        if problem := _find_message_problem(message):
            raise BadRow(f"message {number} {problem}")
    # Parquet gives every message the keys of all of them, with None where a message had none.
    return [
        {key: item for key, item in message.items() if item is not None or key == "content"}
        for message in value
    ]


def _is_json_of_messages(text: str) -> bool:
    if not text.lstrip().startswith("["):
        return False
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return bool(found) and not any(map(_find_message_problem, found))


def _find_message_problem(message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"is not a dict with role and content but {message!r}"
    if not isinstance(message.get("role"), str):
        return f"has no role; its keys are {sorted(map(str, message))}"
    # Only a tool call may come without text; a list is content in parts.
    if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
        return (
            f"(role {message['role']!r}) has no content; its keys are {sorted(map(str, message))}"
        )
    return None
