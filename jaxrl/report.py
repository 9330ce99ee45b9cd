"""One self-contained HTML page of a run: curves, times, alarms, config, trajectories.

    python -m jaxrl.report RUN [--against RUN2] [--output FILE]

    RUN          the run folder, <trainer.log_path>/<trainer.run_name>; the run may go on, or be
                 killed, or lack some of its files
    --against    another run, shown beside it: curves overlaid, the same prompts side by side
    --output     where to write the page; default: RUN/report.html
    --tokenizer  folder of the tokenizer, where that of the run's config has moved
    --max-mb     size of the page at most (default 50); prompts that have no room are left out,
                 evenly and always the same ones, and the page says how many

Open the page in a browser; it needs no network. Exit code 0, or 2: there is nothing to show, or the
page cannot be written. docs/report.md shows it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.files import check_file, replace_text
from jaxrl.tools.report.page import MEGABYTE, page, page_path
from jaxrl.tools.report.run_files import read_run


def report(
    run: str | Path,
    against: str | Path | None = None,
    *,
    output: Path | None = None,
    tokenizer: str | None = None,
    max_mb: float = 50,
) -> tuple[Path, list[str]]:
    """Write the page of a run; see the command.

    Returns:
        Where it is, and what it could not show.

    Raises:
        ValueError, OSError: a folder is no run folder, or the page cannot be written.
    """
    path = page_path(Path(run)) if output is None else output
    runs = [read_run(folder) for folder in (run, against) if folder is not None]
    check_file("--output", path)
    if max_mb <= 0:
        raise ValueError(f"--max-mb={max_mb:g}: must be above 0, e.g. 50")
    text = page(runs, tokenizer=tokenizer, limit=int(max_mb * MEGABYTE))
    replace_text(path, text)
    return path, [f"{one.folder}: {note}" for one in runs for note in one.all_notes()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m jaxrl.report RUN`."""
    parser = argparse.ArgumentParser(
        "python -m jaxrl.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--against", type=Path, metavar="RUN2")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--tokenizer", metavar="FOLDER")
    parser.add_argument("--max-mb", type=float, default=50, metavar="N")
    given = parser.parse_args(argv)
    try:
        path, notes = report(
            given.run,
            given.against,
            output=given.output,
            tokenizer=given.tokenizer,
            max_mb=given.max_mb,
        )
    except (ValueError, OSError) as error:  # what a user can mend
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*notes, sep="\n", end="\n" if notes else "")
    print(f"{path}: {path.stat().st_size / MEGABYTE:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
