"""Tables of policy losses and advantage estimators: name -> pure function.

    @register_policy_loss("reinforce")
    def reinforce(log_probs, old_log_probs, advantages, config, loss_mask=None, **kwargs):
        return -log_probs * advantages, {}

A config names a function by its registered name or as "my_pkg.my_module:my_function". Tables hold
the built-ins of `jaxrl.losses` and `jaxrl.advantages` from the start; user functions travel to
other processes as one pickled dict (`snapshot`, `load_snapshot`), by value, so that they need not
be installed there.
"""

import difflib
import functools
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, ClassVar

import cloudpickle

from jaxrl.advantages import ESTIMATORS
from jaxrl.losses import BATCH_STATISTICS, LOSSES

Function = Callable[..., Any]


class PolicyLossType(StrEnum):
    """Names of the built-in policy losses."""

    REGULAR = "regular"
    DUAL_CLIP = "dual_clip"
    GSPO = "gspo"
    SAPO = "sapo"
    CISPO = "cispo"
    ROLLOUT_IS = "rollout_is"
    DPPO = "dppo"
    CLIP_COV = "clip_cov"
    KL_COV = "kl_cov"
    GMPO = "gmpo"
    IMPORTANCE_SAMPLING = "importance_sampling"
    CROSS_ENTROPY = "cross_entropy"


class AdvantageEstimator(StrEnum):
    """Names of the built-in advantage estimators."""

    GRPO = "grpo"
    GRPO_TOKEN = "grpo_token"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    MAXRL = "maxrl"
    REINFORCE_PLUS_PLUS = "reinforce++"
    GAE = "gae"


class BaseFunctionRegistry:
    """One table of functions; subclasses name the kind and bring the built-ins."""

    _function_type: ClassVar[str] = "Function"
    _builtin: ClassVar[Mapping[str, Function]] = {}
    _functions: ClassVar[dict[str, Function]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._functions = dict(cls._builtin)

    @classmethod
    def register(cls, name: str | StrEnum, func: Function) -> None:
        """Add a function.

        Raises:
            ValueError: the name is taken, or `func` is not callable.
        """
        name = _plain(name)
        if not callable(func):
            raise ValueError(f"{cls._function_type} '{name}' must be a function, got {func!r}")
        if name in cls._functions:
            raise ValueError(f"{cls._function_type} '{name}' already registered")
        cls._functions[name] = func

    @classmethod
    def get(cls, name: str | StrEnum) -> Function:
        """The function registered under `name`.

        Raises:
            ValueError: unknown name; the message lists the known ones.
        """
        name = _plain(name)
        if name not in cls._functions:
            near = difflib.get_close_matches(name, cls._functions, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            kind, known = cls._function_type.lower(), list(cls._functions)
            raise ValueError(f"Unknown {kind} '{name}'. Available: {known}.{hint}")
        return cls._functions[name]

    @classmethod
    def resolve(cls, name: str | StrEnum) -> Function:
        """The function of a config string: a registered name, or "my_pkg.my_module:my_function"."""
        name = _plain(name)
        if name in cls._functions or ":" not in name:
            return cls.get(name)
        return import_function(name, cls._function_type)

    @classmethod
    def list_available(cls) -> list[str]:
        """Names of all registered functions."""
        return list(cls._functions)

    @classmethod
    def unregister(cls, name: str | StrEnum) -> None:
        """Remove a function.

        Raises:
            ValueError: the name is not registered.
        """
        name = _plain(name)
        if name not in cls._functions:
            raise ValueError(f"{cls._function_type} '{name}' not registered")
        del cls._functions[name]

    @classmethod
    def reset(cls) -> None:
        """Empty the table, built-ins included."""
        cls._functions.clear()

    @classmethod
    def repopulate_registry(cls) -> None:
        """Add the built-ins that are missing; what is registered stays."""
        cls._functions.update({k: v for k, v in cls._builtin.items() if k not in cls._functions})

    @classmethod
    def repopulate(cls) -> None:
        """Back to the built-ins alone."""
        cls.reset()
        cls.repopulate_registry()

    @classmethod
    def user_functions(cls) -> dict[str, Function]:
        """What was registered beyond, or over, the built-ins."""
        return {k: f for k, f in cls._functions.items() if cls._builtin.get(k) is not f}


class PolicyLossRegistry(BaseFunctionRegistry):
    """Policy losses, see `jaxrl.losses` for the contract."""

    _function_type = "policy loss"
    _builtin = LOSSES

    @classmethod
    def has_batch_statistics(cls, name: str | StrEnum) -> bool:
        """Whether a loss looks at the whole minibatch."""
        return _plain(name) in BATCH_STATISTICS


class AdvantageEstimatorRegistry(BaseFunctionRegistry):
    """Advantage estimators, see `jaxrl.advantages` for the contract."""

    _function_type = "advantage estimator"
    _builtin = ESTIMATORS


_REGISTRIES = {"policy_loss": PolicyLossRegistry, "advantage_estimator": AdvantageEstimatorRegistry}


def bind_estimator(algorithm: Any) -> Function:
    """The configured estimator as `(*, token_level_rewards, response_mask, index)`.

    By keyword, because an estimator may take everything as `**kwargs`; it is offered the settings
    of the config under SkyRL's names.
    """
    func = AdvantageEstimatorRegistry.resolve(algorithm.advantage_estimator)
    offered = {
        "grpo_norm_by_std": algorithm.grpo_norm_by_std,
        "gamma": algorithm.gamma,
        "lambd": algorithm.lambd,
        "values": None,
        "config": algorithm,
    }
    return functools.partial(func, **accepted_keywords(func, offered))


def source_hashes(algorithm: Any) -> dict[str, str]:
    """SHA-256 of the source of each configured function that is not a built-in.

    Of the function itself, not of what it calls; "unknown" where Python has no source.
    """
    chosen = (
        (PolicyLossRegistry, algorithm.policy_loss_type),
        (AdvantageEstimatorRegistry, algorithm.advantage_estimator),
    )
    hashes = {}
    for registry, name in chosen:
        func = registry.resolve(name)
        if registry._builtin.get(_plain(name)) is not func:
            hashes[f"{registry._function_type} '{_plain(name)}'"] = _source_hash(func)
    return hashes


def register_policy_loss(name: str | StrEnum) -> Callable[[Function], Function]:
    """Decorator: `@register_policy_loss("my_loss")`. Returns the function unchanged."""
    return _decorator(PolicyLossRegistry, name)


def register_advantage_estimator(name: str | StrEnum) -> Callable[[Function], Function]:
    """Decorator.

    `@register_advantage_estimator("my_estimator")`. Returns the function unchanged.
    """
    return _decorator(AdvantageEstimatorRegistry, name)


def snapshot() -> bytes:
    """All user functions of all registries as one pickle, their modules included by value.

    Raises:
        ValueError: a function cannot be pickled; the message names it and what it captured.
    """
    tables = {kind: registry.user_functions() for kind, registry in _REGISTRIES.items()}
    for kind, table in tables.items():
        for name, func in table.items():
            _pickle_by_value(func, f"{kind} '{name}'")
    return _pickle_by_value(tables, "registry")


def load_snapshot(data: bytes) -> None:
    """Register the user functions of a `snapshot`.

    Names that are already here keep their function.
    """
    for kind, table in cloudpickle.loads(data).items():
        registry = _REGISTRIES[kind]
        registry._functions.update({k: f for k, f in table.items() if k not in registry._functions})


def import_function(path: str, kind: str = "function") -> Function:
    """The object behind "my_pkg.my_module:my_function".

    Raises:
        ValueError: the module cannot be imported or has no such function.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{kind} '{path}': cannot import module '{module_name}' ({error}). Expected "
            "'my_pkg.my_module:my_function', importable from the working directory or installed"
        ) from error
    func = getattr(module, attribute, None)
    if not callable(func):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ValueError(
            f"{kind} '{path}': '{module_name}' has no function '{attribute}'; it has {public}"
        )
    return func


def accepted_keywords(func: Function, offered: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `offered` that the signature of `func` names; all of it with `**kwargs`."""
    parameters = inspect.signature(func).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(offered)
    names = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    return {k: v for k, v in offered.items() if k in names}


def check_hyperparameters(func: Function, given: Mapping[str, Any], field: str) -> None:
    """Check a `*_kwargs` config field against the keyword-only parameters of `func`.

    Raises:
        ValueError: a name that `func` does not take as a keyword-only parameter.
    """
    parameters = inspect.signature(func).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for name, value in given.items():
        if name not in own:
            label = getattr(func, "__name__", repr(func))
            raise ValueError(
                f"{field}.{name}={value!r}: '{label}' takes no such parameter, only {own}"
            )


def _source_hash(func: Function) -> str:
    try:
        source = inspect.getsource(_innermost(func))
    except (OSError, TypeError):  # typed at a prompt; a callable object
        return "unknown"
    return hashlib.sha256(source.encode()).hexdigest()


def _plain(name: str | StrEnum) -> str:
    return name.value if isinstance(name, StrEnum) else name


def _decorator(registry: type[BaseFunctionRegistry], name: str | StrEnum) -> Callable:
    def decorate(func: Function) -> Function:
        registry.register(name, func)
        return func

    return decorate


def _pickle_by_value(obj: Any, label: str) -> bytes:
    """cloudpickle with the modules of user functions taken along instead of referred to."""
    funcs = [obj] if callable(obj) else [f for table in obj.values() for f in table.values()]
    names = {_innermost(f).__module__ for f in funcs if hasattr(_innermost(f), "__module__")}
    modules = [
        sys.modules[n] for n in names if n != "__main__" and not n.startswith(("jaxrl", "builtins"))
    ]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(obj)
    except Exception as error:
        inner = _innermost(obj)
        captured = (
            sorted(inspect.getclosurevars(inner).nonlocals) if inspect.isfunction(inner) else []
        )
        raise ValueError(f"{label} cannot be pickled ({error}); it captures {captured}") from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _innermost(func: Any) -> Any:
    """What a partial or a decorator such as jit wraps."""
    func = inspect.unwrap(func)
    return _innermost(func.func) if isinstance(func, functools.partial) else func
