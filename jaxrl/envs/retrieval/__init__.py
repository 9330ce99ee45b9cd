"""Find passages for a question, here or on a server."""
