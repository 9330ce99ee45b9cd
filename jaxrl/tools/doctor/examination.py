"""Examine a run on the machine that it shall run on: every check, in order."""

import contextlib
import dataclasses
import difflib
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.tools.doctor import (
    checkpoints,
    data,
    exact,
    gradients,
    masks,
    recompilation,
    rewards,
    sampler,
    surroundings,
)
from jaxrl.tools.doctor.examined_run import ExaminedRun
from jaxrl.tools.doctor.finding import BadInput, Check, Finding, Unavailable
from jaxrl.tools.doctor.supervised import ExaminedSFT
from jaxrl.train import BasePPOExp

# In this order: what others rest on comes first, what changes the state last.
CHECKS: dict[str, Check] = {
    "versions": surroundings.versions,
    "devices": surroundings.devices,
    "memory": surroundings.memory,
    "build": data.build,
    "functions": surroundings.functions,
    "data.prompts": data.prompts,
    "data.tokenizer": data.tokenizer,
    "data.turns": data.turns,
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
    "exact": exact.exact,
    "sampler.update": sampler.update,
    "weights.update": sampler.weights_update,
    "sampler.in_flight": sampler.in_flight,
    "reference": sampler.reference,
    "checkpoint.state": checkpoints.state,
    "checkpoint.step": checkpoints.step,
    "recompilation": recompilation.recompilation,
}
SUPERVISED = (  # the others are about rollouts
    "versions",
    "devices",
    "build",
    "data.tokenizer",
    "batch",
    "mask.outside",
    "mask.padding",
    "gradients.microbatches",
    "gradients.packing",
    "gradients.order",
    "gradients.mesh",
    "checkpoint.state",
    "checkpoint.step",
)


class Examination(NamedTuple):
    """Hold what an examination found.

    Attributes:
        cuts: what was made smaller, field -> (before, now).
    """

    findings: list[Finding]
    cuts: dict[str, tuple[Any, Any]]

    @property
    def passed(self) -> bool:
        """Return whether no check failed."""
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
        experiment: its `get_` methods make the parts.
        only: names of checks, or of families of them; empty = all.
        tell: gets a line before each check.
        supervised: the config is one of `jaxrl.sft`; there are fewer checks.

    Raises:
        ValueError: the config, a file or a folder is wrong, or there is no such check.
    """
    checks, findings = chosen(only, supervised), []
    with (
        tempfile.TemporaryDirectory(prefix="jaxrl_doctor_") as folder,
        recompilation.compiled_programs() as programs,
    ):
        if supervised:
            examined: ExaminedRun = ExaminedSFT(config, Path(folder), programs)
        else:
            examined = ExaminedRun(config, Path(folder), experiment, programs)
        with contextlib.closing(examined):
            for name, check in checks.items():
                tell(name)
                findings.append(run_check(name, check, examined))
        return Examination(findings, examined.changes)


def chosen(only: Sequence[str], supervised: bool = False) -> dict[str, Check]:
    """Return checks by name or by the part of it before the dot.

    Args:
        supervised: of those that a run of `jaxrl.sft` has.

    Raises:
        ValueError: there is no such check.
    """
    names = SUPERVISED if supervised else CHECKS
    checks = {name: CHECKS[name] for name in names}
    families = {name.partition(".")[0] for name in checks}
    if unknown := [name for name in only if name not in checks and name not in families]:
        kind = " of a supervised run (--sft)" if supervised else ""
        near = difflib.get_close_matches(unknown[0], [*checks, *families], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"--only={unknown[0]}: there is no such check{kind}{hint}; there are {list(checks)}"
        )
    wanted = {name for name in checks if name in only or name.partition(".")[0] in only}
    return {name: check for name, check in checks.items() if not only or name in wanted}


def run_check(name: str, check: Check, examined: ExaminedRun) -> Finding:
    """Run and time a check; one that raises has failed, and the next ones go on.

    Raises:
        BadInput: there is no run to examine.
    """
    started = time.perf_counter()
    try:
        finding = check(examined)
    except BadInput:
        raise
    except Exception as error:
        finding = _not_done(name, error)
        if not isinstance(error, Unavailable):
            with contextlib.suppress(Exception):  # what follows says so itself
                examined.restart()
    seconds = time.perf_counter() - started
    return dataclasses.replace(finding, name=name, seconds=seconds)


def _not_done(name: str, error: Exception) -> Finding:
    """Return the finding of a check that could not be done.

    The reason is shown once, by the check that is to see.
    """
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
