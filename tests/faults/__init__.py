"""Plant one-line faults and say which of them no test notices (`python -m tests.faults --help`)."""
