"""The HTTP server: OpenAI's API over an engine, and agents that train through it."""
