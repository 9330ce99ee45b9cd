"""What a run will need of its devices, from its config and shapes alone; no weights are loaded.

    python -m jaxrl.plan --config=configs/quickstart.py [--config.trainer.seed=1 ...]
        [--topology=v5e:2x4] [--chips-per-host=4] [--hbm-gib=16] [--json=FILE] [--estimate]

Compiles every program of a training step for the devices of this process, or for TPUs that are not
here (--topology=v5e:2x4; needs libtpu), and prints what each needs of one device, its work, what it
sends, and its least time. Of GPUs that are not here (--topology=h100:8) the same is estimated.
--hbm-gib: memory of a device, in place of what is known of it; --chips-per-host: of v5e and v6e, 1,
4 or 8; --estimate: compile nothing, seconds instead of minutes. The model folder needs no weights.

Exit status: 0 it fits, 1 it does not (changes that make it fit are named), 2 bad input.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxrl import config as cfg
from jaxrl.files import replace_text, writable_folder
from jaxrl.parallel.devices import check_devices
from jaxrl.tools.plan import report
from jaxrl.tools.plan.costs import Compiler, Memory, estimated
from jaxrl.tools.plan.phases import Phase
from jaxrl.tools.plan.plan import make_plan
from jaxrl.tools.plan.remedies import MemoryOf, find_remedies
from jaxrl.tools.plan.topology import Machine, machine


def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.plan --config=FILE [--topology=...] [--hbm-gib=...] [--json=FILE]`."""
    if not argv or "--help" in argv or "-h" in argv:
        print(f"{__doc__}\nEvery field of docs/configuration.md can be set. See docs/plan.md.")
        return 0
    parser = argparse.ArgumentParser("python -m jaxrl.plan", allow_abbrev=False)
    parser.add_argument("--topology")
    parser.add_argument("--hbm-gib", type=float)
    parser.add_argument("--chips-per-host", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--estimate", action="store_true")
    options, rest = parser.parse_known_args(argv)
    try:
        path, overrides = cfg.parse_command_line(rest)
        config = cfg.apply_overrides(cfg.load_config_file(path), overrides)
        if options.json is not None:
            writable_folder("--json", options.json.parent)
        here = _machine(options.topology, options.hbm_gib, options.chips_per_host)
        memory_of = _estimate if here.stand_in or options.estimate else _compile()
        plan = make_plan(cfg.to_train_config(config), here, memory_of, _tell)
        print(report.text(plan), flush=True)
        remedies = []
        if not plan.fits:
            remedies = find_remedies(config, plan, memory_of, _tell)
            print(report.remedies_text(remedies))
    except (ValueError, OSError) as error:  # what a user can mend
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        replace_text(options.json, json.dumps(report.as_json(plan, remedies), indent=1) + "\n")
    return 0 if plan.fits else 1


def _machine(topology: str | None, hbm_gib: float | None, chips: int | None) -> Machine:
    """Return the machine to plan for.

    Of devices that are not here the chips of this process are not asked for.
    """
    if topology is not None:
        jax.config.update("jax_platforms", "cpu")
    check_devices()
    return machine(topology, hbm_gib, chips)


def _compile() -> MemoryOf:
    compiler = Compiler()
    return lambda phase, config: compiler(phase)


def _estimate(phase: Phase, config: cfg.TrainConfig) -> Memory:
    return estimated(phase, config)


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
