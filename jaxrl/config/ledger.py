"""Config of the ledger (docs/ledger.md)."""

from dataclasses import dataclass

from jaxrl.config.dataclass_config import BaseConfig
from jaxrl.config.errors import fail


@dataclass
class LedgerConfig(BaseConfig):
    """Hold the settings of <run folder>/run.db: where every prompt and trajectory ended."""

    record_rollouts: bool = True
    """Keep the trajectories of every step in <run folder>/rollouts, some 20 bytes a token: `replay`
    and `compare` read them."""
    record_checksums: bool = True
    """A checksum of every array of batch and state after every step: `replay` compares them."""
    lock_timeout_seconds: float = 60.0
    """How long the run waits for a process that locks the database, before it stops."""


def check_ledger(ledger: LedgerConfig) -> None:
    """Refuse ledger settings that make no sense.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    if ledger.lock_timeout_seconds <= 0:
        fix = "must be above 0, e.g. 60"
        fail("trainer.ledger.lock_timeout_seconds", ledger.lock_timeout_seconds, fix)
