"""`metrics.jsonl`: a line per step, the record that every other one can be made from."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jaxrl import activity
from jaxrl.files import replaced, writing


class JsonLines:
    """Append lines; those that cannot be written, to a full disk, wait, and the run goes on.

    Args:
        path: its folder is made if need be.
        finished_steps: what a resumed run has behind it; later lines of an earlier attempt are cut,
            and all of them if it starts afresh.
        read: is told of each line that is kept; in memory there is one at a time.

    Raises:
        FolderError: not even these can be written.
    """

    def __init__(
        self,
        path: Path,
        finished_steps: int,
        read: Callable[[Mapping[str, float]], None] = lambda line: None,
    ) -> None:
        self.path = path
        with replaced(path) as new, new.open("w", encoding="utf-8") as file:
            for line in lines_of(path) if finished_steps else ():
                if line["step"] <= finished_steps:
                    file.write(json.dumps(line) + "\n")
                    read(line)
        with writing(path):
            self.file = path.open("ab", buffering=0)
        self.size = path.stat().st_size
        self.waiting: list[bytes] = []
        self._failing = False

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the line of a step, after those that wait."""
        self.waiting.append((json.dumps({"step": step, **numbers}) + "\n").encode())
        try:
            self._write(b"".join(self.waiting))
        except OSError as error:
            with contextlib.suppress(OSError):
                self.file.truncate(self.size)  # half a line would cut off all that follow
            if not self._failing:
                activity.warn(
                    f"step {step}: cannot write {self.path} ({error}); its lines wait, and the run "
                    "goes on"
                )
            self._failing = True
            return
        if self._failing:
            activity.say(
                f"step {step}: {self.path} has all lines again, {len(self.waiting)} of them"
            )
        self.waiting, self._failing = [], False

    def flush(self) -> None:
        """Sync to disk what could be written."""
        with contextlib.suppress(OSError):  # `log` says so
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _write(self, data: bytes) -> None:
        done = 0
        while done < len(data):  # a disk that fills takes a part of it first
            done += self.file.write(data[done:])
        self.size += done


def read_lines(path: Path) -> list[dict[str, float]]:
    """Return the complete lines of a `metrics.jsonl`; one cut off by a crash is left out."""
    return list(lines_of(path))


def lines_of(path: Path) -> Iterator[dict[str, float]]:
    """Yield what `read_lines` returns, a line at a time."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return
