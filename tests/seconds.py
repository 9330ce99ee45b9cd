"""The seconds of each test file: in which order files run, and which of them have grown.

`seconds.txt` has those of the last whole run that was written down, by
`make test TESTS=--write-seconds`. The longest files begin first, so that no process is left alone
with one at the end.
"""

from collections import Counter
from pathlib import Path

FILE = Path(__file__).with_name("seconds.txt")
# A file's share of a run: longer ones are named at the end, where they took much more than before.
SHARE = 40


def recorded() -> dict[str, float]:
    """Return the seconds of each file in the run that was written down."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    return {path: float(seconds) for seconds, path in map(str.split, lines)}


class Seconds:
    """Add up what the tests of each file take, as a plugin of pytest."""

    def __init__(self, write: bool) -> None:
        self.write, self.spent = write, Counter()

    def pytest_runtest_logreport(self, report) -> None:
        """Count the time of a test, its fixtures included."""
        self.spent[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter) -> None:
        """Name the files that take more than their share; write down the run if that is asked."""
        before = recorded()
        for path, seconds in self.spent.most_common():
            was = before.get(path, 0.0)
            if seconds > SHARE and seconds > 1.5 * was:
                terminalreporter.write_line(
                    f"WARNING: {path} took {seconds:.0f} s, {was:.0f} in tests/seconds.txt; "
                    f"the share of a file is {SHARE}"
                )
        if self.write:
            lines = [f"{seconds:6.1f} {path}\n" for path, seconds in self.spent.most_common()]
            FILE.write_text("".join(lines))
