"""Write one self-contained HTML page of a run: curves, times, alarms, config, trajectories.

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

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl import cli
from jaxrl.tools.report.page import MEGABYTE, report


@cli.command(__doc__, bare=cli.REFUSED)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.report RUN [--against RUN2] [--output FILE]`."""
    arguments = cli.Arguments()
    arguments.add_argument("run", type=Path)
    arguments.add_argument("--against", type=Path)
    arguments.add_argument("--output", type=Path)
    arguments.add_argument("--tokenizer")
    arguments.add_argument("--max-mb", type=float, default=50)
    options = arguments.parse_args(argv)
    path, notes = report(
        options.run,
        options.against,
        output=options.output,
        tokenizer=options.tokenizer,
        max_mb=options.max_mb,
    )
    print(*notes, sep="\n", end="\n" if notes else "")
    print(f"{path}: {path.stat().st_size / MEGABYTE:.1f} MB")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
