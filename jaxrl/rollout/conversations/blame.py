"""Where in the user's files something went wrong."""

import functools
import inspect
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxrl
from jaxrl import functions

_OURS = str(Path(jaxrl.__file__).parent) + os.sep


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
    return lines[-1] if lines else _place_of_function(asked)


def _place_of_function(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    if code is None or not _is_users(code.co_filename):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"


def _is_users(file: str) -> bool:
    return not file.startswith((*functions.INSTALLED, _OURS, "<"))
