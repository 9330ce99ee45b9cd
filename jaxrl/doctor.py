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
"""

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrl import config as cfg
from jaxrl.files import check_file, replace_text
from jaxrl.functions import import_function
from jaxrl.parallel.devices import check_devices
from jaxrl.tools.doctor import (
    report,
)
from jaxrl.tools.doctor.examination import examine
from jaxrl.tools.doctor.machine_report import as_text, machine_report
from jaxrl.train import BasePPOExp


def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.doctor --config=FILE [--only=...] [--json=FILE]`, or `--env`."""
    if not argv or "--help" in argv or "-h" in argv:
        print(f"{__doc__}\nEvery field of docs/configuration.md can be set. See docs/doctor.md.")
        return 0
    parser = argparse.ArgumentParser("python -m jaxrl.doctor", allow_abbrev=False)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--experiment")
    parser.add_argument("--sft", action="store_true")
    parser.add_argument("--env", action="store_true")
    options, rest = parser.parse_known_args(argv)
    try:
        check_file("--json", options.json)
        check_devices()
        if options.env:
            return _print_machine(options.json, rest)
        path, overrides = cfg.parse_command_line(rest)
        config = cfg.apply_overrides(cfg.load_config_file(path), overrides)
        only = [name for name in options.only.split(",") if name]
        experiment = _experiment(options.experiment)
        if not options.sft and cfg.to_train_config(config).sft != cfg.SFTConfig():
            print("hint: the config sets sft.*; one of jaxrl.sft needs --sft", file=sys.stderr)
        # what the run prints of itself is not the result
        with contextlib.redirect_stdout(sys.stderr), ended_by_sigterm():
            found = examine(config, experiment, only, _tell, options.sft)
    except (ValueError, OSError) as error:  # what a user can mend
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report.cuts_text(found.cuts), report.text(found.findings), sep="\n\n")
    if options.json is not None:
        replace_text(options.json, report.to_json(*found, machine_report()))
    return 0 if found.passed else 1


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM while the block runs, so that what was written is removed."""
    if threading.current_thread() is not threading.main_thread():  # may set no handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_machine(file: Path | None, rest: Sequence[str]) -> int:
    if rest:
        raise ValueError(f"--env takes no config, got {' '.join(rest)}; leave one of them out")
    found = machine_report()
    print(as_text(found))
    if file is not None:
        replace_text(file, json.dumps(found, indent=1) + "\n")
    return 0


def _experiment(path: str | None) -> type[BasePPOExp]:
    if path is None:
        return BasePPOExp
    found: Any = import_function(path, "--experiment")
    if not isinstance(found, type) or not issubclass(found, BasePPOExp):
        raise ValueError(f"--experiment={path}: is no subclass of jaxrl.train.BasePPOExp")
    return found


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
