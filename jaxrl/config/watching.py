"""Config of what a run says of itself: its display, alarms, callbacks, profiles."""

import difflib
import math
from dataclasses import dataclass, field
from typing import Annotated

from jaxrl.config import given
from jaxrl.config.constraints import Constraint, must, one_of
from jaxrl.config.dataclass_config import BaseConfig
from jaxrl.config_error import fail

LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow")
DISPLAYS = ("auto", "panel", "notebook", "plain", "quiet")
ALARMS = (  # the rules of `jaxrl/records/alarms.py`
    "entropy_collapse",
    "length_explosion",
    "mismatch_growth",
    "vanishing_reward_variance",
    "not_finite",
    "reward_not_deterministic",
    "environments_fail",
)
_from_one = must(lambda steps: min(steps, default=1) >= 1, "steps are numbered from 1")


@Constraint
def _check_thresholds(field: str, thresholds: dict[str, float | None]) -> None:
    for name, threshold in thresholds.items():
        if name not in ALARMS:
            near = difflib.get_close_matches(name, ALARMS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            fail(f"{field}.{name}", threshold, f"no such alarm, only {', '.join(ALARMS)}{hint}")
        number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if threshold is not None and (not number or not math.isfinite(threshold)):
            fail(f"{field}.{name}", threshold, "must be a number, or None (off)")


@dataclass
class WatchingConfig(BaseConfig):
    """Hold the settings of display, alarms, callbacks and profiles (docs/watching.md)."""

    on_alarm: Annotated[str, one_of("warn", "checkpoint", "stop")] = "warn"
    """What an alarm does besides its message: "warn" nothing, "checkpoint" saves one, "stop" saves
    one and ends the run."""
    thresholds: Annotated[dict[str, float | None], _check_thresholds] = field(default_factory=dict)
    """Thresholds of alarms by name, instead of those of `jaxrl/records/alarms.py`; None = off."""
    display: Annotated[str, one_of(*DISPLAYS)] = "auto"
    """What a run shows of itself: "panel" keeps one at the end of the terminal, "notebook" a plot
    that grows, "plain" prints lines, "quiet" nothing but warnings and alarms; "auto" = what fits
    stdout."""
    callbacks: Annotated[list[str], given.functions] = field(default_factory=list)
    """Classes "my_pkg.my_module:MyCallback" that are told of the events of the run."""
    trace_steps: Annotated[list[int], _from_one] = field(default_factory=list)
    """Steps that jax.profiler traces, into <run folder>/profiles/traces."""
    memory_steps: Annotated[list[int], _from_one] = field(default_factory=list)
    """Steps whose device memory is profiled, into <run folder>/profiles/memory."""
