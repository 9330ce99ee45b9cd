"""What both processes of a job do in test_checkpoint_damage.py: restore what process 1 cannot read.

Process 1 has a copy of the checkpoints, which stands for what its host sees of the shared folder.
"""

import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.parallel import allgather, start_processes
from jaxrl.parallel.processes import put
from jaxrl.records import checkpoint
from jaxrl.records.checkpoint import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpoint,
    UnreadableCheckpoint,
    resume,
)
from tests.records.test_checkpoint import META
from tests.records.test_checkpoint_damage import cut_data_files, remove

checkpoint.PAUSES = (0.0,)
start_processes(start_seconds=60)
index, folder = jax.process_index(), Path(sys.argv[1])
mesh = jax.make_mesh((2,), ("data",))
spread, same = (NamedSharding(mesh, PartitionSpec(*names)) for names in (("data",), ()))
values = np.arange(6, dtype=np.float32)
state = {"spread": put(values, spread), "same": put(values, same)}


def seen_by_process_1(case, damage):
    """Save steps 1 and 2; the folder as this process sees it, and another one for its own run."""
    shared = folder / case
    own = Checkpointer(str(shared))
    for step in (1, 2):
        own.save(step, state, META)
    own.close()
    seen = folder / f"{case}_in_process_1" if index else shared
    if index:
        shutil.copytree(shared, seen)
        damage(seen)
    allgather(None)  # nobody reads before it is damaged
    return seen


def newest(damage):
    return lambda seen: damage(seen / "global_step_2")


def flip_a_digit(step):
    """Of the config: that one process sees another one must not be taken for another run."""
    path = step / "meta" / "metadata"
    text = path.read_text()
    assert '"seed": 1' in text
    path.write_text(text.replace('"seed": 1', '"seed": 0'))


def loop(seen):
    """The system's ELOOP, in place of the data."""
    for path in (seen / "global_step_2" / "state").rglob("d/*"):
        path.unlink()
        path.symlink_to(path.name)


# a step that is damaged, missing or cut in one process alone: the one before, in both
for case, damage, reason in (
    ("meta", newest(remove("meta")), "FileNotFoundError"),
    ("digit", newest(flip_a_digit), "DamagedFile: meta/metadata: its checksum is that of another"),
    ("state", newest(remove("state")), "KeyError"),
    ("data", newest(cut_data_files), "ValueError: OUT_OF_RANGE"),
    ("step", newest(shutil.rmtree), "FileNotFoundError"),
):
    seen = seen_by_process_1(case, damage)
    message = rf"(?s)global_step_2 is damaged \(in process 1 on \S+: {reason}.*to step 1;"
    with pytest.warns(UserWarning, match=message):
        step, restored = Checkpointer(str(seen), read_only=True).restore_latest(state, META)
    assert step == 1
    for name, array in restored.items():
        np.testing.assert_array_equal(array.addressable_data(0), state[name].addressable_data(0))

# the same, where that step alone is asked for; the error names the file of process 1
seen = seen_by_process_1("asked", newest(cut_data_files))
with pytest.raises(DamagedCheckpoint, match=r"in process 1 on .*asked_in_process_1/global_step_2"):
    Checkpointer(str(seen), read_only=True).restore(2, state, META)

# what may pass: both try again, both give up, and nothing is set aside
seen = seen_by_process_1("loop", loop)
with (
    pytest.warns(UserWarning, match="in process 1 on .*trying again in 0 s"),
    pytest.raises(UnreadableCheckpoint, match="cannot be read now .in process 1 on .*UNKNOWN"),
):
    Checkpointer(str(seen), read_only=True).restore_latest(state, META)
assert sorted(path.name for path in seen.iterdir()) == ["global_step_1", "global_step_2"]

# no checkpoint at all: both are refused
seen = seen_by_process_1("nothing", shutil.rmtree)
with pytest.raises(CheckpointError, match="no whole checkpoint: .*_2 is .*in process 1 .*_1 is"):
    Checkpointer(str(seen), read_only=True).restore_latest(state, META)
own = Checkpointer(str(folder / "own"))
with pytest.raises(CheckpointError, match="^in process 1 on .*global_step_2' does not exist"):
    resume(own, "from_path", str(seen / "global_step_2"), state, META)
allgather("the end")
