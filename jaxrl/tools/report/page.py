"""Put a run, or two, on one HTML page: everything is in it, nothing is fetched."""

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jaxrl.files import check_file, replace_text
from jaxrl.tools.report.blob import inert_json, pack
from jaxrl.tools.report.run_files import METRICS, RunFiles, read_run
from jaxrl.tools.report.selection import Selection, select
from jaxrl.tools.report.series import alarms, series
from jaxrl.tools.report.settings import changed, fields, objective
from jaxrl.tools.report.vocabulary import Vocabulary, tokenizer_of

MEGABYTE = 1_000_000
MARGIN = 4000  # bytes of a page for what is counted by the way


def report(
    run: str | Path,
    against: str | Path | None = None,
    *,
    output: Path | None = None,
    tokenizer: str | None = None,
    max_mb: float = 50,
) -> tuple[Path, list[str]]:
    """Write the page of a run, or of two; see the command for what is not said here.

    Args:
        output: where to write it; None = report.html in the folder of the run.
        max_mb: its size at most.

    Returns:
        Where it is, and what it does not show because the runs lack it.

    Raises:
        ValueError, OSError: a folder is no run folder, or the page cannot be written.
    """
    path = Path(run) / "report.html" if output is None else output
    runs = [read_run(folder) for folder in (run, against) if folder is not None]
    check_file("--output", path)
    if max_mb <= 0:
        raise ValueError(f"--max-mb={max_mb:g}: must be above 0, e.g. 50")
    text = page(runs, tokenizer=tokenizer, limit=int(max_mb * MEGABYTE))
    replace_text(path, text)
    return path, [f"{one.folder}: {note}" for one in runs for note in one.all_notes()]


def page(runs: Sequence[RunFiles], *, tokenizer: str | None = None, limit: int) -> str:
    """Return the page of one run, or of two that are compared.

    Args:
        runs: their `notes` grow by what cannot be shown.
        tokenizer: a folder, instead of what the runs' configs name.
        limit: bytes of the page at most.

    Raises:
        ValueError: the curves alone are more than the limit, or the tokenizer cannot be read.
    """
    curves = [series(run) for run in runs]
    about = [_about(run) for run in runs]
    empty = _put_together(runs, about, [f'<script id="m{i}">{x}' for i, x in enumerate(curves)])
    room = limit - len(empty.encode()) - MARGIN
    if room < 0:
        needed = (limit - room) / MEGABYTE
        raise ValueError(
            f"without any trajectory the page has {needed:.1f} MB, the limit is "
            f"{limit / MEGABYTE:g} MB: give --max-mb={needed + 1:.0f}, or more"
        )
    selections = _selections(runs, tokenizer, room)
    data: list[str] = []
    for i, (run, found) in enumerate(zip(runs, selections, strict=True)):
        data.append(_data(f"m{i}", curves[i]))
        words = found.vocabulary
        data.append(_data(f"v{i}", pack({"entries": words.entries, "ids": words.ids}, {})))
        data += [_data(f"t{i}-{step}", " ".join(x)) for step, x in found.blobs.items()]
        about[i] |= _trajectories(found) | {"notes": run.all_notes()}
    return _put_together(runs, about, data)


def _selections(runs: Sequence[RunFiles], tokenizer: str | None, room: int) -> list[Selection]:
    """Select the trajectories of each run.

    The smaller run comes first, the other gets what that leaves.
    """
    found: dict[int, Selection] = {}
    sizes = [sum(path.stat().st_size for path in run.rollouts.values()) for run in runs]
    for place, i in enumerate(sorted(range(len(runs)), key=lambda i: sizes[i])):
        run = runs[i]
        loaded = tokenizer_of(run, tokenizer) if run.rollouts else None
        left = room - sum(x.size for x in found.values())
        share = left // (len(runs) - place)
        found[i] = select(run, lambda loaded=loaded: Vocabulary(loaded), share)
    return [found[i] for i in range(len(runs))]


def _about(run: RunFiles) -> dict[str, Any]:
    """Return what the page says of a run beside its curves and trajectories."""
    path = run.folder / METRICS
    return {
        "name": run.name,
        "folder": str(run.folder.resolve()),
        "last_step": run.last_step,
        "total_steps": run.total_steps,
        "written": path.stat().st_mtime if path.is_file() else None,
        "has_ledger": run.has_ledger,
        "attempts": run.attempts,
        "ends": run.ends,
        "alarms": alarms(run),
        "card": objective(run),
        "changed": changed(run),
        "fields": fields(run.settings),
        "notes": [],
    }


def _trajectories(found: Selection) -> dict[str, Any]:
    return {
        "steps": found.steps,
        "stops": sorted(found.stops),
        "special": found.vocabulary.special,
        "known_tokens": found.vocabulary.tokenizer is not None,
        "trajectories": {
            "kept": found.kept,
            "of": found.total,
            "steps_left_out": found.steps_left_out,
        },
    }


def _data(name: str, text: str) -> str:
    return f'<script type="text/plain" id="{name}">{text}</script>\n'


def _put_together(runs: Sequence[RunFiles], about: Sequence[Any], data: Sequence[str]) -> str:
    manifest = inert_json({"runs": about})
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": html.escape(" and ".join(run.name for run in runs)),
        "style": _part("page.css"),
        "script": script,
        "script_hash": digest,
        # nothing that a trajectory says can end the element that it stands in
        "data": f'<script type="application/json" id="manifest">{manifest}</script>\n'
        + "".join(data),
    }
    text = _part("page.html")
    pieces = text.split("{{")  # each "name}} and what follows"; data is never searched for names
    return pieces[0] + "".join(
        parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:])
    )


def _part(name: str) -> str:
    return resources.files("jaxrl.tools.report").joinpath(name).read_text(encoding="utf-8")
