"""Plant one-line faults, one at a time, and say which of them no test notices.

    python -m tests.faults --count=60 --seed=1                      # over all rooms
    python -m tests.faults --count=9 --rooms losses --tests tests/losses tests/test_golden.py
    python -m tests.faults --known                                  # tests/faults/known.py

`make test-faults` has those of what is trained. First the tests run once on a tree that notes
which file of them reaches which fault. Then each fault is planted in a copy of the tree, and the
files that reach it run, quickest first, until one fails. A fault that lives is a line whose
meaning no test holds; some change nothing that anyone could see, and are to be read by a person.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

from tests.faults.known import known_faults
from tests.faults.places import ROOT, Fault, draw
from tests.seconds import recorded

# In every process of the run; what a test starts has the test's name from it.
NOTE = """
import builtins, os
_seen = set()
def _reached(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "?").partition("::")[0]
    if (number, test) not in _seen:
        _seen.add((number, test))
        with open({file!r}, "a") as out:
            out.write(f"{{number}} {{test}}\\n")
builtins._reached = _reached
"""


def copy_of_tree(folder: Path) -> Path:
    """Copy what git tracks and what it does not ignore, as it is now."""
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(tree: Path, arguments: Sequence[str], path: str = "") -> CompletedProcess:
    """Run pytest on a copy of the tree: its own files are imported, whatever is installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, str(tree))))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=line", *arguments],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def files_that_reach(
    faults: Sequence[Fault], tests: Sequence[str], folder: Path
) -> dict[int, list[str]]:
    """Return by number of a fault the test files that reach its line, the quickest first."""
    tree, notes = copy_of_tree(folder / "reached"), folder / "notes"
    first_of_line: dict[tuple[str, int], int] = {}  # others of the line are reached with it
    for number, fault in enumerate(faults):
        if first_of_line.setdefault((fault.path, fault.line), number) == number:
            source = (tree / fault.path).read_text()
            noting = f"(_reached({number}) or ({fault.before}))"
            (tree / fault.path).write_text(fault.planted(source, noting))
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(NOTE.format(file=str(notes)))
    run_tests(tree, ["-n", "auto", "--dist", "loadfile", *tests], str(folder / "site"))
    seconds, found = recorded(), defaultdict(set)
    for line in notes.read_text().splitlines() if notes.exists() else ():
        number, test = line.split()
        if (ROOT / test).is_file():  # else of no test: while they were collected
            found[int(number)].add(test)
    quickest = {n: sorted(files, key=lambda x: seconds.get(x, 0)) for n, files in found.items()}
    return {n: quickest.get(first_of_line[x.path, x.line], []) for n, x in enumerate(faults)}


def caught_by(fault: Fault, files: Sequence[str]) -> str:
    """Return the test that notices a fault, or "" where none of the files has one."""
    with tempfile.TemporaryDirectory(prefix="jaxrl_fault_") as folder:
        tree = copy_of_tree(Path(folder))
        target = tree / fault.path
        target.write_text(fault.planted(target.read_text()))
        for file in files:
            done = run_tests(tree, ["-x", file])
            if done.returncode not in (0, 5):
                named = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
                return (named or [f"{file} (status {done.returncode})"])[0]
    return ""


def main() -> int:
    """Plant the faults that are asked for; the exit status is 0 whatever lives."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=0, help="of drawn faults")
    parser.add_argument("--rooms", nargs="*", default=(), help="rooms or files of jaxrl/")
    parser.add_argument("--known", action="store_true", help="those of known.py, too")
    parser.add_argument("--tests", nargs="*", default=(), help="which; all that are not slow")
    options = parser.parse_args()
    faults = [(fault, [test]) for fault, test in (known_faults() if options.known else ())]
    drawn = draw(options.seed, options.count, options.rooms)
    if drawn:
        with tempfile.TemporaryDirectory(prefix="jaxrl_faults_") as folder:
            reach = files_that_reach(drawn, options.tests, Path(folder))
        faults += [(fault, reach[number]) for number, fault in enumerate(drawn)]
    alive = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tried = [pool.submit(caught_by, fault, files) for fault, files in faults]
        for number, ((fault, files), result) in enumerate(zip(faults, tried, strict=True)):
            caught = result.result()
            alive += not caught
            said = caught or f"LIVES; {len(files)} files reach it"
            print(f"{number:3d} {fault}\n    {said}", flush=True)
    print(f"{len(faults) - alive} of {len(faults)} faults are caught, {alive} live")
    return 0


if __name__ == "__main__":
    sys.exit(main())
