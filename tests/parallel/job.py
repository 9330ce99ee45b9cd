"""What every process of a job does in test_processes.py; an assertion that fails is its status."""

import os
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxrl
from jaxrl.models.hf import load_config
from jaxrl.models.transformer import abstract_params, init_params, logical_axes
from jaxrl.parallel import (
    ProcessError,
    ShardingRules,
    agree,
    allgather,
    fetch,
    is_first,
    local_slice,
    make_mesh,
    param_shardings,
    put,
    same_in_all,
    start_processes,
)
from jaxrl.parallel.compilation import enable_cache
from jaxrl.parallel.processes import CHUNK, FIRST
from jaxrl.records.checkpoint import shared_folder
from jaxrl.rollout.weights.groups import local_copy

if sys.argv[1:] == ["other_version"]:
    jaxrl.__version__ = f"0.{os.environ['JAXRL_PROCESS_ID']}"

start_processes(start_seconds=30)
index = jax.process_index()
assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 2, 4)
assert is_first() == (index == 0)

# values of any size, the same list in both: in the first message, across its end, in two chunks
for size in (0, FIRST - 8 - 40, FIRST, CHUNK + FIRST):
    found = allgather({"from": index, "data": bytes([index]) * size})
    assert [x["from"] for x in found] == [0, 1]
    assert [x["data"] for x in found] == [bytes([i]) * size for i in (0, 1)]
assert allgather("short" if index else "long" * FIRST) == ["long" * FIRST, "short"]
assert agree(f"said by {index}") == "said by 0"

# neighbours, in order, nothing lost; a list that is shorter than the processes
assert allgather(local_slice(list(range(5)))) == [[0, 1], [2, 3, 4]]
assert allgather(local_slice([7])) == [[], [7]]

# what would part them is refused in both, by name
same_in_all("configs", {"trainer.seed": 1})
with pytest.raises(ProcessError, match="configs differ: trainer.seed is 1 in process 1 on .*, 0 "):
    same_in_all("configs", {"trainer.seed": index})
with tempfile.TemporaryDirectory() as own:
    assert shared_folder("trainer.ckpt_path", agree(own)).exists()
    with pytest.raises(ValueError, match=r"trainer.ckpt_path=.* is not one folder .* process 1 on"):
        shared_folder("trainer.ckpt_path", own)
    allgather(None)  # neither folder goes before

mesh = make_mesh(fsdp=4)
host = {"rows": np.arange(32.0, dtype=np.float32).reshape(8, 4), "one": np.float32(3)}
by_rows, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("fsdp"), PartitionSpec()))
arrays = put(host, {"rows": by_rows, "one": whole})
assert [s.data.shape for s in arrays["rows"].addressable_shards] == [(2, 4), (2, 4)]
sums = jax.jit(lambda x: x["rows"].sum() * x["one"])(arrays)
assert float(sums) == 496 * 3  # 0 + ... + 31 = 496
jax.tree.map(np.testing.assert_array_equal, fetch(arrays), host)
keys = put(jax.random.split(jax.random.key(0), 8), by_rows)
np.testing.assert_array_equal(
    fetch(jax.jit(jax.random.key_data)(keys)),
    jax.random.key_data(jax.random.split(jax.random.key(0), 8)),
)

# whole on the devices of each process, bit for bit
copy = local_copy(arrays)
assert copy["rows"].is_fully_addressable
assert copy["rows"].sharding.device_set == set(jax.local_devices())
jax.tree.map(np.testing.assert_array_equal, jax.device_get(copy), host)

# a model, in groups that cut every array, cast
model = load_config("configs/tiny_char_model")
alone = init_params(model, 0)
shardings = param_shardings(mesh, logical_axes(model), abstract_params(model), ShardingRules())
spread = put(jax.device_get(alone), shardings)
copy = local_copy(spread, jax.numpy.bfloat16, 5000)
assert copy["final_norm"].dtype == np.float32
for ours, wanted in zip(jax.tree.leaves(copy), jax.tree.leaves(alone), strict=True):
    assert ours.sharding.device_set == set(jax.local_devices())
    np.testing.assert_array_equal(jax.device_get(ours), wanted.astype(ours.dtype))
assert copy["layers"]["w_up"].addressable_shards[0].data.size * 2 == copy["layers"]["w_up"].size

# each keeps its compiled programs, in a folder of its own
jax.config.update("jax_compilation_cache_dir", None)  # of the tests
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
with tempfile.TemporaryDirectory() as folder:
    enable_cache(folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.block_until_ready(jax.jit(lambda x: 17 * x + index)(1.0))
    enable_cache(folder)  # as a second run in this process
    assert list(Path(folder, "process_1" if index else "").glob("jit__lambda-*"))
    jax.config.update("jax_compilation_cache_dir", None)
print("all checked")
