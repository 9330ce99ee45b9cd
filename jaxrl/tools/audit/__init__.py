"""Trace every prompt of a run: trained once, or dropped with a reason."""
