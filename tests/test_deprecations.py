"""Nothing of JAX that is leaving is on the way of a run, with any version that is supported."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_processes import arguments
from tests.test_train import ROOT

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
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {name for name in names if name.startswith("jax.")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_uses_nothing_that_is_leaving(path):
    known = WHILE_IT_LASTS.get(str(path).removeprefix(f"{ROOT}/"), set())
    names = used(path) - known
    assert not [n for n in names if f"{n}.".startswith(tuple(f"{x}." for x in LEAVING))]


def test_what_is_leaving_is_found(tmp_path):
    path = tmp_path / "old.py"
    path.write_text(
        "import jax\nfrom jax.experimental.pallas import triton\nx = jax.tree_map(jax.tree.map, 1)"
    )
    assert used(path) >= {"jax.experimental.pallas.triton", "jax.tree_map", "jax.tree.map"}
    with pytest.raises(AssertionError):
        test_a_file_uses_nothing_that_is_leaving(path)


@pytest.mark.slow
def test_a_run_warns_of_nothing_that_is_deprecated(tmp_path):
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
