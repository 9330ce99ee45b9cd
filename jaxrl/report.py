"""Show runs on one page: curves, times, alarms, config, trajectories. Or serve it while they go on.

    python -m jaxrl.report RUN            # writes RUN/report.html, which needs no network
    python -m jaxrl.report RUN --live     # serves the page at a local address; new steps appear
    python -m jaxrl.report runs --live    # all runs of a folder beside each other

    RUN          a run folder, <trainer.log_path>/<trainer.run_name>, a folder of run folders, or a
                 pattern such as "runs/lr*"; several are shown beside each other. A run may go on,
                 or be killed, or lack some of its files
    --output     where to write the page; default: report.html in the first run's folder
    --tokenizer  folder of the tokenizer, where that of the run's config has moved
    --max-mb     size of the written page at most (default 10); prompts that have no room are left
                 out, evenly and always the same ones, and the page says how many. A live page
                 shows all

    --live       serve the page until Ctrl-C
    --port       of the live page; default 7007, or any free one
    --host       of the live page; default 127.0.0.1. Others are open to whoever reaches them

Exit code 0, or 2: there is nothing to show, or the page cannot be written or served.
docs/report.md shows it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl import cli
from jaxrl.tools.report.inline import samples
from jaxrl.tools.report.page import MEGABYTE, report

__all__ = ["main", "report", "samples"]


@cli.command(__doc__, bare=cli.REFUSED)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.report RUN [RUN ...] [--live] [--output FILE]`."""
    arguments = cli.Arguments()
    arguments.add_argument("runs", nargs="+")
    arguments.add_argument("--output", type=Path)
    arguments.add_argument("--tokenizer")
    arguments.add_argument("--max-mb", type=float)
    arguments.add_argument("--live", action="store_true")
    arguments.add_argument("--port", type=int)
    arguments.add_argument("--host")
    options = arguments.parse_args(argv)
    _check_flags(options.live, vars(options))
    if options.live:
        from jaxrl.tools.report.live import LOOPBACK, serve  # aiohttp: for a live page only

        serve(
            options.runs,
            host=options.host or LOOPBACK[1],
            port=options.port,
            tokenizer=options.tokenizer,
        )
        return cli.DONE
    path, notes = report(
        *options.runs,
        output=options.output,
        tokenizer=options.tokenizer,
        max_mb=10 if options.max_mb is None else options.max_mb,
    )
    print(*notes, sep="\n", end="\n" if notes else "")
    print(f"{path}: {path.stat().st_size / MEGABYTE:.1f} MB")
    return cli.DONE


def _check_flags(live: bool, given: dict[str, object]) -> None:
    for name in ("output", "max_mb") if live else ("port", "host"):
        if given[name] is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag} is for a page that is {'written' if live else 'served'}: leave it out, or "
                f"{'leave out' if live else 'add'} --live"
            )


if __name__ == "__main__":
    sys.exit(main())
