"""What is taken of JAX's private modules is there, in one place of ours."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

import jaxrl
from jaxrl.parallel import jax_internals

pytestmark = pytest.mark.check
ROOT = Path(jaxrl.__file__).parent


def test_no_other_module_imports_what_is_private():
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.startswith("jax._src") for name in names):
                found.add(str(path.relative_to(ROOT)))
    assert found == {"parallel/jax_internals.py"}


def test_the_coordinator_of_a_job():
    """Its table is asked in jobs, tests/test_processes.py; alone there is none."""
    state = jax_internals.global_state
    assert (state.client, state.coordinator_address) == (None, None)
    assert (state.process_id, state.num_processes) in ((0, 1), (0, None), (None, None))


def test_whether_devices_were_asked_for():
    import jax

    jax.devices()
    assert jax_internals.backends_are_initialized()


def test_who_writes_compiled_programs():
    """`compilation.enable_cache` puts a function of its own in the place of the first."""
    replaced = inspect.signature(jax_internals.compiler._cache_write)
    assert list(replaced.parameters)[:5] == [
        "cache_key", "compile_time_secs", "module_name", "backend", "executable"
    ]  # fmt: skip
    written = inspect.signature(jax_internals.compilation_cache.put_executable_and_time)
    assert list(written.parameters) == [
        "cache_key", "module_name", "executable", "backend", "compile_time"
    ]  # fmt: skip
    assert not inspect.signature(jax_internals.compilation_cache.reset_cache).parameters


def test_names_by_which_compilations_are_known():
    """tests/parallel/test_watchdog.py and tests/tools/doctor see one by them."""
    assert jax_internals.compiler.__file__.endswith(jax_internals.COMPILER_FILE)
    assert importlib.util.find_spec(jax_internals.COMPILE_LOGGER) is not None


def test_attention_of_cudnn():
    fused = jax_internals.fused_attention()
    taken = inspect.signature(inspect.unwrap(fused._dot_product_attention)).parameters
    for name in ("page_table_k", "page_table_v", "kv_seqlen", "mask_type", "layout"):
        assert name in taken
    assert {"PADDING"} <= {kind.name for kind in fused.MaskType}
    assert fused.AttentionLayout.BTNH is not None
