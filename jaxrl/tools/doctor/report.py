"""Show findings as a table and as JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.tools.doctor.finding import Figure, Finding


def cuts_text(cuts: Mapping[str, tuple[Any, Any]]) -> str:
    """Return what was made smaller, as text."""
    if not cuts:
        return "nothing was cut: this is the run as it is"
    rows = [f"  {name}: {before} -> {now}" for name, (before, now) in cuts.items()]
    return "\n".join(("cut down for the examination (the run itself keeps its values):", *rows))


def text(findings: Sequence[Finding]) -> str:
    """Return a row for each check; their tables; cause and fix of what failed; the verdict."""
    rows: list[tuple[Figure, ...]] = [("check", "result", "figure", "bound", "s", "what")]
    for f in findings:
        rows.append((f.name, f.result, f.figure, f.bound, f"{f.seconds:.1f}", f.about))
    lines = aligned(rows)
    for f in findings:
        if f.table:
            lines += ["", f.name, *(f"  {line}" for line in aligned(f.table))]
    wrong = [f for f in findings if f.passed is False]
    for f in wrong:
        lines += ["", f"FAIL {f.name}", f"  cause: {f.cause}", f"  fix:   {f.fix}"]
    skipped = sum(f.passed is None for f in findings)
    seconds = sum(f.seconds for f in findings)
    verdict = f"FAILED: {', '.join(f.name for f in wrong)}" if wrong else "passed"
    counts = (
        f"{len(findings) - len(wrong) - skipped} passed, {len(wrong)} failed, {skipped} not here"
    )
    return "\n".join((*lines, "", f"doctor: {verdict} ({counts}; {seconds:.0f} s)"))


def aligned(rows: Sequence[Sequence[Figure]]) -> list[str]:
    """Return a line for each row, with cells below each other."""
    cells = [[shown(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    widths[-1] = 0  # nothing stands after the last column
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]


def to_json(
    findings: Sequence[Finding], cuts: Mapping[str, tuple[Any, Any]], machine: Mapping[str, Any]
) -> str:
    """Return findings, cuts and machine as JSON, for programs."""
    return (
        json.dumps(
            {
                "passed": not any(f.passed is False for f in findings),
                "checks": [vars(f) | {"result": f.result} for f in findings],
                "cuts": {
                    name: {"given": before, "now": now} for name, (before, now) in cuts.items()
                },
                "machine": machine,
            },
            indent=1,
            default=str,
        )
        + "\n"
    )


def shown(figure: Figure) -> str:
    """Return a number in few digits."""
    return f"{figure:.3g}" if isinstance(figure, float) else str(figure)
