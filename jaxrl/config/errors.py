"""Errors of a config: each names the field, the value and the fix."""

import difflib
from collections.abc import Iterable
from typing import Any, NoReturn


def fail(field: str, value: Any, fix: str) -> NoReturn:
    """Refuse the value of a field."""
    raise ValueError(f"{field}={value!r}: {fix}")


def check_choice(field: str, value: Any, choices: Iterable[Any], later: Iterable[Any] = ()) -> None:
    """Refuse a value that is none of the choices.

    Args:
        later: SkyRL's values that are still to come.
    """
    if value in choices and not isinstance(value, bool):
        return
    shown = " or ".join(repr(c) for c in choices)
    names = [c for c in choices if isinstance(c, str)]
    near = difflib.get_close_matches(str(value), names, n=1) if len(names) > 1 else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    fail(field, value, f"{'not available yet, ' if value in later else ''}must be {shown}{hint}")
