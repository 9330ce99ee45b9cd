"""Say at a field of the schema which values it takes, and refuse the others.

    class MyConfig(BaseConfig):
        steps: Annotated[int, positive] = 10
        mode: Annotated[str, one_of("fast", "exact")] = "fast"

The error names the field, the value and the fix. Those of your own config classes are checked, too;
a subclass that gives a field another default keeps its constraints.
"""

import difflib
import importlib
import math
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jaxrl.config.dataclass_config import BaseConfig, field_markers, field_values, is_config
from jaxrl.config_error import fail
from jaxrl.redaction import HIDDEN, holds_key

_KEY = (
    "holds a key or password, which config.yaml, the report and loggers would show; put it into a "
    "variable of the environment: api_token_env (servers of samples) and api_key_env (judge, "
    "retriever) name one, and code of yours can read it"
)
NO_BOUND = 1e9  # as good as none
_CONTROL = ("Cc", "Zl", "Zp")  # categories of Unicode: control, line and paragraph separators


@dataclass(frozen=True)
class Constraint:
    """Check a field, where it stands in its `Annotated`.

    Attributes:
        check: is called with the field's dotted name and its value, and calls `fail`.
    """

    check: Callable[[str, Any], None]


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


def check_constraints(config: BaseConfig, path: str = "") -> None:
    """Check every field of a config, and of the configs in it, by the constraints at the field.

    Args:
        path: dotted name of the config, "" for the whole.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    markers = field_markers(type(config))
    for name, value in field_values(config).items():
        field = f"{path}.{name}" if path else name
        if is_config(value):
            check_constraints(value, field)
        elif holds_key(field, value):
            fail(field, HIDDEN, _KEY)
        for key, inner in value.items() if isinstance(value, dict) else ():
            _check_number(f"{field}.{key}", inner)  # to a function of the user's inf may mean much
        check_finite(field, value)
        for marker in markers[name]:
            if isinstance(marker, Constraint):
                marker.check(field, value)


def check_finite(field: str, value: Any) -> None:
    """Refuse NaN, with which every comparison is false, and infinity: 0 times it is NaN.

    No field means infinity: what is not to be bounded is None, -1 or a large number.
    """
    _check_number(field, value)
    if isinstance(value, float) and math.isinf(value):
        no_bound = f"{NO_BOUND:g}"
        fail(field, value, f"is not finite; set a number, a large one, {no_bound}, for no bound")


def _check_number(field: str, value: Any) -> None:
    if isinstance(value, float) and math.isnan(value):
        fail(field, value, "is not a number; set one")


@Constraint
def positive(field: str, value: float) -> None:
    """Refuse a number that is not above 0."""
    if value is None or not value > 0:
        fix = "; set it to 1 or more" if isinstance(value, int) else ""
        fail(field, value, f"must be positive{fix}")


@Constraint
def not_negative(field: str, value: float) -> None:
    """Refuse a number below 0."""
    if value is None or not value >= 0:
        fail(field, value, "must not be negative; set it to 0 or more")


@Constraint
def not_negative_or_none(field: str, value: float | None) -> None:
    """Refuse a number below 0; None has a meaning of its own."""
    if value is not None:
        not_negative.check(field, value)


@Constraint
def named(field: str, value: str | None) -> None:
    """Refuse a name or path that is empty, or has line breaks or other control characters."""
    if value is None:
        return
    if not value.strip():
        fail(field, value, "is empty; set a name, or leave it out for the default")
    _check_line(field, value)


@Constraint
def variable(field: str, value: str | None) -> None:
    """Refuse what is no name of a variable of the environment; it may be the key itself."""
    if value is not None and not re.fullmatch(r"[A-Za-z_]\w*", value):
        fail(field, HIDDEN, "is no name of a variable of the environment; set the name of the one")


@Constraint
def one_line(field: str, value: str | None) -> None:
    """Refuse line breaks and other control characters in a path that may be empty."""
    _check_line(field, value or "")


def _check_line(field: str, value: str) -> None:
    if wrong := next((c for c in value if unicodedata.category(c) in _CONTROL), None):
        fail(field, value, f"has the control character {wrong!r}; leave that out")


def folder_in(above: str) -> Constraint:
    """Require the name of one folder; `above` is the field that says where it is."""

    def check(field: str, value: str) -> None:
        named.check(field, value)
        if value in (".", "..") or "/" in value or "\\" in value:
            fix = f"names one folder in {above}, without '/', '\\' or '..'; put the path into that"
            fail(field, value, fix)

    return Constraint(check)


def positive_or(other: int | None, meaning: str) -> Constraint:
    """Require a number above 0, or one other value that has a meaning of its own."""
    fix = f"must be positive, or {other} ({meaning})"
    return must(lambda value: value == other or (value is not None and value > 0), fix)


def between(interval: str, hint: str) -> Constraint:
    """Require a number in an interval such as "[0, 1)"."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))

    def holds(value: float) -> bool:
        inside = low < value < high
        return inside or (value == low and "[" in interval) or (value == high and "]" in interval)

    return must(holds, f"must be in {interval}; {hint}")


def one_of(*choices: Any, later: Iterable[Any] = ()) -> Constraint:
    """Require one of the choices; `later` as in `check_choice`."""
    return Constraint(lambda field, value: check_choice(field, value, choices, later))


def one_in(table: str, later: Iterable[Any] = (), *, or_none: bool = False) -> Constraint:
    """Require an entry of a table of another module, "jaxrl.losses.kl:KL_ESTIMATORS".

    The module is imported when a value is checked: those that compute take seconds.

    Args:
        or_none: None will do, too.
    """
    module, _, name = table.partition(":")

    def check(field: str, value: Any) -> None:
        if value is not None or not or_none:
            check_choice(field, value, getattr(importlib.import_module(module), name), later)

    return Constraint(check)


def each_of(*choices: Any, later: Iterable[Any] = ()) -> Constraint:
    """Require one of the choices, or a list of them."""

    def check(field: str, value: Any) -> None:
        for chosen in value if isinstance(value, list) else [value]:
            check_choice(field, chosen, choices, later)

    return Constraint(check)


def must(holds: Callable[[Any], bool], fix: str) -> Constraint:
    """Require that `holds` is true of the value."""

    def check(field: str, value: Any) -> None:
        if not holds(value):
            fail(field, value, fix)

    return Constraint(check)
