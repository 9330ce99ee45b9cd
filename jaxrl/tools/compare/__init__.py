"""Compare policy losses on one recorded batch."""
