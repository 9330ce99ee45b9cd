"""A bucket for tests: fsspec's own memory stands in for it."""

import fsspec
from etils.epath.backend import fsspec_backend


def empty_bucket(monkeypatch):
    """Its address, for all of this process."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    monkeypatch.setattr(fsspec_backend, "_get_filesystem", lambda name: memory)
    return "gs://bucket"
