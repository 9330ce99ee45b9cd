"""A disk that is full, or read-only, from a chosen write on: what is written by Python."""

import builtins
import errno
import io
import os
import threading

REMOVALS = "unlink", "remove", "rmdir"


class Disk:
    """Stands in for the disk under a folder until `undo`: each write has a number, from 1.

    A write is a file that is opened for writing, the first content of it, what waits for the disk
    (fsync), a new folder, name or link. Where content does not fit, an empty file is left, as on a
    disk. What C++ writes, arrays of checkpoints and SQLite's pages, always fits.

    Args:
        monkeypatch: a context of pytest's.
        folder: what is elsewhere is no concern of it.
        first: number of the first write that fails, as do all after it; or a part of its name.
        error: the system's; a read-only disk lets nothing be removed, either.

    Attributes:
        writes: what each does, and to which file; failed: those that did not.
    """

    def __init__(self, monkeypatch, folder, first, error=errno.ENOSPC):
        self.folder, self.first, self.error = f"{folder}{os.sep}", first, error
        self.writes, self.failed, self._lock = [], [], threading.Lock()
        self._open = io.open
        for module in (io, builtins):
            monkeypatch.setattr(module, "open", self._opened)
        for name in ("mkdir", "rename", "replace", "link"):
            monkeypatch.setattr(os, name, self._refusing(name, getattr(os, name)))
        if error == errno.EROFS:
            for name in REMOVALS:
                monkeypatch.setattr(os, name, self._refusing(name, getattr(os, name)))
        monkeypatch.setattr(os, "fsync", self._refusing("fsync", os.fsync))

    def _fails(self, what, path):
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        path = os.path.abspath(os.fspath(path))
        if not path.startswith(self.folder):
            return False
        if what == "mkdir" and os.path.isdir(path):  # which is found before there is no room
            return False
        with self._lock:
            self.writes.append(name := f"{what} {path.removeprefix(self.folder)}")
            number = len(self.writes)
            begins = self.first in name if isinstance(self.first, str) else number >= self.first
            if begins or self.failed:
                self.failed.append(name)
            return bool(self.failed)

    def _refusing(self, name, call):
        def refusing(path, *args, **kwargs):
            if self._fails(name, path):
                raise OSError(self.error, os.strerror(self.error))
            return call(path, *args, **kwargs)

        return refusing

    def _opened(self, file, mode="r", *args, **kwargs):
        # what is opened to be synced is there
        writes = not isinstance(file, int) and mode != "rb+" and set(mode) & set("wax+")
        if writes and self._fails("open", file):
            raise OSError(self.error, os.strerror(self.error))
        opened = self._open(file, mode, *args, **kwargs)
        if not writes or not self._fails("write", file):
            return opened
        opened.close()
        return self._open("/dev/full", mode.replace("x", "w"), *args, **kwargs)
