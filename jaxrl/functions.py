"""Functions that a config names: "my_pkg.my_module:rows", with arguments "...:rows(size=3)"."""

import ast
import functools
import importlib
import inspect
import site
import sysconfig
from collections.abc import Callable
from types import ModuleType
from typing import Any

Function = Callable[..., Any]

# What every process of a run has: the standard library and installed packages.
INSTALLED = tuple(
    {
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)

# Modules of earlier versions, which configs and checkpoints name: where they are now.
MOVED = {
    f"jaxrl.envs.{name}": f"jaxrl.envs.{room}.{name}"
    for room, names in {
        "tasks": "aime gsm8k gsm8k_multi_turn llm_as_a_judge mathematics search text2sql",
        "toys": "addition calculator countdown guess_number multiply sort_digits text_adventure",
        "adapters": "gymnasium openenv reasoning_gym skyrl_gym verifiers",
        "sandbox": "lcb python_code",
    }.items()
    for name in names.split()
} | {
    "jaxrl.serving.agent_generator": "jaxrl.rollout.server.agent_generator",
    "jaxrl.watching.callbacks": "jaxrl.records.callbacks",
}


def present_path(path: str) -> str:
    """Return "my_pkg.my_module:anything" with the module where this version has it."""
    module, colon, rest = path.partition(":")
    return f"{MOVED.get(module, module)}{colon}{rest}"


def import_named(module: str) -> ModuleType:
    """Import a module that a config or a checkpoint names, wherever this version has it."""
    return importlib.import_module(present_path(module))


def import_function(path: str, kind: str = "function") -> Function:
    """Return the object behind "my_pkg.my_module:my_function".

    Raises:
        ValueError: the module cannot be imported or has no such function.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = import_named(module_name)
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


def parse_call(label: str, call: str) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of "rows" or "rows(size=3, seed=1)"; nothing is evaluated.

    Args:
        label: how an error calls it.

    Raises:
        ValueError: it is not one call whose arguments are literals, written name=value.
    """
    try:
        node = ast.parse(call.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{label} is not a valid call: {error.msg}") from error
    if isinstance(node, ast.Name):
        return node.id, {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"{label} must be one call 'pkg.module:function(...)'")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError(f"{label}: write the arguments as name=value")
    arguments = {}
    for keyword in node.keywords:
        try:
            arguments[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError) as error:  # TypeError: {[]: 1}
            value = ast.unparse(keyword.value)
            raise ValueError(
                f"{label}: {keyword.arg}={value} is not a literal "
                "(number, string, bool, None, list, tuple or dict)"
            ) from error
    return node.func.id, arguments


def called_name(path: str) -> str:
    """Return the function's name in a path: "rows" of "my_pkg.my_module:rows(size=3)"."""
    return path.partition("(")[0].rpartition(":")[2].strip()


def import_call(path: str, kind: str) -> Function:
    """Return the function behind a path, with the keyword arguments that are written after it.

    Args:
        path: "my_pkg.my_module:my_reward" or "my_pkg.my_module:my_reward(weight=0.5)".
        kind: how an error calls it.

    Raises:
        ValueError: there is no such function, it has no such parameter, or an argument is not a
            literal.
    """
    module, _, call = path.partition(":")
    if "(" not in call:
        return import_function(path, kind)
    name, arguments = parse_call(f"{kind} '{path}'", call)
    func = import_function(f"{module}:{name}", kind)
    try:
        inspect.signature(func).bind_partial(**arguments)
    except TypeError as error:
        raise ValueError(
            f"{kind} '{path}': {error}; the signature is {name}{inspect.signature(func)}"
        ) from error
    return functools.partial(func, **arguments)


def origin(func: Function) -> str:
    """Return where a function was written: "my_pkg.my_module:my_loss"."""
    return f"{getattr(innermost(func), '__module__', None)}:{qualname(func)}"


def qualname(func: Function) -> str:
    inner = innermost(func)
    return getattr(inner, "__qualname__", type(inner).__qualname__)


def innermost(func: Any) -> Any:
    """Return what a partial or a decorator such as jit wraps."""
    func = inspect.unwrap(func)
    return innermost(func.func) if isinstance(func, functools.partial) else func
