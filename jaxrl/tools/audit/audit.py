"""Run all checks of a run's ledger on one snapshot; say what they found as text and as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

from jaxrl.tools.audit import lineage_checks as checks
from jaxrl.tools.audit.lineage import open_run
from jaxrl.tools.audit.lineage_checks import Check

CHECKS = (
    checks.history,
    checks.prompts,
    checks.order,
    checks.in_flight,
    checks.trained_once,
    checks.batches,
    checks.ends,
    checks.steps,
    checks.length_bias,
    checks.rollout_files,
    checks.checkpoints,
    checks.rows,
)
SHOWN = 10  # failures of a check


def audit(folder: str | Path) -> list[Check]:
    """Run the checks of the run in a folder, on one snapshot of its ledger.

    Raises:
        NothingToAudit: it has no ledger that can be read.
    """
    with open_run(Path(folder)) as run:
        return [check(run) for check in CHECKS]


def report(results: Sequence[Check]) -> str:
    """Return a table of the checks, then what is wrong."""
    rows = [("check", "result", "figures")]
    for check in results:
        figures = ", ".join(f"{name} {value}" for name, value in check.figures.items())
        rows.append((check.name, check.result, figures))
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    lines = [f"{name:{widths[0]}}  {result:{widths[1]}}  {text}" for name, result, text in rows]
    for check in results:
        more = len(check.failures) - SHOWN
        shown = [*check.failures[:SHOWN], *([f"and {more} more"] if more > 0 else [])]
        lines += [f"{check.name}: {text}" for text in (*shown, check.unknown) if text]
    failed = [check.name for check in results if check.failures]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "passed"
    return "\n".join((*lines, f"audit {verdict}"))


def to_json(results: Sequence[Check]) -> str:
    """Return the checks as JSON, for programs, with every failure."""
    passed = not any(check.failures for check in results)
    found = [vars(check) | {"result": check.result} for check in results]
    return json.dumps({"passed": passed, "checks": found}, indent=1) + "\n"
