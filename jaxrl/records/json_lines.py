"""`metrics.jsonl`: a line per step, the record that every other one can be made from."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jaxrl import activity
from jaxrl.files import replaced, sync_file, writing


class JsonLines:
    """Append lines; those that cannot be written, to a full disk, wait, and the run goes on.

    Args:
        path: its folder is made if need be.
        finished_steps: what a resumed run has behind it; later lines of an earlier attempt are cut,
            and all of them if it starts afresh. A damaged line goes to `<path>.damaged`.
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
        damaged: list[bytes] = []
        with replaced(path) as new:
            with new.open("w", encoding="utf-8") as file:
                for line in lines_of(path, damaged.append) if finished_steps else ():
                    if line["step"] <= finished_steps:
                        file.write(json.dumps(line) + "\n")
                        read(line)
            if damaged:
                _set_aside(path, damaged)
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
    """Return the lines of a `metrics.jsonl`; one cut off by a crash, or damaged, is left out."""
    return list(lines_of(path))


def lines_of(
    path: Path, damaged: Callable[[bytes], object] = lambda raw: None
) -> Iterator[dict[str, float]]:
    """Yield what `read_lines` returns, a line at a time.

    Args:
        damaged: is told of each other line: one that cannot be read, or whose step does not rise;
            of two with the same step, of both.
    """
    if not path.exists():
        return
    before, held = -1.0, None  # a line is held until the next one rises from it
    with path.open("rb") as file:
        for raw in file:
            line = _parsed(raw)
            if line is None:
                if raw.endswith(b"\n"):
                    damaged(raw)
                continue
            if held is not None and line["step"] <= held[0]["step"]:
                repeated = line["step"] == held[0]["step"]
                if line["step"] > before:
                    damaged(held[1])
                    held = None
                if repeated or line["step"] <= before:
                    damaged(raw)
                    continue
            if held is not None:
                before = held[0]["step"]
                yield held[0]
            held = line, raw
    if held is not None:
        yield held[0]


def _parsed(raw: bytes) -> dict[str, float] | None:
    """Return the step and numbers of a line; None where it has not those."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int or line["step"] < 0:
        return None
    return line if all(type(x) in (int, float) for x in line.values()) else None


def _set_aside(path: Path, damaged: Sequence[bytes]) -> None:
    aside = path.with_name(f"{path.name}.damaged")
    with writing(aside):
        with aside.open("ab") as file:
            file.write(b"".join(damaged))
        sync_file(aside)
    activity.warn(
        f"{path} has {len(damaged)} lines that are not as they were written: they are left out, "
        f"and kept in {aside}"
    )
