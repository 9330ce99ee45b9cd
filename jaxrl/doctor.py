"""Examine a run before it starts: does what it rests on hold, on this machine, with this config?

    python -m jaxrl.doctor --config=configs/quickstart.py [--config.trainer.seed=1 ...]
        [--only=gradients,rewards] [--experiment=my_pkg.my_module:MyExp] [--json=FILE]
    python -m jaxrl.doctor --sft --config=configs/sft_addition.py
    python -m jaxrl.doctor --env

Builds the run of the config, cut down to a few rows of short responses, and checks: gradients that
do not depend on microbatches, packing, padding, order or mesh; loss masks; the sampler against the
trainer, before and after an update; the engine's weights; a checkpoint; rewards judged twice;
recompilations; versions, devices, memory, data, tokenizer, environments. All that it writes goes to
a temporary folder; the run's own folders are not touched.

--only: checks or families of checks, by name; --experiment: a subclass of `BasePPOExp` whose parts
are examined; --sft: the config is one of `jaxrl.sft`; --json: all figures; --env: print what a bug
report needs, and examine nothing.

Exit status: 0 every check passed, 1 one failed (cause and fix are printed), 2 bad input.
docs/doctor.md says what each check looks at.
"""

from pathlib import Path

from jaxrl import cli, config as cfg

ARGUMENTS = cli.Arguments()
ARGUMENTS.add_argument("--json", type=Path)
ARGUMENTS.add_argument("--only", default="")
ARGUMENTS.add_argument("--experiment")
ARGUMENTS.add_argument("--sft", action="store_true")
ARGUMENTS.add_argument("--env", action="store_true")

if __name__ == "__main__":
    cli.answer_early(
        __doc__,
        lambda words: "--env" in words or cfg.read_early(ARGUMENTS.parse_known_args(words)[1]),
    )

import json
import sys
from collections.abc import Sequence

from jaxrl.files import check_file, replace_text
from jaxrl.parallel.devices import check_devices
from jaxrl.tools.doctor import report
from jaxrl.tools.doctor.examination import examine
from jaxrl.tools.doctor.machine_report import as_text, machine_report
from jaxrl.tools.doctor.quiet import examine_quietly

__all__ = ["examine", "main"]  # `examine` is for those who call it in Python


@cli.command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.doctor --config=FILE [--only=...] [--json=FILE]`, or `--env`."""
    options, words = ARGUMENTS.parse_known_args(argv)
    check_file("--json", options.json)
    check_devices()
    if options.env:
        if words:
            raise ValueError(f"--env takes no config, got {' '.join(words)}; leave one out")
        print(as_text(machine := machine_report()))
        if options.json is not None:
            replace_text(options.json, json.dumps(machine, indent=1) + "\n")
        return cli.DONE
    config, only = cfg.read_command_line(words), [x for x in options.only.split(",") if x]
    found = examine_quietly(config, options.experiment, only, options.sft)
    print(report.cuts_text(found.cuts), report.text(found.findings), sep="\n\n")
    if options.json is not None:
        replace_text(options.json, report.to_json(*found, machine_report()))
    return cli.DONE if found.passed else cli.FAILED


if __name__ == "__main__":
    sys.exit(main())
