"""The doctor, on the quickstart's model: does a run compute what it should?"""

import contextlib
import sys

from jaxrl import cli
from jaxrl.config import load_config_file
from jaxrl.tools.doctor.examination import examine
from jaxrl.tools.prove.section import Result, Row, Task


def doctor(task: Task) -> Result:
    """Examine a run of the quickstart; see docs/doctor.md."""
    with contextlib.redirect_stdout(sys.stderr):
        found = examine(
            load_config_file("configs/quickstart.py"), only=task.work.doctor, tell=cli.tell
        )
    rows: list[Row] = [
        {
            "check": finding.name,
            "result": finding.result,
            "figure": finding.figure,
            "bound": finding.bound,
            "s": finding.seconds,
            "what": finding.about,
        }
        for finding in found.findings
    ]
    failed = [finding for finding in found.findings if finding.passed is False]
    passed = sum(finding.passed is True for finding in found.findings)
    reason = "; ".join(f"{x.name}: {x.cause}, fix: {x.fix}" for x in failed)
    return Result(found.passed, f"{passed} of {len(rows)} checks", reason, rows)
