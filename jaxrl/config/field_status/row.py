"""A row of the table of fields, and the words that its groups share."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Status = Literal["implemented", "mapped", "inert", "planned"]
SAME_DEFAULT = "same as SkyRL"


@dataclass(frozen=True)
class FieldStatus:
    """Hold a row: what fields mean here and in SkyRL.

    Attributes:
        status: implemented: as in SkyRL. mapped: the JAX counterpart, see `note`. inert: no
            counterpart, accepted with a warning. planned: rejected until it exists.
        prefix: dotted path of the group; `*` stands for one name.
        names: field names in it, separated by spaces; a trailing `*` takes everything that starts
            so, deeper levels included.
        note: the difference from SkyRL, or the reason.
        only_with: the setting without which the field has no effect. That setting is the one
            `validate` rejects; the field itself may have any value.
        skyrl_default: SkyRL's default where ours differs.
        skyrl_only: False for fields that SkyRL does not have.
    """

    status: Status
    prefix: str
    names: str
    note: str = ""
    only_with: str = ""
    skyrl_default: Any = SAME_DEFAULT
    skyrl_only: bool = True

    def covers(self, key: str) -> bool:
        """Return whether the row is about the dotted key."""
        head, tail = key.split("."), self.prefix.split(".")
        if len(head) <= len(tail) or any(
            p not in ("*", h) for h, p in zip(head, tail, strict=False)
        ):
            return False
        name = ".".join(head[len(tail) :])
        return any(
            name.startswith(n[:-1]) if n.endswith("*") else name == n for n in self.names.split()
        )


CRITIC = "trainer.critic.model.path"
NEW = "not in SkyRL's reference"
LATER = "in SkyRL since August 2026"

implemented = partial(FieldStatus, "implemented")
mapped = partial(FieldStatus, "mapped")
inert = partial(FieldStatus, "inert")
planned = partial(FieldStatus, "planned")
