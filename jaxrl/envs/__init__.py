"""The environments: tables of names, and making one for a prompt.

An environment that was written for skyrl-gym needs another import line alone: its base classes are
here under skyrl-gym's names, and `register` takes skyrl-gym's keywords.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.envs.protocol import Env, EnvSettings, StepOutput
from jaxrl.functions import beside_a_recipe, import_named, with_colon
from jaxrl.types import Message

__all__ = [
    "ADAPTERS",
    "BUILT_IN",
    "ENVS",
    "INSTANT",
    "NEED_TRUTH",
    "BaseTextEnv",
    "BaseTextEnvStepOutput",
    "ConversationType",
    "Env",
    "StepOutput",
    "code_of",
    "construct",
    "is_ours",
    "load",
    "make",
    "register",
]

# skyrl-gym's names of the same
BaseTextEnv, BaseTextEnvStepOutput, ConversationType = Env, StepOutput, list[Message]

# name -> "module:Class", imported when first used
ENVS: dict[str, str | Callable[..., Env]] = {
    "addition": "jaxrl.envs.toys.addition:AdditionEnv",
    "aime": "jaxrl.envs.tasks.aime:AIMEEnv",
    "calculator": "jaxrl.envs.toys.calculator:CalculatorEnv",
    "countdown": "jaxrl.envs.toys.countdown:CountdownEnv",
    "gsm8k": "jaxrl.envs.tasks.gsm8k:Gsm8kEnv",
    "gsm8k_multi_turn": "jaxrl.envs.tasks.gsm8k_multi_turn:Gsm8kMultiTurnEnv",
    "guess_number": "jaxrl.envs.toys.guess_number:GuessNumberEnv",
    "lcb": "jaxrl.envs.sandbox.lcb:LCBEnv",
    "llm_as_a_judge": "jaxrl.envs.tasks.llm_as_a_judge:LLMJudgeEnv",
    "math": "jaxrl.envs.tasks.mathematics:MathEnv",
    "multiply": "jaxrl.envs.toys.multiply:MultiplyEnv",
    "python_code": "jaxrl.envs.sandbox.python_code:PythonCodeEnv",
    "search": "jaxrl.envs.tasks.search:SearchEnv",
    "single_turn": "jaxrl.envs.single_turn:SingleTurnEnv",
    "sort_digits": "jaxrl.envs.toys.sort_digits:SortDigitsEnv",
    "text2sql": "jaxrl.envs.tasks.text2sql:Text2SQLEnv",
    "text_adventure": "jaxrl.envs.toys.text_adventure:TextAdventureEnv",
}
BUILT_IN = frozenset(ENVS)
# Those of them that judge by `reward_spec["ground_truth"]` of the row; a row needs one.
NEED_TRUTH = BUILT_IN - {"single_turn", "text_adventure"}
# Those of them whose calls take microseconds: a thread for each would cost more than the call.
INSTANT = frozenset(
    (
        *("addition", "calculator", "countdown", "guess_number", "multiply", "single_turn"),
        *("sort_digits", "text_adventure"),
    )
)
# Environments of other libraries, written with their name there: "reasoning_gym:chain_sum".
# name -> a subclass of `adapter.Adapter`, and an example of what follows the colon
ADAPTERS: dict[str, tuple[str, str]] = {
    "gymnasium": ("jaxrl.envs.adapters.gymnasium:GymnasiumEnv", "FrozenLake-v1"),
    "openenv": ("jaxrl.envs.adapters.openenv:OpenEnvEnv", "http://127.0.0.1:8000"),
    "reasoning_gym": ("jaxrl.envs.adapters.reasoning_gym:ReasoningGymEnv", "chain_sum"),
    "skyrl_gym": ("jaxrl.envs.adapters.skyrl_gym:SkyRLGymEnv", "gsm8k"),
    "verifiers": ("jaxrl.envs.adapters.verifiers:VerifiersEnv", "gsm8k"),
}


def make(
    env_class: str,
    extras: Mapping[str, Any] | None = None,
    env_config: Mapping[str, Any] | None = None,
) -> Env:
    """Return a fresh environment for one conversation.

    Args:
        env_class: a name of the table, `"<adapter>:<name>"`, or `"pkg.module:Class"`.
        extras: the columns of the prompt's row besides `prompt` and `env_class`.
        env_config: settings of the run; the environment can read them as keys and as attributes.

    Raises:
        ValueError: there is no such environment; names the nearest one and lists all.
        ImportError: the library of an adapter is not installed.
    """
    return construct(load(env_class), env_class, extras, env_config)


def construct(
    entry_point: Callable[..., Env],
    env_class: str,
    extras: Mapping[str, Any] | None,
    env_config: Mapping[str, Any] | None,
) -> Env:
    """Make a fresh environment of what `load` gave for the name, here or in another process."""
    adapter, _, name = env_class.partition(":")
    named = {"name": name} if adapter in ADAPTERS else {}
    given = {"env_config": EnvSettings(env_config or {}), "extras": extras, **named}
    try:
        return entry_point(**given)
    except TypeError as error:
        try:
            inspect.signature(entry_point).bind(**given)
        except TypeError:  # of the call, not of what is in the function
            raise ValueError(
                f"environment {env_class!r}: {error}; write "
                "`def __init__(self, env_config=None, extras=None)`, and in it first "
                "`super().__init__(env_config, extras)`"
            ) from error
        raise


def load(env_class: str) -> Any:
    """Return the class behind a name, imported if need be; it takes what `make` takes."""
    first, _, name = env_class.partition(":")
    if first in ADAPTERS:
        adapter, example = ADAPTERS[first]
        if not name:
            raise ValueError(f"environment {first!r} needs a name, as in '{first}:{example}'")
        return _import(adapter).of(name)
    entry_point = ENVS.get(env_class)
    if entry_point is None:
        if ":" not in env_class:
            if hint := with_colon(env_class):
                raise ValueError(f"unknown environment {env_class!r}; {hint}")
            near = difflib.get_close_matches(env_class, ENVS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            adapters = ", ".join(f"'{name}:...'" for name in ADAPTERS)
            raise ValueError(
                f"unknown environment {env_class!r}; {hint}known are {', '.join(sorted(ENVS))}, "
                f"{adapters} and 'pkg.module:Class'"
            )
        entry_point = env_class
    return _import(entry_point) if isinstance(entry_point, str) else entry_point


def code_of(env_class: str, extras: Mapping[str, Any], named: str) -> dict[str, Any]:
    """Return the columns of a row that choose what is imported, run or connected to.

    A name of the table is none: what stands there is jaxrl's, or was registered.

    Args:
        env_class: of the row; its column of that name, where this is returned.
        extras: its other columns.
        named: environment that the config itself names, which is no choice of the row's.
    """
    if env_class in ENVS:
        return {}
    first, _, name = env_class.partition(":")
    if first in ADAPTERS:
        found = _import(ADAPTERS[first][0]).code_of(name, extras)
    else:
        found = {"env_class": env_class} if ":" in env_class else {}
    return {c: value for c, value in found.items() if (c, value) != ("env_class", named)}


def is_ours(env_class: str) -> bool:
    """Return whether an environment is one of the library's: built in, or behind an adapter."""
    return env_class in BUILT_IN or env_class.partition(":")[0] in ADAPTERS


def register(id: str, entry_point: str | Callable[..., Env]) -> None:
    """Add an environment to the table; an edited cell of a notebook replaces its own.

    Args:
        id: what `env_class` says; the parameters have skyrl-gym's names.
        entry_point: a class, or `"pkg.module:Class"`, which is imported when first used.

    Raises:
        ValueError: the name is taken by something else, or contains a colon.
    """
    if ":" in id or not id:
        raise ValueError(f"the name of an environment is a word without a colon, got {id!r}")
    if id in ADAPTERS:
        raise ValueError(f"environment {id!r} is already registered, for {id}'s environments")
    from jaxrl.registry.pickling import is_edited_cell  # JAX comes along

    if is_edited_cell(ENVS.get(id), entry_point):
        ENVS[id] = entry_point
    if ENVS.setdefault(id, entry_point) != entry_point:
        fix = ""
        if id in BUILT_IN:
            fix = (
                ", which is built in: register yours under another name, or leave `register` out "
                "and write env_class='pkg.module:Class'"
            )
        raise ValueError(f"environment {id!r} is already registered as {ENVS[id]!r}{fix}")


def _import(entry_point: str) -> Any:
    module_name, _, class_name = entry_point.partition(":")
    try:
        module = import_named(module_name)
    except ModuleNotFoundError as error:
        # A module that exists but lacks one of its own imports is a different mistake.
        if str(error.name).partition(".")[0] == "skyrl_gym":
            raise ValueError(
                f"environment {entry_point!r} imports skyrl_gym, which is not installed: pip "
                "install 'jaxrl[envs]', or write `from jaxrl.envs import BaseTextEnv, "
                "BaseTextEnvStepOutput` in its place"
            ) from error
        if not module_name.startswith(error.name or "\0"):
            raise
        raise ValueError(
            f"environment {entry_point!r}: no module {error.name!r}{beside_a_recipe(module_name)}"
        ) from error
    found = getattr(module, class_name, None)
    if not callable(getattr(found, "step", None)):
        near = difflib.get_close_matches(class_name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"environment {entry_point!r}: {class_name!r} in module {module_name!r} is not a class "
            f"with a method step{hint}"
        )
    return found
