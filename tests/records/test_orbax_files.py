"""The calls of orbax stand in one place, and its next interface reads what they write."""

import ast
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxrl
from jaxrl.parallel import make_mesh, replicated
from jaxrl.records.orbax_files import StepFiles

ROOT = Path(jaxrl.__file__).parent


@pytest.mark.check
def test_one_module_calls_orbax():
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.partition(".")[0] == "orbax" for name in names):
                found.add(str(path.relative_to(ROOT)))
    assert found == {"records/orbax_files.py"}


def test_a_part_of_a_step(tmp_path):
    files = StepFiles(tmp_path, max_to_keep=None, read_only=False)
    state = {"params": {"w": jax.numpy.arange(6.0)}, "other": jax.numpy.ones(3)}
    files.save(3, {"state": state, "buffer": {"tokens": np.arange(4)}}, {"model": "m"})
    files.wait()
    assert files.steps() == [3]
    part = files.restore(3, "state", {"params": state["params"]}, partial=True)
    assert part["params"]["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert "other" not in part
    assert files.restore(3, "buffer")["tokens"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="already holds a step after 2"):
        files.save(2, {"state": state}, {})
    files.close()


def test_version_1_reads_what_is_saved(tmp_path):
    """The preview of it: arrays by their shardings, and the JSON."""
    v1 = pytest.importorskip("orbax.checkpoint.experimental.v1")
    mesh = make_mesh(fsdp=8)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    state = {
        "w": jax.device_put(np.arange(16, dtype=np.float32).reshape(8, 2), rows),
        "step": jax.device_put(np.int32(7), replicated(mesh)),
    }
    files = StepFiles(tmp_path, max_to_keep=None, read_only=False)
    files.save(7, {"state": state}, {"model": {"layers": 2}})
    files.close()
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    with v1.Context():
        found = v1.load_checkpointables(
            tmp_path / "global_step_7", {"state": abstract, "meta": None}
        )
    for name, value in state.items():
        np.testing.assert_array_equal(found["state"][name], value)
        assert found["state"][name].sharding == value.sharding
    assert found["meta"] == {"model": {"layers": 2}}
