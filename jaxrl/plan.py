"""Plan a run: what it will need of its devices, from config and shapes; no weights are loaded.

    python -m jaxrl.plan --config=configs/quickstart.py [--config.trainer.seed=1 ...]
        [--topology=v5e:2x4] [--chips-per-host=4] [--hbm-gib=16] [--mean-response=256]
        [--json=FILE] [--estimate]

Compiles every program of a training step for the devices of this process, or for TPUs that are not
here (--topology=v5e:2x4; needs libtpu), and prints what each needs of one device, its work, what it
sends, and its least time. Of GPUs that are not here (--topology=h100:8) the same is estimated.
--hbm-gib: memory of a device, in place of what is known of it; --chips-per-host: of v5e and v6e, 1,
4 or 8; --mean-response: tokens of a response on average, in place of as many as the config allows;
--estimate: compile nothing, seconds instead of minutes. The model folder needs no weights.

Exit status: 0 it fits, 1 it does not (changes that make it fit are named), 2 bad input.
"""

from pathlib import Path

from jaxrl import cli, config as cfg

ARGUMENTS = cli.Arguments()
ARGUMENTS.add_argument("--topology")
ARGUMENTS.add_argument("--hbm-gib", type=float)
ARGUMENTS.add_argument("--chips-per-host", type=int)
ARGUMENTS.add_argument("--mean-response", type=float)
ARGUMENTS.add_argument("--json", type=Path)
ARGUMENTS.add_argument("--estimate", action="store_true")

if __name__ == "__main__":
    cli.answer_early(__doc__, lambda words: cfg.read_early(ARGUMENTS.parse_known_args(words)[1]))

import json
import sys
from collections.abc import Sequence

import jax

from jaxrl.config.oddities import warn_of_longest_row
from jaxrl.files import replace_text, writable_folder
from jaxrl.models.hf import max_positions
from jaxrl.parallel.devices import check_devices
from jaxrl.tools.plan import report
from jaxrl.tools.plan.costs import Compiler, estimated
from jaxrl.tools.plan.plan import make_plan
from jaxrl.tools.plan.remedies import find_remedies
from jaxrl.tools.plan.topology import machine, make_stand_ins


@cli.command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.plan --config=FILE [--topology=...] [--hbm-gib=...] [--json=FILE]`."""
    options, words = ARGUMENTS.parse_known_args(argv)
    config = cfg.read_command_line(words)
    if options.json is not None:
        writable_folder("--json", options.json.parent)
    if options.topology is not None:  # nobody asks for what is here: devices, checkpoints
        jax.config.update("jax_platforms", "cpu")
        make_stand_ins(options.topology)
        config = cfg.apply_overrides(config, {"trainer.resume_mode": "none"})
    check_devices()
    devices = machine(options.topology, options.hbm_gib, options.chips_per_host)
    compiled, estimates = Compiler(), options.estimate or devices.stand_in
    memory_of = estimated if estimates else lambda phase, config: compiled(phase)
    train_config = cfg.to_train_config(config)
    plan = make_plan(train_config, devices, memory_of, cli.tell, options.mean_response)
    warn_of_longest_row(plan.config, max_positions(plan.config.trainer.policy.model.path or ""))
    print(report.text(plan), flush=True)
    remedies = [] if plan.fits else find_remedies(config, plan, memory_of, cli.tell)
    if not plan.fits:
        print(report.remedies_text(remedies))
    if options.json is not None:
        replace_text(options.json, json.dumps(report.as_json(plan, remedies), indent=1) + "\n")
    return cli.DONE if plan.fits else cli.FAILED


if __name__ == "__main__":
    sys.exit(main())
