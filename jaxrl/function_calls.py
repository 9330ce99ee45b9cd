"""Functions that a config names together with arguments: "my_pkg.my_module:rows(size=3)"."""

import ast
import functools
import inspect
from typing import Any

from jaxrl.user_functions import Function, import_function


def parse_call(label: str, call: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of "rows" or "rows(size=3, seed=1)"; nothing is evaluated.

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
    """ "rows" of "my_pkg.my_module:rows(size=3)"."""
    return path.partition("(")[0].rpartition(":")[2].strip()


def import_call(path: str, kind: str) -> Function:
    """The function behind a path, with the keyword arguments that are written after it.

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
