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
import dataclasses
import json
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl import config as cfg
from jaxrl.examination import (
    checkpoints,
    data,
    gradients,
    masks,
    recompilation,
    report,
    rewards,
    sampler,
    surroundings,
)
from jaxrl.examination.compilations import Compilations
from jaxrl.examination.finding import BadInput, Check, Finding, Unavailable
from jaxrl.examination.machine_report import as_text, machine_report
from jaxrl.examination.subject import Subject
from jaxrl.examination.supervised import CHECKS as SUPERVISED
from jaxrl.examination.supervised import SupervisedSubject
from jaxrl.files import check_file, replace_text
from jaxrl.parallel.devices import check_devices
from jaxrl.train import BasePPOExp
from jaxrl.user_functions import import_function

# In this order: what others rest on comes first, what changes the state last.
CHECKS: dict[str, Check] = {
    "versions": surroundings.versions,
    "devices": surroundings.devices,
    "memory": surroundings.memory,
    "build": data.build,
    "functions": surroundings.functions,
    "data.prompts": data.prompts,
    "data.tokenizer": data.tokenizer,
    "environment": data.environment,
    "batch": data.batch,
    "mask.tokens": masks.tokens,
    "mask.outside": masks.outside,
    "mask.padding": masks.padding,
    "mask.advantages": masks.advantages,
    "gradients.microbatches": gradients.microbatches,
    "gradients.packing": gradients.packing,
    "gradients.order": gradients.order,
    "gradients.mesh": gradients.meshes,
    "gradients.critic": gradients.critic,
    "rewards": rewards.determinism,
    "sampler.first": sampler.first,
    "weights.first": sampler.weights,
    "sampler.update": sampler.update,
    "weights.update": sampler.weights_update,
    "sampler.in_flight": sampler.in_flight,
    "reference": sampler.reference,
    "checkpoint.state": checkpoints.state,
    "checkpoint.step": checkpoints.step,
    "recompilation": recompilation.recompilation,
}


class Examination(NamedTuple):
    """What was found.

    Attributes:
        cuts: what was made smaller, field -> (given, now).
    """

    findings: list[Finding]
    cuts: dict[str, tuple[Any, Any]]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not any(finding.passed is False for finding in self.findings)


def examine(
    config: Any,
    experiment: type[BasePPOExp] = BasePPOExp,
    only: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
    supervised: bool = False,
) -> Examination:
    """Check a run; nothing is left behind.

    Args:
        config: a `TrainConfig`, `ml_collections.ConfigDict` or nested dict.
        experiment: whose `get_` methods make the parts.
        only: names of checks, or of families of them; empty = all.
        tell: gets a line before each check.
        supervised: the config is one of `jaxrl.sft`; there are fewer checks.

    Raises:
        ValueError: the config, a file or a folder is wrong, or there is no such check.
    """
    checks = chosen(only, supervised)
    with tempfile.TemporaryDirectory(prefix="jaxrl_doctor_") as folder, Compilations() as programs:
        subject, findings = _subject(config, Path(folder), experiment, programs, supervised), []
        with contextlib.closing(subject):
            for name, check in checks.items():
                tell(name)
                findings.append(run_check(name, check, subject))
        return Examination(findings, subject.cuts)


def _subject(
    config: Any, folder: Path, experiment: type[BasePPOExp], programs: Compilations, sft: bool
) -> Subject:
    if sft:
        return SupervisedSubject(config, folder, programs)
    return Subject(config, folder, experiment, programs)


def chosen(only: Sequence[str], supervised: bool = False) -> dict[str, Check]:
    """Checks by name or by the part of it before the dot.

    Args:
        supervised: of those that a run of `jaxrl.sft` has.

    Raises:
        ValueError: there is no such check.
    """
    checks = {n: check for n, check in CHECKS.items() if not supervised or n in SUPERVISED}
    families = {name.partition(".")[0] for name in checks}
    if unknown := [name for name in only if name not in checks and name not in families]:
        kind = " of a supervised run (--sft)" if supervised else ""
        raise ValueError(
            f"--only={unknown[0]}: there is no such check{kind}; there are {list(checks)}"
        )
    wanted = {name for name in checks if name in only or name.partition(".")[0] in only}
    return {name: check for name, check in checks.items() if not only or name in wanted}


def run_check(name: str, check: Check, subject: Subject) -> Finding:
    """A check, timed; one that raises has failed, and the next ones go on.

    Raises:
        BadInput: there is no run to examine.
    """
    started = time.perf_counter()
    try:
        finding = check(subject)
    except BadInput:
        raise
    except Exception as error:
        finding = _not_done(name, error)
        if not isinstance(error, Unavailable):
            with contextlib.suppress(Exception):  # what follows says so itself
                subject.restart()
    seconds = time.perf_counter() - started
    return dataclasses.replace(finding, name=name, seconds=seconds)


def _not_done(name: str, error: Exception) -> Finding:
    """A check that could not be done; the reason is shown once, by the check that is to see."""
    if isinstance(error, Unavailable):
        if error.see != name or not isinstance(error.__cause__, Exception):
            return Finding(False, about="not done", cause=str(error), fix="mend that first")
        error = error.__cause__
    traceback.print_exception(error)
    return Finding(
        False,
        about="the check could not be done",
        cause=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
        fix="the traceback is above; if it ends in your code mend that, else report it",
    )


def main(argv: Sequence[str]) -> int:
    """`python -m jaxrl.doctor --config=FILE [--only=...] [--json=FILE]`, or `--env`."""
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
    """SIGTERM is raised as SystemExit, so that what was written is removed."""
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
