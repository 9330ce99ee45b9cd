"""Functions that a config names: "my_pkg.my_module:rows", with arguments "...:rows(size=3)"."""

import ast
import difflib
import functools
import importlib
import inspect
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
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

_OURS = str(Path(__file__).parent) + os.sep

# Where functions of a recipe are, while it is loaded: the file's name follows.
RECIPE = "jaxrl_recipe_"

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
    path = present_path(module)
    return sys.modules.get(path) or importlib.import_module(path)


def with_colon(path: str) -> str:
    """Return a hint for "my_module.my_function", whose last dot should be a colon; else ""."""
    name, bracket, arguments = path.partition("(")
    module, dot, attribute = name.rpartition(".")
    if not dot or ":" in name or "/" in name:
        return ""
    return f"did you mean '{module}:{attribute}{bracket}{arguments}'?"


def import_function(path: str, kind: str = "function") -> Function:
    """Return the object behind "my_pkg.my_module:my_function".

    Raises:
        ValueError: the module cannot be imported or has no such function.
    """
    module_name, _, attribute = path.partition(":")
    if hint := with_colon(path):
        raise ValueError(f"{kind} '{path}': a colon stands before the name; {hint}")
    try:
        module = import_named(module_name)
    except ImportError as error:
        raise ValueError(
            f"{kind} '{path}': cannot import module '{module_name}' ({error}). Expected "
            "'my_pkg.my_module:my_function', importable from the working directory or installed"
            f"{beside_a_recipe(module_name)}{_of_a_program(module_name)}"
        ) from error
    func = getattr(module, attribute, None)
    if not callable(func):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        own = [n for n in public if getattr(vars(module)[n], "__module__", "") == module.__name__]
        near = difflib.get_close_matches(attribute, public, n=1)
        hint = f". Did you mean '{near[0]}'?" if near else ""
        raise ValueError(
            f"{kind} '{path}': '{module_name}' has no function '{attribute}'; it has "
            f"{own or public}{hint}{_of_a_program(module_name)}"
        )
    return func


def beside_a_recipe(module: str) -> str:
    """Return what to do about a module that lies beside a recipe of this process, else ""."""
    files = [vars(m).get("__file__") for n, m in sys.modules.items() if n.startswith(RECIPE)]
    for folder in {Path(str(file)).resolve().parent for file in files}:
        if (folder / f"{module.replace('.', '/')}.py").is_file() and folder != Path.cwd():
            return f". It lies in {folder}: start in that folder, or PYTHONPATH={folder}"
    return ""


def is_of_program(module: str) -> bool:
    """Return whether a module is a script, a notebook or a recipe: no other process imports it."""
    return module == "__main__" or module.startswith(RECIPE)


def _of_a_program(module: str) -> str:
    """Return what to do about a function of a script, notebook or recipe, where it is not."""
    if not is_of_program(module):
        return ""
    return (
        ". What a script, a notebook or a recipe defines is found while that runs, not by other "
        "commands: put it into a file of its own, and import it from there"
    )


def path_of(obj: Any) -> str:
    """Return the path under which `import_function` finds a function or class.

    It is "my_pkg.my_module:my_function"; "__main__:my_function" of a script or a notebook.

    Raises:
        ValueError: no name at the top of a module leads to it: it was made in a call, or another
            function has its name by now.
    """
    if not callable(obj):
        kind = type(obj).__qualname__
        raise ValueError(f"{obj!r:.60} is of type {kind}; give a name, or a function or class")
    module = getattr(innermost(obj), "__module__", None)  # a partial has none of its own
    name = getattr(obj, "__qualname__", None)
    # A partial or another object has no name of its own: whatever module of the user's has it.
    others = [] if name else _users_modules()
    for place in dict.fromkeys((module, "__main__", *others)):
        names = dict(vars(sys.modules[place])) if place in sys.modules else {}
        for found in dict.fromkeys((name or "", *names)):
            own = found == name or not found.startswith("_")  # notebooks keep results in _, _1
            if found in names and names[found] is obj and own:
                return f"{place}:{found}"
    shown = f"{module}:{name}" if name else f"{obj!r:.60}"
    if module in sys.modules and hasattr(sys.modules[module], str(name)):
        raise ValueError(f"{shown} is an earlier one: another has its name by now; give that")
    raise ValueError(
        f"{shown} has no name by which another start of the run could find it: define it at the "
        "top of a script, a module or a notebook's cell (def my_function...), not within a call"
    )


def _users_modules() -> list[str]:
    """Return the names of the imported modules that are files of the user's."""
    modules = [(name, module) for name, module in sys.modules.items() if module is not None]
    files = [(name, vars(module).get("__file__")) for name, module in modules]
    return [name for name, file in files if isinstance(file, str) and _is_users(file)]


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


def keyword_defaults(func: Function) -> dict[str, Any]:
    """Return the hyperparameters of a loss or an estimator: keyword-only, with their defaults."""
    parameters = inspect.signature(func).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
    }


def origin(func: Function) -> str:
    """Return where a function was written: "my_pkg.my_module:my_loss"."""
    return f"{getattr(innermost(func), '__module__', None)}:{qualname(func)}"


def qualname(func: Function) -> str:
    """Return a function's name in its module, with the classes and functions around it."""
    inner = innermost(func)
    return getattr(inner, "__qualname__", type(inner).__qualname__)


def innermost(func: Any) -> Any:
    """Return what a partial or a decorator such as jit wraps."""
    func = inspect.unwrap(func)
    return innermost(func.func) if isinstance(func, functools.partial) else func


# ---- where in the user's files something went wrong


def place_of(error: BaseException, asked: Callable[..., Any] | None = None) -> str:
    """Return `file:line` of an error, or "" where no file of the user's is involved.

    Args:
        error: the innermost line of the user's that it went through; an attribute `place` holds
            instead, of an error that was raised in another process.
        asked: where no line was, this function is to blame: for what it returned.
    """
    if place := getattr(error, "place", ""):
        return place
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{f.filename}:{f.lineno}" for f in frames if _is_users(f.filename)]
    return lines[-1] if lines else place_of_function(asked)


def place_of_function(function: Any) -> str:
    """Return `file:line` where a function was written; "": in no file of the user's."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    if code is None or not _is_users(code.co_filename):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"


def says_all(error: BaseException) -> bool:
    """Return whether jaxrl itself raised an error, and no line of the user's led there.

    Its text then says what is wrong; frames and earlier errors add nothing to it.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(files) and files[-1].startswith(_OURS) and not any(map(_is_users, files))


def _is_users(file: str) -> bool:
    return not file.startswith((*INSTALLED, _OURS, "<"))
