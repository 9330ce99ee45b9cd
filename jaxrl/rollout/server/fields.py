"""Reading the fields of a request's body: each is checked, and none is silently ignored."""

from collections.abc import Mapping
from typing import Any, NoReturn

from jaxrl.rollout.server.errors import ApiError

# about the client, its bills and its caches: they cannot change an answer
IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "prediction",
    "parallel_tool_calls",
    "priority",
    "cache_salt",
}
# features that are not there, with the values that do not ask for them
_OFF: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "detokenize": (True,),
}
_UINT32 = 2**32


class Fields:
    """Read the fields of a body; null is as if absent.

    Every method raises `ApiError` 400, naming the field, its value and what it may be.

    Args:
        body: JSON object.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = {name: value for name, value in body.items() if value is not None}
        self._read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """Return a field as it is."""
        self._read.add(name)
        return self.body.get(name, default)

    def number(
        self, name: str, default: float, least: float, most: float, *, above: bool = False
    ) -> float:
        """Return a finite number from `least` to `most`; with `above` greater than `least`."""
        value = self.take(name, default)
        usable = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not usable or not least <= value <= most:  # which NaN is not, either
            refuse(name, value, f"must be a number from {least:g} to {most:g}")
        if above and value == least:
            refuse(name, value, f"must be above {least:g}")
        return float(value)

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """Return an integer from `least` to `most`."""
        value = self.take(name, default)
        if not is_integer(value) or not least <= value <= most:
            refuse(name, value, f"must be an integer from {least} to {most}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a boolean field."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            refuse(name, value, "must be true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """Return a string field."""
        value = self.take(name, default)
        if not isinstance(value, str):
            refuse(name, value, "must be a string")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Return a field that is a string or a list of them, none of them empty, as a tuple."""
        value = self.take(name, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            refuse(name, value, "must be a string that is not empty, or a list of such strings")
        if len(values) > most:
            refuse(name, value, f"has {len(values)} entries; at most {most} are looked for")
        return tuple(values)

    def token_ids(self, name: str, vocab_size: int, most: int) -> tuple[int, ...]:
        """Return a list of token ids, as a tuple."""
        values = self.take(name, [])
        if not isinstance(values, list) or len(values) > most:
            refuse(name, values, f"must be a list of at most {most} token ids")
        return check_ids(name, values, vocab_size)

    def keys(self) -> list[tuple[int, int]] | None:
        """Return PRNG keys, one per sample; None where the body has none."""
        value = self.take("keys")
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(map(_is_key, value)):
            refuse("keys", value, "must be a list of pairs of integers in [0, 2^32)")
        return [(first, second) for first, second in value]

    def end(self) -> None:
        """Refuse what nobody has read and what would change the answer."""
        for name in sorted(self.body.keys() - self._read - IGNORED):
            value = self.body[name]
            if name not in _OFF:
                refuse(name, value, "is not a field that this server knows; leave it out")
            if value not in _OFF[name]:
                refuse(name, value, "is not supported by this server; leave it out")


def refuse(name: str, value: Any, fix: str) -> NoReturn:
    """Answer 400 for a field."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise ApiError(400, f"{name}={shown}: {fix}", param=name)


def is_integer(value: Any) -> bool:
    """Return whether a value is an int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_key(pair: Any) -> bool:
    usable = isinstance(pair, list) and len(pair) == 2 and all(map(is_integer, pair))
    return usable and all(0 <= part < _UINT32 for part in pair)


def check_ids(name: str, values: list[Any], vocab_size: int) -> tuple[int, ...]:
    """Return token ids of the vocabulary as a tuple; refuse others."""
    for value in values:
        if not is_integer(value) or not 0 <= value < vocab_size:
            refuse(name, value, f"is no token id; they are integers from 0 to {vocab_size - 1}")
    return tuple(values)
