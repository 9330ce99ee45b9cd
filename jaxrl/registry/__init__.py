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
import inspect
import pickle
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Any

from jaxrl.advantages import ESTIMATORS
from jaxrl.array_ops import Array, FloatBT
from jaxrl.functions import Function
from jaxrl.losses import BATCH_STATISTICS, LOSSES
from jaxrl.registry.contracts import (
    ESTIMATOR_DATA,
    advantages_and_returns,
    check_arrays,
    check_estimator_signature,
    check_loss_signature,
    check_parameters,
    raised_by,
)
from jaxrl.registry.pickling import source_hash
from jaxrl.registry.table import BaseFunctionRegistry, Entry, plain_name


def _names(of: Collection[str]) -> dict[str, str]:
    return {name.replace("++", "_plus_plus").upper(): name for name in of}


PolicyLossType = StrEnum("PolicyLossType", _names(LOSSES))
"""Names of the built-in policy losses."""
AdvantageEstimator = StrEnum("AdvantageEstimator", _names(ESTIMATORS))
"""Names of the built-in advantage estimators."""


class PolicyLossRegistry(BaseFunctionRegistry):
    """Hold the policy losses, see `jaxrl.losses` for the contract."""

    _function_type = "policy loss"
    _builtin = LOSSES
    _batch_statistics = BATCH_STATISTICS

    @classmethod
    def register(cls, name: str | StrEnum, func: Function, batch_statistics: bool = False) -> None:
        """Add a policy loss, see `BaseFunctionRegistry.register`.

        Args:
            batch_statistics: the loss of a token depends on other rows of the minibatch (a
                quantile, a top-k, a mean over rows): it must be evaluated on the whole minibatch.
        """
        cls._register(plain_name(name), Entry(func, batch_statistics))

    @classmethod
    def _check_signature(cls, label: str, func: Function) -> None:
        check_loss_signature(label, func)

    @classmethod
    def has_batch_statistics(cls, name: str | StrEnum) -> bool:
        """Return whether a loss, by name or path, was registered with `batch_statistics=True`."""
        func = cls.resolve(name)
        return any(e.batch_statistics and e.func is func for e in cls._entries.values())


class AdvantageEstimatorRegistry(BaseFunctionRegistry):
    """Hold the advantage estimators, see `jaxrl.advantages` for the contract."""

    _function_type = "advantage estimator"
    _builtin = ESTIMATORS

    @classmethod
    def _check_signature(cls, label: str, func: Function) -> None:
        check_estimator_signature(label, func)


_REGISTRIES = (PolicyLossRegistry, AdvantageEstimatorRegistry)


def bind_estimator(algorithm: Any) -> Function:
    """Return the configured estimator, a function of keywords alone.

    It is `(*, token_level_rewards, response_mask, index, loss_mask, ...)`: by keyword, because an
    estimator may take everything as `**kwargs`; the values of a critic are one more, None where
    there is none. It is offered the settings of the config under SkyRL's names, and its
    hyperparameters from `algorithm.advantage_kwargs`.

    Raises:
        ValueError: it requires a parameter that it will not get. When it is called: an array is not
            of its shape or kind; it raised, or returned something of another form. The message
            names the function and the part.
    """
    name, kwargs = algorithm.advantage_estimator, algorithm.advantage_kwargs
    func, label = AdvantageEstimatorRegistry.resolve(name), f"advantage estimator '{name}'"
    check_estimator_signature(label, func)
    check_hyperparameters(func, kwargs, "trainer.algorithm.advantage_kwargs", ESTIMATOR_DATA)
    settings = {
        "grpo_norm_by_std": algorithm.grpo_norm_by_std,
        "gamma": algorithm.gamma,
        "lambd": algorithm.lambd,
        "config": algorithm,
        **kwargs,
    }
    offered: dict[str, Any] = {**dict.fromkeys(ESTIMATOR_DATA), **settings}
    check_parameters(label, func, (), accepted_keywords(func, offered))
    no_values = {"values": None}  # without a critic

    def estimate(**arrays: Array) -> tuple[FloatBT, FloatBT]:
        check_arrays(label, arrays)
        with raised_by(label):
            result = func(**accepted_keywords(func, no_values | arrays | settings))
        return advantages_and_returns(label, result, arrays["token_level_rewards"].shape)

    return estimate


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


def accepted_keywords(func: Function, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of `offered` that the signature of `func` names; all with `**kwargs`."""
    parameters = inspect.signature(func).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(offered)
    names = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    return {k: v for k, v in offered.items() if k in names}


def check_hyperparameters(
    func: Function, settings: Mapping[str, Any], field: str, supplied: Collection[str] = ()
) -> None:
    """Check a `*_kwargs` config field against the keyword-only parameters of `func`.

    A function with `**kwargs` takes any name; with `**_` it says that it ignores what it gets.

    Args:
        supplied: names that the trainer gives; a setting must not take their place.

    Raises:
        ValueError: a name of `supplied`, or one that `func` does not take as a keyword-only
            parameter.
    """
    label, parameters = getattr(func, "__name__", repr(func)), inspect.signature(func).parameters
    kinds = [p.kind for name, p in parameters.items() if not name.startswith("_")]
    keyword_only = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    hyperparameters = [name for name in keyword_only if name not in supplied]
    for name, value in settings.items():
        if name in supplied:
            raise ValueError(f"{field}.{name}={value!r}: the trainer supplies '{name}'; remove it")
        if name not in hyperparameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ValueError(
                f"{field}.{name}={value!r}: '{label}' takes no such parameter, only "
                f"{hyperparameters}"
            )
