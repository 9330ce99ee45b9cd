"""JSON that keeps tuples, fractions and dicts with other keys than strings."""

import json
from fractions import Fraction
from typing import Any

# reasoning-gym's entries hold all three, and its scorers compare against them.


def encode(value: Any) -> str:
    """Return the text of a value.

    Raises:
        TypeError: it holds something else that JSON cannot.
    """
    return json.dumps(_tag(value))


def decode(text: str | dict[str, Any]) -> Any:
    """Return the value of a text; a dict is one already."""
    return json.loads(text, object_hook=_untag) if isinstance(text, str) else text


def _tag(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"__tuple__": [_tag(item) for item in value]}
    if isinstance(value, Fraction):
        return {"__fraction__": str(value)}
    if isinstance(value, list):
        return [_tag(item) for item in value]
    if not isinstance(value, dict):
        return value
    if all(isinstance(key, str) for key in value):
        return {key: _tag(item) for key, item in value.items()}
    return {"__items__": [[_tag(key), _tag(item)] for key, item in value.items()]}


def _untag(tagged: dict[str, Any]) -> Any:
    if tagged.keys() == {"__tuple__"}:
        return tuple(tagged["__tuple__"])
    if tagged.keys() == {"__fraction__"}:
        return Fraction(tagged["__fraction__"])
    if tagged.keys() == {"__items__"}:
        return {key: value for key, value in tagged["__items__"]}
    return tagged
