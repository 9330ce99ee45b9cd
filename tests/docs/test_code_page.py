"""docs/code.md: what its table of decisions names is there."""

import ast
import functools
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| .+ \| `(.+\.py)` \| `(.+)` \|$", (ROOT / "docs/code.md").read_text(), re.M)


@functools.cache
def defined(file):
    """The names at the top of a file, and those of its classes' methods with the class."""
    found = set()
    for node in ast.parse((ROOT / "jaxrl" / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            found |= {x.id for x in node.targets if isinstance(x, ast.Name)}
    return found


def test_there_are_rows():
    assert len(ROWS) >= 20


def test_a_decision_is_where_the_page_says():
    wrong = []
    for file, name in ROWS:
        if not (ROOT / "jaxrl" / file).is_file() or name not in defined(file):
            wrong.append(f"{file}: no {name}")
    assert not wrong, "\n".join(wrong)
