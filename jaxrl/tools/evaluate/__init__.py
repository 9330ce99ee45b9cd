"""Find what is evaluated: a run, a folder, a server."""
