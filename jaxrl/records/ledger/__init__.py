"""The ledger: where every prompt and trajectory of a run ended; see docs/ledger.md."""

from jaxrl.data.recorded import read_rollouts, rollouts_path, write_rollouts
from jaxrl.records.ledger.database import FILE, Ledger, LedgerError

__all__ = [
    "FILE",
    "Ledger",
    "LedgerError",
    "read_rollouts",
    "rollouts_path",
    "write_rollouts",
]
