"""What is said of a config that cannot be: the field, its value and the fix, each as data.

Here and not in `jaxrl.config`: losses, estimators and the registry refuse settings of their own.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxrl.redaction import redacted

LONGEST = 500  # characters of a value in a message


class ConfigError(ValueError):
    """Say which field of a config cannot have its value, and what to do.

    Attributes:
        field: dotted name, with the place in a list where it is one of its members: "a.b[2]".
        value: the one that was refused.
        remedy: what to do, in words.
        changes: fields and values that would mend it as well, where nothing else is asked for.
    """

    def __init__(
        self, field: str, value: Any, remedy: str, changes: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(field, value, remedy, changes)  # so that it can be pickled
        self.field, self.value, self.remedy = field, value, remedy
        self.changes = dict(changes or {})

    def __str__(self) -> str:
        config = dataclasses.is_dataclass(self.value) and not isinstance(self.value, type)
        shown = f"{type(self.value).__name__}(...)" if config else repr(self.value)
        shown = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."
        return redacted(f"{self.field}={shown}: {self.remedy}")

    def inside(self, group: str) -> "ConfigError":
        """Return the error of a config that is the field `group` of another one."""
        return ConfigError(f"{group}.{self.field}", self.value, self.remedy, self.changes)


class UnknownField(ConfigError):
    """Say that a config has no such field.

    Attributes:
        near: the field that was meant, perhaps; "": there is none like it.
    """

    def __init__(self, field: str, near: str, fields: str) -> None:
        super().__init__(field, None, f"Did you mean '{near}'?" if near else fields)
        self.args = field, near, fields
        self.near = near

    def __str__(self) -> str:
        return f"unknown config field '{self.field}'. {self.remedy}"


def fail(field: str, value: Any, remedy: str, changes: Mapping[str, Any] | None = None) -> NoReturn:
    """Refuse the value of a field, see `ConfigError`."""
    raise ConfigError(field, value, remedy, changes)
