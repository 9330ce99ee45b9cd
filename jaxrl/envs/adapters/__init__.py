"""Run environments of other libraries under their names."""
