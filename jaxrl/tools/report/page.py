"""Put one run or several on one HTML page: everything is in it, nothing is fetched."""

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jaxrl.files import check_file, replace_text
from jaxrl.tools.report import parts
from jaxrl.tools.report.blob import inert_json
from jaxrl.tools.report.run_files import RunFiles, read_runs
from jaxrl.tools.report.selection import Selection, select
from jaxrl.tools.report.series import series
from jaxrl.tools.report.vocabulary import Vocabulary, tokenizer_of

MEGABYTE = 1_000_000
MARGIN = 4000  # bytes of a page for what is counted by the way
SCRIPTS = "page", "curves", "views", "tokens", "trajectories", "main"


def report(
    *runs: str | Path,
    output: Path | None = None,
    tokenizer: str | None = None,
    max_mb: float = 10,
) -> tuple[Path, list[str]]:
    """Write the page of a run, or of several; see the command for what is not said here.

    Args:
        runs: run folders, folders of runs, or patterns such as "runs/lr*".
        output: where to write it; None = report.html in the folder of the first run.
        max_mb: its size at most.

    Returns:
        Where it is, and what it does not show because the runs lack it.

    Raises:
        ValueError, OSError: a folder is no run folder, or the page cannot be written.
    """
    found = read_runs(runs)
    path = found[0].folder / "report.html" if output is None else output
    check_file("--output", path)
    if max_mb <= 0:
        raise ValueError(f"--max-mb={max_mb:g}: must be above 0, e.g. 10")
    text = page(found, tokenizer=tokenizer, limit=int(max_mb * MEGABYTE))
    replace_text(path, text)
    return path, [f"{one.folder}: {note}" for one in found for note in one.all_notes()]


def page(runs: Sequence[RunFiles], *, tokenizer: str | None = None, limit: int) -> str:
    """Return the page of one run, or of several beside each other.

    Args:
        runs: their `notes` grow by what cannot be shown.
        tokenizer: a folder, instead of what the runs' configs name.
        limit: bytes of the page at most.

    Raises:
        ValueError: the curves alone are more than the limit, or the tokenizer cannot be read.
    """
    data = {f"m{i}": series(run) for i, run in enumerate(runs)}
    data |= {f"c{i}": parts.config(run) for i, run in enumerate(runs)}
    said = [parts.about(run) for run in runs]
    empty = html_page(runs, {"manifest": parts.manifest(said)} | data)
    room = limit - len(empty.encode()) - MARGIN
    if room < 0:
        needed = (limit - room) / MEGABYTE
        raise ValueError(
            f"without any trajectory the page has {needed:.1f} MB, the limit is "
            f"{limit / MEGABYTE:g} MB: give --max-mb={needed + 1:.0f}, or more"
        )
    for i, found in enumerate(_selections(runs, tokenizer, room)):
        data[f"p{i}"] = inert_json({step: uids for step, (uids, _) in found.steps.items()})
        data[f"v{i}-0"] = parts.vocabulary(found.vocabulary, 0)
        for step, (_, of) in found.steps.items():
            data[f"t{i}-{step}"] = parts.trajectories(found.blobs[step], of)
        left_out = {"kept": found.kept, "of": found.total, "steps": found.steps_left_out}
        said[i] |= {"recorded": list(found.steps), "left_out": left_out}
        said[i]["notes"] = runs[i].all_notes()
    return html_page(runs, {"manifest": parts.manifest(said)} | data)


def _selections(runs: Sequence[RunFiles], tokenizer: str | None, room: int) -> list[Selection]:
    """Select the trajectories of each run.

    The smaller runs come first, the others get what those leave.
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


def html_page(runs: Sequence[RunFiles], data: dict[str, str], *, connect: str = "'none'") -> str:
    """Return the page around some of its parts.

    Args:
        data: name of a part -> its text, in which nothing ends the element that it stands in.
        connect: where the page may fetch the others from, for its content security policy.
    """
    script = "".join(_file(f"{name}.js") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    filled = {
        "title": html.escape(", ".join(run.name for run in runs)),
        "style": _file("page.css"),
        "script": script,
        "script_hash": digest,
        "connect": connect,
        "data": "".join(
            f'<script type="text/plain" id="{name}">{text}</script>\n'
            for name, text in data.items()
        ),
    }
    text = _file("page.html")
    pieces = text.split("{{")  # each "name}} and what follows"; data is never searched for names
    return pieces[0] + "".join(
        filled[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:])
    )


def _file(name: str) -> str:
    return resources.files("jaxrl.tools.report").joinpath("page", name).read_text(encoding="utf-8")
