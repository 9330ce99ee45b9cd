"""Say at a field of the schema what it is in SkyRL, where it is not simply implemented as there.

    flash_attn: Annotated[bool, implemented("plain attention on CPUs", skyrl_default=True)] = False

At a group it holds for all fields in it that say nothing themselves; a dict at a group says it of
the fields of this group alone, by their names in it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Status = Literal["implemented", "mapped", "inert"]
SAME_DEFAULT = "same as SkyRL"


@dataclass(frozen=True)
class FieldStatus:
    """Hold what a field is here and in SkyRL; its meaning is the docstring under it.

    Attributes:
        status: implemented: as in SkyRL. mapped: the JAX counterpart, see `note`. inert: no
            counterpart, accepted with a warning.
        note: the difference from SkyRL, or the reason.
        only_with: the setting without which the field has no effect. That setting is the one
            `validate` rejects; the field itself may have any value.
        skyrl_default: SkyRL's default where ours differs.
        skyrl_only: False for fields that SkyRL does not have.
    """

    status: Status
    note: str = ""
    only_with: str = ""
    skyrl_default: Any = SAME_DEFAULT
    skyrl_only: bool = True


implemented = partial(FieldStatus, "implemented")
mapped = partial(FieldStatus, "mapped")
inert = partial(FieldStatus, "inert")


def new(note: str = "", only_with: str = "") -> FieldStatus:
    """Return the status of a field that SkyRL's reference does not have."""
    note = f"not in SkyRL's reference; {note}" if note else "not in SkyRL's reference"
    return FieldStatus("implemented", note, only_with, skyrl_only=False)


def later(note: str = "") -> FieldStatus:
    """Return the status of a field that SkyRL has since its reference was written."""
    note = f"in SkyRL since August 2026; {note}" if note else "in SkyRL since August 2026"
    return FieldStatus("implemented", note, skyrl_only=False)
