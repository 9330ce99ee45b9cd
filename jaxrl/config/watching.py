"""Config of what a run says of itself: alarms, callbacks, profiles (docs/watching.md)."""

import math
from dataclasses import dataclass, field

from jaxrl.config.dataclass_config import BaseConfig
from jaxrl.config.errors import check_choice, fail

LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow")
ALARMS = (  # the rules of `jaxrl/records/alarms.py`
    "entropy_collapse",
    "length_explosion",
    "mismatch_growth",
    "vanishing_reward_variance",
    "not_finite",
    "reward_not_deterministic",
)
ON_ALARM = ("warn", "checkpoint", "stop")
_PREFIX = "trainer.watching"


@dataclass
class WatchingConfig(BaseConfig):
    """Hold the settings of alarms, callbacks and profiles."""

    on_alarm: str = "warn"
    """What an alarm does besides its message: "warn" nothing, "checkpoint" saves one, "stop" saves
    one and ends the run."""
    thresholds: dict[str, float | None] = field(default_factory=dict)
    """Thresholds of alarms by name, instead of those of `jaxrl/records/alarms.py`; None = off."""
    callbacks: list[str] = field(default_factory=list)
    """Classes "my_pkg.my_module:MyCallback" that are told of the events of the run."""
    trace_steps: list[int] = field(default_factory=list)
    """Steps that jax.profiler traces, into <run folder>/profiles/traces."""
    memory_steps: list[int] = field(default_factory=list)
    """Steps whose device memory is profiled, into <run folder>/profiles/memory."""


def check_watching(watching: WatchingConfig, loggers: list[str]) -> None:
    """Refuse what cannot be watched.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    for name in loggers:
        check_choice("trainer.logger", name, LOGGERS, ("swanlab",))
    check_choice(f"{_PREFIX}.on_alarm", watching.on_alarm, ON_ALARM)
    for name, threshold in watching.thresholds.items():
        check_choice(f"a key of {_PREFIX}.thresholds", name, ALARMS)
        number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if threshold is not None and (not number or math.isnan(threshold)):
            fail(f"{_PREFIX}.thresholds.{name}", threshold, "must be a number, or None (off)")
    for name in ("trace_steps", "memory_steps"):
        if any(step < 1 for step in getattr(watching, name)):
            fail(f"{_PREFIX}.{name}", getattr(watching, name), "steps are numbered from 1")
