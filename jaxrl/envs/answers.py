"""Finding the answer in a response, and telling harmless answers from code."""

import ast
import re
from decimal import Decimal, InvalidOperation

from jaxrl.envs.tags import last_tagged

# A minus directly after a digit, a letter or a bracket is an operator ("9-4"), not a sign.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?")

_LITERAL_NODES = (
    *(ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load),
    *(ast.UnaryOp, ast.USub),
)
_ALGEBRA_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow),
    *(ast.UnaryOp, ast.USub, ast.UAdd),
)
_FUNCTIONS = frozenset(
    {
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
        *("exp", "log", "ln", "sqrt", "Abs", "Rational"),
    }
)
_MAX_EXPONENT = 1000
_MAX_POWER_DEPTH = 2


def last_number(text: str) -> str | None:
    """Return the last number in a text without its commas, or None.

    A full stop at the end of the sentence is not part of it: "It costs $1,250." gives "1250".
    """
    # Models also write the minus sign as U+2212.
    found = _NUMBER.findall(text.replace("\u2212", "-"))
    return found[-1].replace(",", "") if found else None


def tagged_answer(text: str) -> str:
    """Return what stands in the last `<answer>..</answer>`, or else all text after `</think>`."""
    found = last_tagged(text, "answer")
    return (text.rpartition("</think>")[2] if found is None else found).strip()


def same_answer(answer: str, ground_truth: str) -> bool:
    """Return whether two answers are one number, or else one text but for case and blanks."""
    plain = ["".join(text.replace(",", "").split()).casefold() for text in (answer, ground_truth)]
    try:
        return Decimal(plain[0]) == Decimal(plain[1])
    except InvalidOperation:  # not a number, or a signalling NaN
        return plain[0] == plain[1]


def is_literal(text: str) -> bool:
    """Return whether `eval(text)` can do nothing: it is data, or it is not Python at all."""
    tree = _parse(text)
    return tree is None or all(isinstance(node, _LITERAL_NODES) for node in ast.walk(tree))


def is_algebra(text: str) -> bool:
    """Return whether a text is arithmetic on numbers, names and elementary functions.

    It may have small powers only.

    `sympy.parse_expr` evaluates its argument as Python, with the built-in functions in reach. This
    also turns away power towers, which would keep it busy for ever.
    """
    tree = _parse(text)
    return (
        tree is not None
        and all(_is_algebra_node(node) for node in ast.walk(tree))
        and _power_depth(tree) <= _MAX_POWER_DEPTH
    )


def _parse(text: str) -> ast.Expression | None:
    try:
        # eval ignores leading blanks, ast.parse does not.
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return None


def _is_algebra_node(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else None
        return name in _FUNCTIONS and not node.keywords
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        numbers = [n.value for n in ast.walk(node.right) if isinstance(n, ast.Constant)]
        is_small = all(isinstance(n, int | float) and n <= _MAX_EXPONENT for n in numbers)
        return is_small and _power_depth(node.right) == 0
    return isinstance(node, _ALGEBRA_NODES)


def _power_depth(node: ast.AST) -> int:
    deepest = max((_power_depth(child) for child in ast.iter_child_nodes(node)), default=0)
    return deepest + (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow))
