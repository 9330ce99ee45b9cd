"""What every field of SkyRL's config does in jaxrl: one row for every field or group of fields.

The meaning of a field is the docstring under it in the schema; this table adds what differs.
"""

from jaxrl.config.field_status import algorithm, generator, models, trainer
from jaxrl.config.field_status.row import SAME_DEFAULT, FieldStatus

__all__ = ["SAME_DEFAULT", "TABLE", "FieldStatus", "status_of"]

TABLE = (*models.ROWS, *algorithm.ROWS, *trainer.ROWS, *generator.ROWS)


def status_of(key: str) -> FieldStatus | None:
    """Return the row of a dotted key; None for a field of a user's own config class."""
    return next((row for row in TABLE if row.covers(key)), None)
