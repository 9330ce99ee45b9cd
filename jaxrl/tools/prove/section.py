"""What a section of a proof is given, and what it gives."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxrl import __version__
from jaxrl.files import replace_text
from jaxrl.tools.prove.work import WORK, Work

FACTS = "facts.json"  # the `Machine` of a proof, in its folder

Row = dict[str, Any]  # a line of a table: column -> number or words


@dataclass(frozen=True)
class Result:
    """Hold what a section found.

    Attributes:
        passed: None = skipped: it cannot be done here, or there was no time for it.
        figure: the outcome in a line, for the terminal.
        reason: why it failed, was skipped or left out, and what helps.
        rows: all figures.
        missing: what cannot be had on this machine, with the reason.
        seconds: filled in by the process of the section.
        left_out: the time of the call was over before it was done.
    """

    passed: bool | None
    figure: str = ""
    reason: str = ""
    rows: Sequence[Row] = ()
    missing: Sequence[str] = ()
    seconds: float = 0.0
    left_out: bool = False

    @property
    def verdict(self) -> str:
        """Return the outcome in a word or two."""
        if self.left_out:
            return "left out"
        return "skipped" if self.passed is None else "passed" if self.passed else "FAILED"


@dataclass(frozen=True)
class Machine:
    """Hold what the first section found out, for the others.

    Attributes:
        device: kind of the devices; number: how many there are.
        memory: bytes of one that programs may use; None = not known.
        flops, bandwidth: FLOP/s and bytes/s of one, of which shares are counted.
        source: of these two.
        known: they are the maker's, so that nothing can be faster.
        contents: hash of jaxrl's files there.
    """

    platform: str
    device: str
    number: int
    memory: float | None
    flops: float
    bandwidth: float
    source: str
    known: bool
    contents: str

    @classmethod
    def of(cls, out: Path) -> "Machine":
        """Read what the first section of a proof wrote."""
        return cls(**json.loads((out / FACTS).read_text(encoding="utf-8")))

    @property
    def dtype(self) -> str:
        """Return the dtype in which models compute, that of a run there."""
        return "float32" if self.platform == "cpu" else "bfloat16"


@dataclass(frozen=True)
class Task:
    """Hold what a section is given.

    Attributes:
        mode: name of its `WORK`.
        folder: empty; removed when the section is done.
        machine: what the first section found.
    """

    mode: str
    folder: Path
    machine: Machine

    @property
    def work(self) -> Work:
        """Return how much is measured."""
        return WORK[self.mode]


def shares_hold(machine: Machine, shares: Sequence[float]) -> str:
    """Return why shares of the machine's limits cannot be true; "" = they can.

    A share above 1 of what the maker promises is a wrong clock or a wrong count. Limits that were
    measured are no limits.
    """
    if machine.known and any(share > 1 for share in shares):
        return f"a share of {max(shares):.2f} of what the device can do: the measurement is wrong"
    return ""


def write_result(out: Path, name: str, mode: str, machine: Machine, result: Result) -> None:
    """Write the result of a section into the folder of its proof."""
    content = {"of": _of(mode, machine), "result": asdict(result)}
    replace_text(out / f"{name}.json", json.dumps(content, indent=1))


def read_result(out: Path, name: str, mode: str, machine: Machine) -> Result | None:
    """Read a result; None without one of this mode, machine and state of jaxrl."""
    try:
        content = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        return Result(**content["result"]) if content["of"] == _of(mode, machine) else None
    except (OSError, ValueError, KeyError, TypeError):  # none, or another version's
        return None


def _of(mode: str, machine: Machine) -> str:
    """Return what results have in common that stand on one page."""
    ours = f"jaxrl {__version__} of files {machine.contents}"
    return f"{mode}, {ours}, {machine.number} x {machine.device}"


def contents_hash(folder: Path, *others: Path) -> str:
    """Return a short hash of the files in a folder, and of others: their places and contents.

    A commit would not do: an installed jaxrl has none, and files that differ from one may differ
    again. What Python and editors leave beside the files does not count.
    """
    inside = [
        file
        for file in folder.rglob("[!.]*")
        if file.is_file() and file.parent.name != "__pycache__"
    ]
    digest = hashlib.sha256()
    for file in sorted([*inside, *others]):
        digest.update(f"{file} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]
