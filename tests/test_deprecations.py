"""Nothing of JAX that is leaving is on the way of a run, with any version that is supported."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[1]
# Modules and names that JAX has deprecated or removed in some version from 0.10 to 0.12, or says
# will move.
LEAVING = (
    "jax.core",
    "jax.device_put_replicated",
    "jax.device_put_sharded",
    "jax.experimental.maps",
    "jax.experimental.pallas.ops.gpu",
    "jax.experimental.pallas.triton",
    "jax.experimental.pjit",
    "jax.experimental.shard_map",
    "jax.interpreters",
    "jax.lib",
    "jax.tree_map",
    "jax.util",
)
# The kernel needs it to say how many warps it has, and is not chosen where it is gone.
WHILE_IT_LASTS = {"jaxrl/models/kernels/tree_attention_gpu.py": {"jax.experimental.pallas.triton"}}
SOURCES = [p for part in ("jaxrl", "benchmarks", "examples") for p in (ROOT / part).rglob("*.py")]

# What is said of JAX counts wherever it is said, as some of its warnings name its own files; what
# is said of other packages counts where jaxrl calls them.
RUN = """
import runpy, sys, warnings

def note(message, category, filename, lineno, *_):
    ours = "jax" in str(message) or "site-packages" not in filename
    if issubclass(category, DeprecationWarning) and ours:
        print("DEPRECATED", f"{filename}:{lineno}: {message}", file=sys.stderr)

warnings.simplefilter("always")
warnings.showwarning = note
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def used(path: Path) -> set[str]:
    """The names of jax that a file imports or writes out, "jax.lax.psum"."""
    names, text = set(), path.read_text()
    if not re.search(r"\bjax\b", text):
        return names
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {name for name in names if name.startswith("jax.")}


def leaving(path: Path) -> set[str]:
    """Of these names those that are leaving."""
    names = used(path) - WHILE_IT_LASTS.get(str(path).removeprefix(f"{ROOT}/"), set())
    return {n for n in names if f"{n}.".startswith(tuple(f"{x}." for x in LEAVING))}


def test_no_file_uses_what_is_leaving():
    assert SOURCES
    found = {path.relative_to(ROOT): leaving(path) for path in SOURCES}
    wrong = [f"{file} uses {sorted(names)}" for file, names in found.items() if names]
    assert not wrong, "\n".join(wrong)


def test_what_is_leaving_is_found(tmp_path):
    path = tmp_path / "old.py"
    path.write_text(
        "import jax\nfrom jax.experimental.pallas import triton\nx = jax.tree_map(jax.tree.map, 1)"
    )
    assert used(path) >= {"jax.experimental.pallas.triton", "jax.tree_map", "jax.tree.map"}
    assert leaving(path) == {"jax.experimental.pallas.triton", "jax.tree_map"}


@pytest.mark.slow
def test_a_run_warns_of_nothing_that_is_deprecated(tmp_path):
    from tests.test_processes import arguments  # slow to import

    _, *words = arguments(tmp_path, steps=1)
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not [x for x in done.stderr.splitlines() if x.startswith("DEPRECATED")]
