"""Checks a folder of golden files: `python -m tests.golden [FOLDER]`.

Prints how many cases of each file pass, are listed in `tests/golden_differences.toml`, or fail;
exits with 1 if one fails.
"""

import argparse
import fnmatch
import multiprocessing
import os
import sys
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before jax is imported
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import numpy as np

from tests.golden import FOLDER, Case, cases
from tests.golden.checks import CHECKS, ONCE, Tolerance

DIFFERENCES = FOLDER.parent / "golden_differences.toml"


@dataclass(frozen=True)
class Difference:
    """A deliberate difference from SkyRL: of these outputs of these cases, no others.

    Attributes:
        file, ids: name of the file and of cases; `*`, `?` and `[...]` match as in file names.
        outputs: names of outputs, with the bits: "loss64", "metric32:clip_ratio", "raises".
        reason: what SkyRL does and why it is not done here.
        ours: what is done here.
        test: the test that shows ours, "tests/file.py::test_name".
    """

    file: str
    ids: tuple[str, ...]
    outputs: tuple[str, ...]
    reason: str
    ours: str
    test: str

    def covers(self, file: str, case: str, output: str) -> bool:
        return (
            fnmatch.fnmatchcase(file, self.file)
            and any(fnmatch.fnmatchcase(case, pattern) for pattern in self.ids)
            and any(fnmatch.fnmatchcase(output, pattern) for pattern in self.outputs)
        )


@dataclass
class Report:
    """What became of a file's cases."""

    passed: list[str] = field(default_factory=list)
    listed: dict[str, list[Difference]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)


def load_differences(path: Path = DIFFERENCES) -> list[Difference]:
    entries = tomllib.loads(path.read_text())["difference"]
    lists = ("ids", "outputs")
    return [Difference(**entry | {k: tuple(entry[k]) for k in lists}) for entry in entries]


def mismatches(file: str, case: Case) -> dict[str, str]:
    """Outputs of a case that differ from SkyRL's, each with what was found."""
    found = {}
    for bits in (64,) if file in ONCE else (32, 64):
        with jax.enable_x64(bits == 64):
            try:
                outputs = CHECKS[file](case, bits)
            except Exception as error:
                if case.get("raises") is None:
                    found["raises"] = f"{type(error).__name__}: {error}"
                continue
        for name, (ours, expected, tolerance) in outputs.items():
            problem = difference(ours, expected, tolerance)
            if problem:
                head, colon, tail = name.partition(":")
                found[
                    name if file in ONCE or name == "raises" else f"{head}{bits}{colon}{tail}"
                ] = problem
    return found


def difference(ours: Any, expected: Any, tolerance: Tolerance) -> str | None:
    """What is wrong with ours; None if it is within the tolerance."""
    if not tolerance.relative and not isinstance(expected, np.ndarray):
        equal = np.array_equal(ours, expected) if hasattr(ours, "shape") else ours == expected
        return None if equal else f"{ours!r}, SkyRL {expected!r}"
    if isinstance(ours, str):
        return f"{ours}, SkyRL {expected}"
    ours, expected = np.asarray(ours, float), np.asarray(expected, float)
    if ours.shape != expected.shape:
        return f"shape {ours.shape}, SkyRL {expected.shape}"
    allowed = tolerance.absolute * tolerance.scale
    wrong = ~np.isclose(ours, expected, rtol=tolerance.relative, atol=allowed, equal_nan=True)
    if not wrong.any():
        return None
    at = tuple(np.argwhere(wrong)[0])
    number = f"{wrong.sum()} of {wrong.size} differ"
    return f"{number}, first {ours[at]:.12g}, SkyRL {expected[at]:.12g}"


def check_file(file: str, folder: Path, differences: list[Difference], every: int = 1) -> Report:
    """The cases of one file, or every n-th of them."""
    report = Report()
    for case in cases(file, folder)[::every]:
        wrong = mismatches(file, case)
        covering = {o: [d for d in differences if d.covers(file, case["id"], o)] for o in wrong}
        unlisted = [f"{output}: {wrong[output]}" for output, found in covering.items() if not found]
        if unlisted:
            report.failed[case["id"]] = unlisted
        elif wrong:
            report.listed[case["id"]] = [d for found in covering.values() for d in found]
        else:
            report.passed.append(case["id"])
    return report


def show(path: Path, report: Report | None, failures: int) -> None:
    """A line of counts, and the first failures."""
    if report is None:
        print(f"{path.stem:28}  unknown file, not checked")
        return
    counts = (len(report.passed), len(report.listed), len(report.failed))
    print(f"{path.stem:28}" + "".join(f"{count:8d}" for count in counts), flush=True)
    for name, lines in list(report.failed.items())[:failures]:
        print("\n".join(f"    {name}  {line}" for line in lines))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--shown", type=int, default=5, help="failures shown of each file")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4), help="processes")
    options = parser.parse_args(arguments)
    differences, started, failed = load_differences(), time.perf_counter(), 0
    paths = sorted(options.folder.glob("*.json"))
    if not paths:
        parser.error(f"no .json file in {options.folder}")
    print(f"{'file':28}{'passed':>8}{'listed':>8}{'failed':>8}")
    processes = multiprocessing.get_context("spawn")  # jax does not survive a fork
    with ProcessPoolExecutor(options.jobs, processes) as pool:
        known = sorted((p for p in paths if p.stem in CHECKS), key=size, reverse=True)
        jobs = {p: pool.submit(check_file, p.stem, options.folder, differences) for p in known}
        for path in paths:
            report = jobs[path].result() if path in jobs else None
            failed += len(report.failed) if report else 0
            show(path, report, options.shown)
    print(f"{failed} failed, {time.perf_counter() - started:.0f} s")
    return int(failed > 0)


def size(path: Path) -> int:
    return path.stat().st_size


if __name__ == "__main__":
    sys.exit(main())
