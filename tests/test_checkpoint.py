"""Saving and restoring the whole state, on eight host devices."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.checkpoint import Checkpointer, locate, restore
from jaxrl.models.transformer import TransformerConfig, init_params, logical_axes
from jaxrl.optim import abstract_state, init_state, make_apply, make_optimizer
from jaxrl.parallel import ShardingRules, make_mesh, param_shardings, replicated

MODEL = TransformerConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)
SMALL = {"x": np.arange(3)}  # any tree will do where the arrays do not matter
META = {
    "model": {"hidden_size": 16, "num_layers": 2},
    "config": {"trainer": {"seed": 1, "epochs": 2, "betas": [0.9, 0.99]}},
    "data": [1, 2],
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


def test_round_trip_is_bit_equal_with_the_shardings(tmp_path, state):
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.save(7, state, META)
    checkpointer.close()
    _, shardings, mesh = placements(4)
    like = abstract_state(OPTIMIZER, MODEL, shardings, replicated(mesh))
    restored = restore(str(tmp_path), 7, like, META["model"], META["config"])
    assert_bit_equal(restored, state)
    assert (int(restored.step), int(restored.skipped_updates)) == (7, 3)
    assert np.abs(restored.opt_state[1][0].mu["embed"]).min() > 0  # moments are not just zeros
    same = jax.tree.map(
        lambda a, s: a.sharding.is_equivalent_to(s.sharding, a.ndim), restored, state
    )
    assert all(jax.tree.leaves(same))


def test_another_mesh_may_restore(tmp_path, state):
    Checkpointer(str(tmp_path)).save(7, state, META)
    _, shardings, mesh = placements(8)
    like = abstract_state(OPTIMIZER, MODEL, shardings, replicated(mesh))
    restored = Checkpointer(str(tmp_path)).restore(7, like)
    assert_bit_equal(restored, state)
    # wq [2, 16, 2, 8]: an eighth of the 16 on each device
    assert restored.params["layers"]["wq"].addressable_shards[0].data.shape == (2, 2, 2, 8)


def test_meta_belongs_to_its_step(tmp_path, state):
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.save(7, state, META)
    checkpointer.save(9, state, {**META, "data": [3]})
    assert checkpointer.read_meta(7) == META
    assert checkpointer.read_meta(9)["data"] == [3]


def test_a_folder_with_later_steps_of_another_run_is_refused(tmp_path):
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.refuse_later_than(0)
    for step in (3, 6, 9):
        checkpointer.save(step, SMALL, META)
    checkpointer.refuse_later_than(9)
    with pytest.raises(ValueError, match=r"holds the steps \[6, 9\] of another run.*after step 3"):
        checkpointer.refuse_later_than(3)


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


def test_another_model_is_refused_with_the_difference(tmp_path):
    Checkpointer(str(tmp_path)).save(7, SMALL, META)
    model = {"hidden_size": 32, "num_layers": 2, "qk_norm": True}
    message = (
        rf"{tmp_path}/global_step_7 is of another model; \(saved, this run\): "
        r"\{'hidden_size': \(16, 32\), 'qk_norm': \(None, True\)\}. Choose another"
    )
    with pytest.raises(ValueError, match=message):
        restore(str(tmp_path), 7, SMALL, model, META["config"])


# ------------------------------------------------------------------ locate


def fake_checkpoint(folder, step):
    (folder / f"global_step_{step}" / "state").mkdir(parents=True)


@pytest.mark.parametrize("mode", [None, "none"])
def test_locate_none_starts_afresh(tmp_path, mode):
    fake_checkpoint(tmp_path, 5)
    assert locate(mode, None, str(tmp_path)) is None


def test_locate_latest_is_the_largest_number(tmp_path):
    assert locate("latest", None, str(tmp_path / "not_there")) is None
    assert locate("latest", None, str(tmp_path)) is None
    for step in (9, 10, 2):
        fake_checkpoint(tmp_path, step)
    assert locate("latest", None, str(tmp_path)) == (str(tmp_path), 10)


def test_locate_latest_skips_what_was_not_finished(tmp_path):
    fake_checkpoint(tmp_path, 5)
    (tmp_path / "global_step_7").mkdir()  # no state in it
    (tmp_path / "global_step_8.orbax-checkpoint-tmp-1" / "state").mkdir(parents=True)
    (tmp_path / "global_step_9_evals.jsonl").write_text("{}")
    assert locate("latest", None, str(tmp_path)) == (str(tmp_path), 5)


def test_locate_finds_what_the_checkpointer_saved(tmp_path):
    Checkpointer(str(tmp_path)).save(12, SMALL, META)
    assert locate("latest", None, str(tmp_path)) == (str(tmp_path), 12)


def test_locate_from_path(tmp_path):
    fake_checkpoint(tmp_path, 5)
    fake_checkpoint(tmp_path, 7)
    path = str(tmp_path / "global_step_5")
    assert locate("from_path", path, "elsewhere") == (str(tmp_path), 5)
    assert locate("from_path", path + "/", "elsewhere") == (str(tmp_path), 5)


@pytest.mark.parametrize("path", ["runs/step_5", "runs/global_step_x", "runs", None])
def test_locate_from_path_wants_a_step(path):
    with pytest.raises(ValueError, match=r"resume_path=.* must end in global_step_<N>"):
        locate("from_path", path, "elsewhere")


def test_locate_from_path_wants_a_folder_that_exists(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"resume_path='.*global_step_5' does not exist"):
        locate("from_path", str(tmp_path / "global_step_5"), "elsewhere")


def test_meta_is_readable_json(tmp_path):
    Checkpointer(str(tmp_path)).save(1, SMALL, META)
    (file,) = (tmp_path / "global_step_1" / "meta").rglob("metadata")
    assert json.loads(file.read_text()) == META


def test_another_config_is_refused_but_for_what_may_change(tmp_path):
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.save(7, SMALL, META)
    checkpointer.close()
    further = {"trainer": {"seed": 1, "epochs": 3, "betas": (0.9, 0.99)}}  # a tuple is a list
    restore(str(tmp_path), 7, SMALL, META["model"], further)
    other = {"trainer": {"seed": 2, "epochs": 2, "betas": [0.9, 0.99]}}
    with pytest.raises(ValueError, match=r"another config; .*{'trainer.seed': \(1, 2\)}"):
        restore(str(tmp_path), 7, SMALL, META["model"], other)
