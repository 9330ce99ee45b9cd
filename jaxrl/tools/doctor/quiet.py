"""Examine a run for the command: what the run prints goes to stderr, what it writes is removed."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl import cli, config as cfg
from jaxrl.functions import import_function
from jaxrl.tools.doctor.examination import Examination, examine
from jaxrl.train import BasePPOExp


def examine_quietly(
    config: cfg.TrainConfig, experiment: str | None, only: Sequence[str], supervised: bool
) -> Examination:
    """Check a run, see `examine`; stdout remains for what was found.

    Args:
        experiment: "module:class" of the run; None = `BasePPOExp`.

    Raises:
        ValueError: the class is none of `BasePPOExp`; see `examine`.
    """
    run_class: Any = BasePPOExp
    if experiment is not None:
        run_class = import_function(experiment, "--experiment")
    if not isinstance(run_class, type) or not issubclass(run_class, BasePPOExp):
        raise ValueError(f"--experiment={experiment}: is no subclass of jaxrl.train.BasePPOExp")
    if not supervised and config.sft != cfg.SFTConfig():
        print("hint: the config sets sft.*; one of jaxrl.sft needs --sft", file=sys.stderr)
    with contextlib.redirect_stdout(sys.stderr), ended_by_sigterm():
        return examine(config, run_class, only, cli.tell, supervised)


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
