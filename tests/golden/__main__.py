"""Checks a folder of golden files: `python -m tests.golden [FOLDER]`.

Prints how many cases of each file pass, are listed in `tests/golden_differences.toml`, or fail;
exits with 1 if one fails.
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

if __name__ == "__main__":  # before jax is imported, here and in the processes that are spawned
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

from tests.golden import FOLDER
from tests.golden.checker import CHECKS, Report, check_file, load_differences


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
