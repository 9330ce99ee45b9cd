"""The ledger: where every prompt and trajectory of a run ended; see docs/ledger.md."""

from jaxrl.ledger.books import Books
from jaxrl.ledger.database import FILE, Ledger, LedgerError
from jaxrl.ledger.rollout_file import read_rollouts, rollouts_path, write_rollouts

__all__ = [
    "FILE",
    "Books",
    "Ledger",
    "LedgerError",
    "read_rollouts",
    "rollouts_path",
    "write_rollouts",
]
