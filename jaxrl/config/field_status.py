"""What every field of SkyRL's config does in jaxrl, read from the schema."""

import functools

from jaxrl.config.dataclass_config import config_class, field_markers, field_types
from jaxrl.config.status import SAME_DEFAULT, FieldStatus
from jaxrl.config.train_config import TrainConfig

__all__ = ["SAME_DEFAULT", "FieldStatus", "status_of"]


@functools.cache
def status_of(key: str) -> FieldStatus | None:
    """Return the status of a dotted key; None for a group, and for a field of a user's own class.

    What a group says of this field by name comes first, then what the field says, then the groups
    around it from the inside.
    """
    cls, kind, status = TrainConfig, TrainConfig, FieldStatus("implemented")
    named: dict[str, FieldStatus] = {}
    names = key.split(".")
    for depth, name in enumerate(names, start=1):
        if cls is None or name not in field_types(cls):
            return None
        for marker in field_markers(cls)[name]:
            if isinstance(marker, FieldStatus):
                status = marker
            elif isinstance(marker, dict):
                group = ".".join(names[:depth])
                named |= {f"{group}.{inner}": marker[inner] for inner in marker}
        kind = field_types(cls)[name]
        cls = config_class(kind)
    return None if kind is cls else named.get(key, status)
