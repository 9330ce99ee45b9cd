"""Tables of policy losses and advantage estimators: name -> pure function.

    @register_policy_loss("reinforce")
    def reinforce(log_probs, old_log_probs, advantages, config, loss_mask=None, **kwargs):
        return -log_probs * advantages, {}

A config names a function by its registered name or as "my_pkg.my_module:my_function". Tables hold
the built-ins of `jaxrl.losses` and `jaxrl.advantages` from the start. User functions travel to
other processes by value, so that they need not be installed there: through the actor of a Ray job
(`sync_registries`), or from a launcher without Ray as one pickle (`snapshot`, `load_snapshot`).
"""

import functools
import pickle
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any

from jaxrl.advantages import ESTIMATORS
from jaxrl.functions import Function
from jaxrl.losses import LOSSES
from jaxrl.registry.bind import bind_estimator
from jaxrl.registry.contracts import accepted_keywords, check_hyperparameters
from jaxrl.registry.memory import EstimatorBatch, stateful
from jaxrl.registry.pickling import source_hash
from jaxrl.registry.table import (
    AdvantageEstimatorRegistry,
    BaseFunctionRegistry,
    Entry,
    PolicyLossRegistry,
    plain_name,
)

__all__ = [
    "AdvantageEstimator",
    "AdvantageEstimatorRegistry",
    "EstimatorBatch",
    "PolicyLossRegistry",
    "PolicyLossType",
    "accepted_keywords",
    "bind_estimator",
    "check_hyperparameters",
    "load_snapshot",
    "register_advantage_estimator",
    "register_configured_functions",
    "register_policy_loss",
    "snapshot",
    "source_hashes",
    "stateful",
    "sync_registries",
]


def _members(names: Collection[str]) -> dict[str, str]:
    return {name.replace("++", "_plus_plus").upper(): name for name in names}


PolicyLossType = StrEnum("PolicyLossType", _members(LOSSES))
"""Names of the built-in policy losses."""
AdvantageEstimator = StrEnum("AdvantageEstimator", _members(ESTIMATORS))
"""Names of the built-in advantage estimators."""


_REGISTRIES = (PolicyLossRegistry, AdvantageEstimatorRegistry)


def source_hashes(algorithm: Any) -> dict[str, str]:
    """Return the SHA-256 of the source of each configured function that is not a built-in.

    Of the function itself, not of what it calls; "unknown" where Python has no source.
    """
    hashes = {}
    for registry, name in _configured(algorithm):
        func = registry.resolve(name)
        if registry._builtin.get(name) is not func:
            hashes[f"{registry._function_type} '{name}'"] = source_hash(func)
    return hashes


def register_configured_functions(algorithm: Any) -> None:
    """Register what a config names as "my_pkg.my_module:my_function", under that very name.

    Then it is found, as it is marked, where the module cannot be imported.
    """
    for registry, name in _configured(algorithm):
        if ":" in name and name not in registry.list_available():
            func = registry.resolve(name)
            marked = any(e.batch_statistics and e.func is func for e in registry._entries.values())
            registry._register(name, Entry(func, marked))


def _configured(algorithm: Any) -> list[tuple[type[BaseFunctionRegistry], str]]:
    return [
        (PolicyLossRegistry, plain_name(algorithm.policy_loss_type)),
        (AdvantageEstimatorRegistry, plain_name(algorithm.advantage_estimator)),
    ]


def register_policy_loss(
    name: str | StrEnum, batch_statistics: bool = False
) -> Callable[[Function], Function]:
    """Register the decorated policy loss.

    `@register_policy_loss("my_loss")`. Returns the function unchanged.

    Args:
        batch_statistics: see `PolicyLossRegistry.register`.

    Raises:
        ValueError: used without parentheses; see `BaseFunctionRegistry.register`.
    """
    register = functools.partial(PolicyLossRegistry.register, batch_statistics=batch_statistics)
    return _decorator("register_policy_loss", register, name)


def register_advantage_estimator(name: str | StrEnum) -> Callable[[Function], Function]:
    """Register the decorated advantage estimator.

    `@register_advantage_estimator("my_estimator")`. Returns the function unchanged.

    Raises:
        ValueError: used without parentheses; see `BaseFunctionRegistry.register`.
    """
    return _decorator("register_advantage_estimator", AdvantageEstimatorRegistry.register, name)


def _decorator(
    spelling: str, register: Callable[..., None], name: str | StrEnum
) -> Callable[[Function], Function]:
    if callable(name):  # without parentheses the function would be lost
        raise ValueError(
            f'@{spelling} needs a name: @{spelling}("{getattr(name, "__name__", "my_function")}")'
        )

    def decorate(func: Function) -> Function:
        register(name, func)
        return func

    return decorate


def sync_registries() -> None:
    """Call `sync_with_actor` of every registry; `jaxrl.cluster.initialize_ray` does it.

    Raises:
        ValueError: see `BaseFunctionRegistry.sync_with_actor`.
    """
    for registry in _REGISTRIES:
        registry.sync_with_actor()


def snapshot() -> bytes:
    """Return all user functions of all registries as one pickle, with their modules by value.

    For a launcher without Ray, which starts one process per host and gives it this.

    Raises:
        ValueError: a function cannot be pickled; the message names it and what it captures.
    """
    return pickle.dumps({r._function_type: r._pack(r.user_functions()) for r in _REGISTRIES})


def load_snapshot(data: bytes) -> None:
    """Register the user functions of a `snapshot`, in a process of a launcher without Ray.

    Names that are already here keep their function.

    Raises:
        ValueError: a function cannot be loaded here; the others of its kind are registered all the
            same.
    """
    tables = pickle.loads(data)
    for registry in _REGISTRIES:
        table = tables[registry._function_type]
        registry._receive({n: p for n, p in table.items() if n not in registry._entries})
