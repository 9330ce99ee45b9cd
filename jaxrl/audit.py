"""Audit a run: did every prompt get its turn, did every trajectory end once, did crashes lose any?

    python -m jaxrl.audit RUN [--json FILE]

    RUN     the run folder, <trainer.log_path>/<trainer.run_name>; the run may go on, or be killed
    --json  where to write the results

Nothing in the run folder is written to. Exit code 0: every check passed; 1: one failed; 2: there is
nothing to audit. docs/ledger.md says what each check looks at.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl import cli
from jaxrl.files import replace_text
from jaxrl.tools.audit.audit import audit, report, to_json


@cli.command(__doc__, bare=cli.REFUSED)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.audit RUN [--json FILE]`."""
    arguments = cli.Arguments()
    arguments.add_argument("run", type=Path)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args(argv)
    results = audit(options.run)
    if options.json is not None:
        replace_text(options.json, to_json(results))
    print(report(results))
    return cli.FAILED if any(check.failures for check in results) else cli.DONE


if __name__ == "__main__":
    sys.exit(main())
