"""Draw the places of one-line faults: an operator, a constant or a condition that is another."""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

SWAPPED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.And: "or",
    ast.Or: "and",
}
# What only words, types or processes of a failing run are made of is no fault of a number.
NO_FAULTS = ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.pattern


@dataclass(frozen=True)
class Fault:
    """Hold one fault: a stretch of one line, what stands there, and what would stand there."""

    path: str  # from the root of the repository
    line: int
    begin: int  # column of the expression
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: `{self.before}` -> `{self.after}`"

    def planted(self, source: str, text: str | None = None) -> str:
        """Return the file's source with `text`, or else the fault, in place of the expression."""
        lines = source.splitlines(keepends=True)
        raw = lines[self.line - 1].encode()
        assert raw[self.begin : self.end].decode() == self.before, self
        new = (self.after if text is None else text).encode()
        lines[self.line - 1] = (raw[: self.begin] + new + raw[self.end :]).decode()
        return "".join(lines)


def room(path: str) -> str:
    """Return the room of a file of the package; those beside the rooms are one of their own."""
    parts = Path(path).parts
    return parts[1] if len(parts) > 2 else "."


def draw(seed: int, count: int, rooms: tuple[str, ...] = ()) -> list[Fault]:
    """Draw faults with a fixed seed, as many of each room: a line at random of a file at random.

    Args:
        rooms: names of rooms, or files from jaxrl/, which then count as rooms; () = all rooms.
    """
    by_room: dict[str, list[str]] = {}
    for file in sorted((ROOT / "jaxrl").rglob("*.py")):
        path = str(file.relative_to(ROOT))
        names = room(path), path.removeprefix("jaxrl/")
        if not path.endswith("_pb2.py") and (not rooms or set(names) & set(rooms)):
            by_room.setdefault(names[names[1] in rooms], []).append(path)
    chance = random.Random(seed)
    drawn: list[Fault] = []
    while len(drawn) < count:
        for paths in by_room.values():
            possible: list[Fault] = []
            while not possible:
                possible = list(faults_of(chance.choice(paths)))
            fault = chance.choice(possible)
            if fault not in drawn and len(drawn) < count:
                drawn.append(fault)
    return drawn


def faults_of(path: str) -> Iterator[Fault]:
    """Yield all faults of this kind that a file could have, inside its functions."""
    source = (ROOT / path).read_text()
    lines = source.splitlines()
    for function in _functions(ast.parse(source)):
        for node in _expressions(function.body):
            if node.lineno != node.end_lineno or node.end_col_offset is None:
                continue
            begin, end = node.col_offset, node.end_col_offset
            before = lines[node.lineno - 1].encode()[begin:end].decode()
            after = _faulty(node)
            if after is not None and after != before:
                yield Fault(path, node.lineno, begin, end, before, after)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the outermost functions and methods."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node)


def _expressions(body: list) -> Iterator[ast.expr]:
    """Yield the expressions of statements, without those of messages, annotations and patterns."""
    for node in body:
        if isinstance(node, NO_FAULTS) or node is None:
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.expr):
            yield node
        children = []
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
                continue
            children += value if isinstance(value, list) else [value]
        yield from _expressions([child for child in children if isinstance(child, ast.AST)])


def _faulty(node: ast.expr) -> str | None:  # noqa: PLR0911  (one for each kind)
    """Return the expression with its operator swapped or its constant changed; None: no such."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return f"{ast.unparse(left)} {SWAPPED[type(op)]} {ast.unparse(right)}"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPPED:
            return f"({ast.unparse(left)}) {SWAPPED[type(op)]} ({ast.unparse(right)})"
        case ast.BoolOp(op=op, values=values):
            return f" {SWAPPED[type(op)]} ".join(f"({ast.unparse(value)})" for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"bool({ast.unparse(operand)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"{ast.unparse(orelse)} if {ast.unparse(test)} else {ast.unparse(body)}"
        case ast.Constant(value=bool() as value):
            return str(not value)
        case ast.Constant(value=int() | float() as value):
            return str(value + 1)
    return None
