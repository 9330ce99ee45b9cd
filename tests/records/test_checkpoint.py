"""Saving and restoring the whole state, on eight host devices."""

import errno
import gc
import hashlib
import json
import logging
import resource
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl import config as cfg
from jaxrl.files import FolderError, sealed
from jaxrl.models.transformer import TransformerConfig, init_params, logical_axes
from jaxrl.parallel import ShardingRules, make_mesh, param_shardings, replicated
from jaxrl.parallel.checksums import checksums, start_checksums
from jaxrl.parallel.compilation import CompilationWatch
from jaxrl.records.checkpoint import (
    Checkpointer,
    CheckpointError,
    UnsavedCheckpoint,
    parse_resume_path,
    refuse_other,
    resume,
    sources_of_rewards,
    where_it_resumes,
)
from jaxrl.records.orbax_files import print_no_tracebacks
from jaxrl.records.resume_identity import changed_fields, fingerprint
from jaxrl.training.optim import abstract_state, init_state, make_apply, make_optimizer
from jaxrl.types import Prompt
from tests.full_disk import Disk

MODEL = TransformerConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)
SMALL = {"x": np.arange(3, dtype=np.int32)}  # any tree will do where the arrays do not matter
META = {
    "model": {"hidden_size": 16, "num_layers": 2},
    "config": {"trainer": {"seed": 1, "epochs": 2, "betas": [0.9, 0.99]}},
    "functions": {"policy loss 'mine'": "f00"},
}
OPTIMIZER = make_optimizer(
    optax.constant_schedule(0.1), adam_betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0
)


def placements(fsdp):
    mesh = make_mesh(fsdp=fsdp)
    params = init_params(MODEL, 0)
    return params, param_shardings(mesh, logical_axes(MODEL), params, ShardingRules()), mesh


@pytest.fixture(scope="module", name="state")
def state_fixture():
    """A state after one update: no moment is zero, every count is 1, step 7."""
    params, shardings, mesh = placements(4)
    state = init_state(OPTIMIZER, jax.device_put(params, shardings), shardings, replicated(mesh))
    grads = jax.tree.map(lambda p: 1e-3 + jnp.abs(p), state.params)
    out = jax.tree.map(lambda x: x.sharding, state)
    apply = jax.jit(make_apply(OPTIMIZER, optax.constant_schedule(0.1)), out_shardings=(out, None))
    return apply(state, grads)[0].replace(
        step=jax.device_put(jnp.int32(7), replicated(mesh)),
        skipped_updates=jax.device_put(jnp.int32(3), replicated(mesh)),
    )


def assert_bit_equal(restored, state):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(
            np.asarray(a).view(np.uint8) if a.ndim else np.asarray(a),
            np.asarray(b).view(np.uint8) if b.ndim else np.asarray(b),
        )


def save(folder, *steps, state=SMALL, **meta):
    """Commit some steps to a folder."""
    checkpointer = Checkpointer(str(folder))
    for step in steps:
        checkpointer.save(step, state, {**META, **meta})
    checkpointer.close()


def test_round_trip_is_bit_equal_with_the_shardings(tmp_path, state):
    save(tmp_path, 7, state=state)
    _, shardings, mesh = placements(4)
    like = abstract_state(OPTIMIZER, MODEL, shardings, replicated(mesh))
    restored = Checkpointer(str(tmp_path)).restore(7, like, META)
    assert_bit_equal(restored, state)
    assert (int(restored.step), int(restored.skipped_updates)) == (7, 3)
    assert np.abs(restored.opt_state[1][0].mu["embed"]).min() > 0  # moments are not just zeros
    same = jax.tree.map(
        lambda a, s: a.sharding.is_equivalent_to(s.sharding, a.ndim), restored, state
    )
    assert all(jax.tree.leaves(same))


def test_another_mesh_may_restore(tmp_path, state):
    save(tmp_path, 7, state=state)
    _, shardings, mesh = placements(8)
    like = abstract_state(OPTIMIZER, MODEL, shardings, replicated(mesh))
    restored = Checkpointer(str(tmp_path)).restore(7, like, META)
    assert_bit_equal(restored, state)
    # wq [2, 16, 2, 8]: an eighth of the 16 on each device
    assert restored.params["layers"]["wq"].addressable_shards[0].data.shape == (2, 2, 2, 8)


# ------------------------------------------------------------------ saving while training


@pytest.mark.parametrize("devices", [1, 8])
def test_a_state_that_is_donated_at_once_is_saved_as_it_was(tmp_path, devices):
    mesh = make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    sharded = jax.NamedSharding(mesh, jax.P("fsdp"))
    update = jax.jit(lambda s: jax.tree.map(lambda x: 1.5 * x + 1, s), donate_argnums=0)
    state = {
        "sharded": jax.device_put(np.arange(8 * 100_000, dtype=np.float32), sharded),
        "whole": jax.device_put(np.arange(1000, dtype=np.float32), replicated(mesh)),
    }
    checkpointer, saved = Checkpointer(str(tmp_path)), {}
    for step in (1, 2, 3):
        saved[step] = jax.tree.map(np.array, state)  # a copy
        checkpointer.save(step, state, META)
        for _ in range(10):
            state = update(state)
    checkpointer.close()
    for step, expected in saved.items():
        restored = Checkpointer(str(tmp_path)).restore(step, state, META)
        assert_bit_equal(jax.device_get(restored), expected)


def test_a_save_of_replicated_arrays_compiles_nothing(tmp_path, state):
    checksums(state)  # compiled in the warm-up of a run
    checkpointer = Checkpointer(str(tmp_path))
    with CompilationWatch() as watch:
        checkpointer.save(1, state, META)
        checkpointer.close()
    assert watch.take() == ([], 0)


def test_save_returns_before_the_files_are_there(tmp_path, monkeypatch):
    """The writing thread is held back until the test lets it go."""
    from orbax.checkpoint.checkpoint_managers import CheckpointManager

    go = threading.Event()
    finalize = CheckpointManager._finalize_checkpoint
    monkeypatch.setattr(
        CheckpointManager,
        "_finalize_checkpoint",
        lambda self, step: (go.wait(60), finalize(self, step))[1],
    )
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.save(1, SMALL, META)
    assert checkpointer.files.manager.is_saving_in_progress()
    go.set()
    checkpointer.close()
    assert Checkpointer(str(tmp_path)).restore(1, SMALL, META)["x"].tolist() == [0, 1, 2]


def test_a_full_disk_is_reported_and_older_checkpoints_stay(tmp_path):
    """No file may grow beyond 50 kB while step 2, 4 MB of noise, is written."""
    noise = {"x": np.random.default_rng(0).standard_normal(500_000)}
    noise = {"x": noise["x"].astype(np.float32)}
    checkpointer, committed = Checkpointer(str(tmp_path)), []
    checkpointer.on_commit = committed.append
    checkpointer.save(1, SMALL, META)
    checkpointer.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    message = rf"could not save step 2 to trainer.ckpt_path='{tmp_path}': .*earlier .* are whole"
    try:
        checkpointer.save(2, noise, META)
        with pytest.raises(FolderError, match=message):
            checkpointer.save(3, SMALL, META)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpointer.close()  # was reported once
    assert committed == [f"{tmp_path}/global_step_1"]
    again = Checkpointer(str(tmp_path))
    assert again.restore_latest(SMALL, META)[0] == 1
    again.save(2, noise, META)  # the disk has space again
    again.close()
    assert steps_in(tmp_path) == ["global_step_1", "global_step_2"]


def test_what_fails_in_orbax_is_said_once(tmp_path, monkeypatch, capfd, caplog):
    """Thirty arrays that cannot be written are one error: no traceback and no line of a logger."""
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    print_no_tracebacks.cache_clear()
    checkpointer, noise = Checkpointer(str(tmp_path)), np.random.default_rng(0)
    many = {f"x{i}": noise.standard_normal(50_000) for i in range(30)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(FolderError, match="could not save step 2"):
            checkpointer.save(2, many, META)
            checkpointer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gc.collect()
    assert (printed, capfd.readouterr().err) == ([], "")
    assert not [record.getMessage() for record in caplog.records]
    # of arrays on a full tmpfs that fail after the first, once Python finds them
    lost = (
        "Task exception was never retrieved\nfuture: <Task finished coro=<{}() done> exception=..."
    )
    for where in ("write_fragment(), defined at /site-packages/orbax/checkpoint/x.py", "mine"):
        logging.getLogger("asyncio").error(lost.format(where))
    (record,) = caplog.records
    assert "mine" in record.getMessage()


def test_a_save_that_cannot_begin_does_not_hold_up_the_end_of_the_process(tmp_path):
    """Orbax's threads wait for the folder that could not be made."""
    before = set(threading.enumerate())
    checkpointer = Checkpointer(str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, tmp_path, "mkdir global_step_1")
        with pytest.raises(FolderError, match="could not save step 1 .*No space left on device"):
            checkpointer.save(1, SMALL, META)
            checkpointer.wait()
    left = {thread.name for thread in set(threading.enumerate()) - before if not thread.daemon}
    assert left <= {"metadata_store_0"}  # of an executor, which Python ends
    checkpointer.close()
    again = Checkpointer(str(tmp_path))
    again.save(1, SMALL, META)
    again.close()
    assert Checkpointer(str(tmp_path)).restore_latest(SMALL, META)[0] == 1


@pytest.mark.parametrize("begins", [False, True])
def test_ctrl_c_while_a_save_begins_leaves_nothing_behind_that_goes_on(
    tmp_path, monkeypatch, begins
):
    """What has not begun is told to nobody; what has is, once it is whole."""
    checkpointer, committed, threads = Checkpointer(str(tmp_path)), [], []
    checkpointer.on_commit = committed.append
    save = checkpointer.files.manager.save

    def slow(*args, **kwargs):
        threads.append(threading.current_thread())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.5)
        if not begins:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(*args, **kwargs)

    monkeypatch.setattr(checkpointer.files.manager, "save", slow)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of xdist ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1, SMALL, META)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not threads[0].is_alive()
    checkpointer.close()
    assert committed == ([f"{tmp_path}/global_step_1"] if begins else [])
    assert steps_in(tmp_path) == (["global_step_1"] if begins else [])


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_that_ends_without_close_has_its_last_checkpoint(tmp_path, fails):
    """Python is at its end while most of it is still to be written."""
    script = f"""
import time
import numpy as np
from orbax.checkpoint.checkpoint_managers import CheckpointManager
from jaxrl.records.checkpoint import Checkpointer

finalize = CheckpointManager._finalize_checkpoint
def late(self, step):
    time.sleep(1)
    if {fails}:
        raise OSError(28, "No space left on device")
    return finalize(self, step)
CheckpointManager._finalize_checkpoint = late

def main():
    checkpointer = Checkpointer({str(tmp_path)!r})
    checkpointer.on_commit = lambda path: print("committed", path)
    checkpointer.save(1, {{"x": np.arange(3, dtype=np.int32)}}, {META!r})
main()
print("the end")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    whole = [] if fails else [f"committed {tmp_path}/global_step_1"]
    assert done.stdout.splitlines() == ["the end", *whole]
    assert "Traceback" not in done.stderr
    if fails:
        assert "could not save step 1 to trainer.ckpt_path=" in done.stderr
    else:
        assert Checkpointer(str(tmp_path)).restore(1, SMALL, META)["x"].tolist() == [0, 1, 2]


def test_the_failure_of_the_last_save_is_reported_at_close(tmp_path, monkeypatch):
    checkpointer = Checkpointer(str(tmp_path))

    def fail(step):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpointer.files.manager, "_finalize_checkpoint", fail)
    checkpointer.save(4, SMALL, META)
    message = r"could not save step 4 to trainer.ckpt_path='.*': No space left on device\. Its"
    with pytest.raises(FolderError, match=message):
        checkpointer.close()


def test_a_save_that_may_succeed_another_time_says_so(tmp_path, monkeypatch):
    checkpointer = Checkpointer(str(tmp_path))

    def fail(step):
        raise ValueError("UNAVAILABLE: the bucket does not answer [tensorstore_spec='{...}']")

    monkeypatch.setattr(checkpointer.files.manager, "_finalize_checkpoint", fail)
    checkpointer.save(4, SMALL, META)
    message = r"could not save .*: ValueError: UNAVAILABLE: the bucket does not answer\. Its"
    with pytest.raises(UnsavedCheckpoint, match=message):
        checkpointer.close()


def steps_in(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (2, ["global_step_2", "global_step_3"]),
        (-1, ["global_step_1", "global_step_2", "global_step_3"]),
    ],
)
def test_max_to_keep(tmp_path, keep, left):
    checkpointer = Checkpointer(str(tmp_path), max_to_keep=keep)
    for step in (1, 2, 3):
        checkpointer.save(step, SMALL, META)
    checkpointer.close()
    assert steps_in(tmp_path) == left


def test_what_a_killed_save_left_is_removed(tmp_path):
    leftover = tmp_path / "global_step_8.orbax-checkpoint-tmp"
    (leftover / "state").mkdir(parents=True)
    save(tmp_path, 8)
    assert steps_in(tmp_path) == ["global_step_8"]


# ------------------------------------------------------------------ checkpoints of other runs


def test_a_folder_with_later_steps_of_another_run_is_refused(tmp_path):
    save(tmp_path, 3, 6, 9)
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.refuse_later_than(9)
    with pytest.raises(ValueError, match=r"holds the steps \[6, 9\] of another run.*after step 3"):
        checkpointer.refuse_later_than(3)
    with pytest.raises(ValueError, match=r"holds the steps \[3, 6, 9\]"):
        resume(checkpointer, "none", None, SMALL, META)


def test_another_model_is_refused_with_the_difference(tmp_path):
    save(tmp_path, 6, 7)
    model = {"hidden_size": 32, "num_layers": 2, "qk_norm": True}
    message = (
        rf"{tmp_path}/global_step_7 is of another model; \(saved, this run\): "
        r"\{'hidden_size': \(16, 32\), 'qk_norm': \(None, True\)\}. To start another run, choose "
        r"another trainer.run_name \(and trainer.ckpt_path and trainer.export_path, if set\); or "
        "undo the change"
    )
    with pytest.raises(ValueError, match=message):  # 6 is no way out: this is no damage
        Checkpointer(str(tmp_path)).restore_latest(SMALL, {**META, "model": model})


def test_another_config_is_refused_but_for_what_may_change(tmp_path):
    save(tmp_path, 7)
    further = {"trainer": {"seed": 1, "epochs": 3, "betas": (0.9, 0.99)}}  # a tuple is a list
    arrangement = {"mesh": {"fsdp": 2}, "fsdp_config": {"cpu_offload": True}}
    further["trainer"] |= {"policy": arrangement, "use_sample_packing": True}
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.restore(7, SMALL, {**META, "config": further})
    other = {"trainer": {"seed": 2, "epochs": 2, "betas": [0.9, 0.99]}}
    with pytest.raises(ValueError, match=r"another config; .*{'trainer.seed': \(1, 2\)}"):
        checkpointer.restore(7, SMALL, {**META, "config": other})


def test_servers_of_environments_may_move(tmp_path):
    """A judge may be at another port, but not ask something else."""
    judge = {"base_url": "http://127.0.0.1:1/v1", "timeout": 60, "max_score": 1.0, "prompt": "a"}
    settings = {"max_env_workers": 32, "search": {"search_url": "a"}, "llm_as_a_judge": judge}
    environment = {"rejudge_fraction": 0.01, "skyrl_gym": settings}
    moved = {"base_url": "http://127.0.0.1:2/v1", "timeout": 90}
    for change, changed in (
        ({"llm_as_a_judge": judge | moved, "search": {"search_url": "b"}}, {}),
        ({"max_env_workers": 4}, {}),
        ({"llm_as_a_judge": judge | {"max_score": 5.0}}, {"max_score": (1.0, 5.0)}),
        ({"llm_as_a_judge": judge | {"prompt": "b"}}, {"prompt": ("a", "b")}),
    ):
        now = {"rejudge_fraction": 0.0, "skyrl_gym": settings | change}
        found = changed_fields({"environment": environment}, {"environment": now})
        prefix = "environment.skyrl_gym.llm_as_a_judge."
        assert found == {prefix + name: pair for name, pair in changed.items()}


def test_rows_that_have_changed_under_the_same_path_are_refused(tmp_path):
    rows = [Prompt("0:0", [], (1, 2), "gsm8k", {"answer": "4"}), Prompt("0:1", [], (3,), "gsm8k")]
    other = [rows[0], Prompt("0:1", [], (3,), "gsm8k", {"answer": np.arange(2)})]
    before, same, now = fingerprint(rows), fingerprint(list(rows)), fingerprint(other)
    assert before == same != now != fingerprint(other[:1] + rows[1:] + rows[1:])
    refuse_other("x", META | {"data": before}, META | {"data": same})
    refuse_other("x", META, META | {"data": same})  # of before there were fingerprints
    with pytest.raises(
        CheckpointError, match="of another data set, or one whose rows have changed"
    ):
        refuse_other("x", META | {"data": before}, META | {"data": now})


def test_a_field_that_is_newer_than_the_checkpoint_was_at_its_default(tmp_path):
    save(tmp_path, 7)
    config = META["config"]
    config = {"trainer": {**config["trainer"], "fully_async": {"enabled": False}}}
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.restore(7, SMALL, {**META, "config": config})
    config["trainer"]["fully_async"]["enabled"] = True
    with pytest.raises(ValueError, match=r"{'trainer.fully_async.enabled': \(False, True\)}"):
        checkpointer.restore(7, SMALL, {**META, "config": config})


def test_another_source_of_the_loss_is_warned_of(tmp_path):
    save(tmp_path, 7)
    other = {**META, "functions": {"policy loss 'mine'": "ba2"}}
    message = r"source of policy loss 'mine' has changed since .*global_step_7"
    with pytest.warns(UserWarning, match=message):
        Checkpointer(str(tmp_path)).restore(7, SMALL, other)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            {"total_steps": 40},
            {"total_steps": 60},
            r"global_step_7 is of a run to step 40, and this one goes to step 60 "
            r"\(trainer.max_training_steps, trainer.epochs\), where "
            r"trainer.policy.optimizer_config.scheduler='linear' now ends: the learning rate jumps",
        ),
        (
            {"mesh": {"data": 1, "fsdp": 4}},
            {"mesh": {"data": 4, "fsdp": 1}},
            r"saved on the mesh {'data': 1, 'fsdp': 4}, and this run has {'data': 4, 'fsdp': 1}: "
            "it goes on with the same numbers up to rounding, not bit for bit",
        ),
    ],
)
def test_another_end_and_another_mesh_are_warned_of(tmp_path, recwarn, before, now, message):
    config = cfg.get_config_as_dict(cfg.TrainConfig())
    config["trainer"]["policy"]["optimizer_config"]["scheduler"] = "linear"
    save(tmp_path, 7, config=config, **before)
    checkpointer = Checkpointer(str(tmp_path))
    for same in ({}, before, {**before, "total_steps": 7}):  # not known, the same, nothing follows
        checkpointer.restore(7, SMALL, {**META, "config": config, **same})
    assert not recwarn.list
    with pytest.warns(UserWarning, match=message) as warned:
        checkpointer.restore(7, SMALL, {**META, "config": config, **now})
    assert len(warned) == 1


def test_checksum_literals():
    # bits times odd weights: 5 * 1 + 7 * 3 + 2 * 5 = 36; 1.0 is 0x3f800000 = 1065353216
    state = {"a": np.array([5, 7, 2], np.int32), "b": np.float32(1)}
    assert checksums(state) == {"['a']": 36, "['b']": 1065353216}
    # row-major positions: 1 * 1 + 2 * 3 + 3 * 5 + 4 * 7 = 50
    assert checksums([np.array([[1, 2], [3, 4]], np.int32)]) == {"[0]": 50}
    # -1 is 2^32 - 1, so weight 3 gives -3 mod 2^32; bfloat16 1.0 is 0x3f80 = 16256
    assert checksums([np.array([0, -1], np.int32)]) == {"[0]": 2**32 - 3}
    assert checksums([jnp.ones((), jnp.bfloat16)]) == {"[0]": 16256}


@pytest.mark.parametrize("size", [1, 2**14 - 1, 2**14, 3 * 2**14 + 5])
def test_checksums_in_blocks_are_those_of_the_formula(size):
    """Of arrays that are whole on a CPU; their blocks have 2^14 elements."""
    bits = np.random.default_rng(0).integers(0, 2**32, size, np.uint32)
    wanted = int((bits.astype(object) * (2 * np.arange(size) + 1)).sum() % 2**32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    copies = jax.device_put(bits, jax.sharding.NamedSharding(mesh, jax.P()))
    found = checksums([jnp.asarray(bits), copies, bits])  # the last one is summed as a whole
    assert set(found.values()) == {wanted}
    for place in {0, size // 2, size - 1}:  # the lowest and the highest bit of one element
        for bit in (np.uint32(1), np.uint32(1 << 31)):
            other = bits.copy()
            other[place] ^= bit
            assert checksums([jnp.asarray(other)])["[0]"] != wanted


def test_checksums_in_blocks_of_other_shapes_and_types():
    """The same numbers as where the array is split, of which no device has all elements."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    split = jax.sharding.NamedSharding(mesh, jax.P(None, "x"))
    values = np.random.default_rng(0).normal(size=(3, 66, 200)).astype(np.float32)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
        array = jnp.asarray(values, dtype)
        assert checksums([array]) == checksums([jax.device_put(array, split)])


def test_checksums_that_were_started_outlive_the_donation_of_their_arrays():
    grow = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jnp.zeros(2**22, jnp.float32)
    started = []
    for _ in range(4):
        started.append(start_checksums([array]))
        array = grow(array)
    wanted = [checksums([jnp.full(2**22, n, jnp.float32)]) for n in range(4)]
    assert [fetch() for fetch in started] == wanted


# ------------------------------------------------------------------ which checkpoint


@pytest.mark.parametrize("mode", [None, "none", "latest"])
def test_an_empty_folder_starts_afresh(tmp_path, mode):
    assert resume(Checkpointer(str(tmp_path / "new")), mode, None, SMALL, META) is None


def test_latest_is_the_largest_number_of_a_finished_save(tmp_path):
    for step in (9, 10):
        save(tmp_path, step, state={"x": np.array([step], np.int32)})
    (tmp_path / "global_step_12.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (tmp_path / "global_step_13_evals.jsonl").write_text("{}")
    (tmp_path / "global_step_14.damaged").mkdir()
    own = Checkpointer(str(tmp_path))
    like = {"x": np.array([0], np.int32)}
    assert resume(own, "latest", None, like, META)["x"].tolist() == [10]


def test_an_interrupted_run_says_where_it_resumes(tmp_path):
    settings = cfg.TrainConfig().trainer
    settings.ckpt_path = str(tmp_path)
    none = "there is no checkpoint yet: the same command starts again from the beginning"
    assert where_it_resumes(settings) == none
    save(tmp_path, 5, 175)
    assert where_it_resumes(settings) == "the same command resumes after step 175"
    settings.resume_mode = "none"
    assert where_it_resumes(settings) == (
        "with trainer.resume_mode=latest the same command resumes after step 175"
    )


def test_from_path(tmp_path):
    save(tmp_path / "other", 5, 7)
    leftover = tmp_path / "other" / "global_step_9.orbax-checkpoint-tmp"
    leftover.mkdir()  # of a run that may be saving right now
    own = Checkpointer(str(tmp_path / "own"))
    for end in ("global_step_5", "global_step_5/"):
        path = f"{tmp_path}/other/{end}"
        assert resume(own, "from_path", path, SMALL, META)["x"].tolist() == [0, 1, 2]
    assert leftover.exists()


@pytest.mark.parametrize("path", ["runs/step_5", "runs/global_step_x", "runs", ""])
def test_from_path_wants_a_step(path):
    with pytest.raises(ValueError, match=r"resume_path=.* must end in global_step_<N>"):
        parse_resume_path(path)


def test_from_path_wants_a_folder_that_exists(tmp_path):
    with pytest.raises(CheckpointError, match=r"global_step_5' does not exist; the steps in .*"):
        parse_resume_path(str(tmp_path / "global_step_5"))


def test_a_file_url_is_a_local_folder(tmp_path):
    checkpointer = Checkpointer(f"file://{tmp_path}/here")
    checkpointer.save(1, SMALL, META)
    checkpointer.close()
    assert steps_in(tmp_path / "here") == ["global_step_1"]
    assert parse_resume_path(f"file://{tmp_path}/here/global_step_1") == (f"{tmp_path}/here", 1)


def test_meta_is_readable_json(tmp_path):
    save(tmp_path, 1)
    (file,) = (tmp_path / "global_step_1" / "meta").rglob("metadata")
    # 0 * 1 + 1 * 3 + 2 * 5
    assert json.loads(file.read_text()) == sealed({**META, "checksums": {"['x']": 13}})


def a_reward(action, scale=1.0):
    return scale * len(action)


class AnEnvironment:
    def step(self, action): ...


def test_rewards_and_environments_of_the_user_have_the_hash_of_their_source():
    source = "def a_reward(action, scale=1.0):\n    return scale * len(action)\n"
    hashed = hashlib.sha256(source.encode()).hexdigest()
    name, env = f"{__name__}:a_reward", f"{__name__}:AnEnvironment"
    functions = [name, f"{name}(scale=2.0)", "jaxrl.envs.shaping:format_reward", "gone:away"]
    found = sources_of_rewards(functions, [env, "gsm8k", env, "gymnasium:Taxi-v3", "", "gone:Env"])
    source = "class AnEnvironment:\n    def step(self, action): ...\n"
    assert found == {
        f"reward function '{name}'": hashed,
        f"reward function '{name}(scale=2.0)'": hashed,
        f"environment '{env}'": hashlib.sha256(source.encode()).hexdigest(),
    }
