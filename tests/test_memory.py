"""Whole runs of which an estimator, a callback or a trainer keeps something between steps."""

import jax
import numpy as np
import pytest

from jaxrl.audit import audit
from jaxrl.records.checkpoint import CheckpointError
from jaxrl.replay import Compared, replay
from jaxrl.train import train
from tests.remembering import CurriculumExp
from tests.test_resume import kill_after_step_2
from tests.test_train import assert_bitwise_equal, metric_lines, small

PARTS = "tests.remembering"
CALLBACKS = "trainer.watching.callbacks"
QUIET = dict.fromkeys(("trainer.eval_interval", "trainer.hf_save_interval"), -1)
KEEPING = {
    **QUIET,
    "trainer.algorithm.advantage_estimator": f"{PARTS}:running_baseline",
    CALLBACKS: [f"{PARTS}:HalveEachStep"],
    "trainer.ledger.record_checksums": True,
}


@pytest.fixture(name="kept", scope="module")
def kept_fixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    return folder, train(small(folder, **KEEPING))


def test_what_is_kept_is_in_the_state_and_changes_the_steps(kept):
    folder, trainer = kept
    lines = metric_lines(folder)
    rewards = [line["reward/avg_raw_reward"] for line in lines]
    baseline = 0.0
    for reward in rewards:
        baseline = (baseline + reward) / 2
    memory = trainer.memory
    assert memory["advantage_estimator"]["steps"] == 4  # rows of zeros of the warm-up are none
    assert memory["advantage_estimator"]["baseline"] == pytest.approx(baseline, rel=1e-6)
    np.testing.assert_allclose(memory["best"], rewards[-2:], rtol=1e-6)
    # the learning rate of a step, 1, 1/2, 1/4, 1/8 of the config's; the log is after its halving
    lr = trainer.config.trainer.policy.optimizer_config.lr
    rates = [line["policy/policy_lr"] for line in lines]
    np.testing.assert_allclose(rates, [lr, lr / 2, lr / 4, lr / 8], rtol=1e-6)
    assert [line["lr_scale"] for line in lines] == [1 / 2, 1 / 4, 1 / 8, 1 / 16]


def test_the_steps_of_a_run_that_keeps_something_replay_bit_for_bit(kept):
    folder, trainer = kept
    for start in ("start", None):
        found = [x for x in replay(trainer.ledger.folder, checkpoint=start)]
        found = [x for x in found if isinstance(x, Compared)]
        assert [x.step for x in found] == [1, 2, 3, 4][start is None :]
        assert not any(x.different for x in found), found
    assert {check.result for check in audit(folder / "quickstart")} == {"passed"}


def test_a_checkpoint_with_other_memory_is_refused_and_left_as_it_is(kept, tmp_path):
    folder, _ = kept
    path = folder / "checkpoints" / "global_step_2"
    resumed = {"trainer.resume_mode": "from_path", "trainer.resume_path": str(path)}
    missing = r"\(saved, this run\): {'best': \('float32\[2\]', None\), 'lr_scale'"
    with pytest.raises(CheckpointError, match=f"keep different things between steps.*{missing}"):
        train(small(tmp_path, **{**KEEPING, **resumed, CALLBACKS: []}))
    assert path.exists()


@pytest.mark.slow
def test_a_callback_that_remembers_too_late_is_told(tmp_path):
    settings = {CALLBACKS: [f"{PARTS}:RemembersWhileSaving"], "trainer.max_training_steps": 2}
    with pytest.raises(ValueError, match=r"on_save of RemembersWhileSaving calls remember: the ch"):
        train(small(tmp_path, **QUIET, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "lockstep"])
def test_killed_and_resumed_equals_uninterrupted(kept, tmp_path, schedule):
    settings, whole = KEEPING, kept
    if schedule == "lockstep":
        ahead = {"enabled": True, "schedule": "lockstep", "max_staleness_steps": 1}
        settings = {
            **KEEPING,
            "trainer.fully_async": ahead,
            "trainer.policy_mini_batch_size": 4,
            "trainer.algorithm.policy_loss_type": "rollout_is",
        }
        whole = tmp_path / "whole", train(small(tmp_path / "whole", **settings))
    cut = tmp_path / "cut"
    cut.mkdir()
    kill_after_step_2(cut, small(cut, **settings))
    resumed = train(small(cut, **settings))
    assert metric_lines(cut) == metric_lines(whole[0])
    assert_bitwise_equal(resumed.state, whole[1].state)
    found = [x for x in replay(resumed.ledger.folder) if isinstance(x, Compared)]
    assert len(found) > 1 and not any(x.different for x in found), found


@pytest.mark.slow
def test_a_curriculum_goes_on_where_it_was(tmp_path):
    whole = CurriculumExp(small(tmp_path / "whole", **QUIET)).run()
    assert whole.memory["rows"] == 4 * 2**4
    path = str(tmp_path / "whole" / "checkpoints" / "global_step_2")
    resumed = {"trainer.resume_mode": "from_path", "trainer.resume_path": path}
    again = CurriculumExp(small(tmp_path / "again", **QUIET, **resumed)).run()
    assert metric_lines(tmp_path / "again") == metric_lines(tmp_path / "whole")[2:]
    assert_bitwise_equal(again.state, whole.state)
    run = whole.ledger.folder
    found = [x for x in replay(run, run_class=CurriculumExp) if isinstance(x, Compared)]
    assert [x.step for x in found] == [2, 3, 4] and not any(x.different for x in found)
    checks = {check.name: check for check in audit(run)}
    assert checks["order of the data"].result == "unknown"
    assert {check.result for check in checks.values()} == {"passed", "unknown"}


@pytest.mark.slow
def test_microbatches_and_packing_change_no_gradient_of_a_run_that_keeps_something(kept, tmp_path):
    _, whole = kept
    settings = {"trainer.use_sample_packing": True, "trainer.max_training_steps": 1}
    packed = train(small(tmp_path, **{**KEEPING, **settings}))
    assert packed.memory["advantage_estimator"]["steps"] == 1
    line, first = metric_lines(tmp_path)[0], metric_lines(kept[0])[0]
    assert line["policy/grad_norm"] == pytest.approx(first["policy/grad_norm"], rel=1e-4)
    assert jax.tree.structure(packed.state) == jax.tree.structure(whole.state)
