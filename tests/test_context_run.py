"""Runs whose rows are spread over devices: learnt, stopped, resumed, and moved to other meshes."""

import numpy as np
import pytest

from jaxrl import config as cfg
from jaxrl.train import train
from tests.test_resume import kill_after_step_2
from tests.test_train import assert_bitwise_equal, metric_lines, small

QUIET = dict.fromkeys(
    ("trainer.eval_interval", "trainer.hf_save_interval", "trainer.print_example_interval"), -1
) | {"trainer.dump_data_batch": False}
CONTEXT = {"trainer.policy.mesh.context": 2, "trainer.use_sample_packing": True}


@pytest.mark.slow  # tests/test_resume.py kills others in the default run
def test_a_run_killed_and_resumed_equals_uninterrupted(tmp_path):
    whole = train(small(tmp_path / "whole", **QUIET, **CONTEXT))
    config = small(tmp_path / "parts", **QUIET, **CONTEXT)
    (tmp_path / "parts").mkdir()
    kill_after_step_2(tmp_path / "parts", config)
    again = train(config)
    assert_bitwise_equal(again.state, whole.state)
    assert metric_lines(tmp_path / "parts") == metric_lines(tmp_path / "whole")
    for line in metric_lines(tmp_path / "whole"):
        assert line["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
    # a checkpoint moves between meshes: the last two steps on devices that have whole rows
    other = small(tmp_path / "moved", **QUIET, **{"trainer.use_sample_packing": True})
    other.trainer.resume_mode = "from_path"
    other.trainer.resume_path = str(tmp_path / "parts" / "checkpoints" / "global_step_2")
    moved = train(other)
    assert int(moved.state.step) == 4
    for name in ("loss/avg_final_rewards", "policy/policy_entropy"):
        mine, others = (
            [x[name] for x in metric_lines(tmp_path / of)[-2:]] for of in ("whole", "moved")
        )
        assert mine == pytest.approx(others, rel=1e-4)


@pytest.mark.slow
def test_a_reference_may_have_whole_rows_where_the_policy_has_not(tmp_path):
    other = {"trainer.ref.mesh.context": 1, "trainer.context_strategy": "ring"}
    run = train(small(tmp_path, **QUIET, **CONTEXT, **other, **{"trainer.max_training_steps": 1}))
    assert int(run.state.step) == 1


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"trainer.context_strategy": "ring"}, "context_strategy='ring': has no effect"),
        (
            {"trainer.policy.mesh.context": 4, "trainer.context_strategy": "ulysses"},
            "mesh.context=4 does not divide the 4 heads and 2 key/value heads",
        ),
        ({"trainer.policy.mesh.context": 3}, "context: 1, 2, 4 or 8 would fit"),
    ],
)
def test_what_cannot_be_spread_is_refused(tmp_path, changes, wrong):
    with pytest.raises(ValueError, match=wrong):
        train(small(tmp_path, **QUIET, **changes))


def test_skyrls_sizes_become_the_axis():
    config = cfg.TrainConfig()
    config.trainer.policy.sequence_parallel_size = 4
    config.trainer.ref.megatron_config.context_parallel_size = 2
    config.trainer.policy.megatron_config.pipeline_model_parallel_size = 8
    resolved = cfg.resolve(config).trainer
    assert resolved.policy.mesh.context == 4
    assert resolved.ref.mesh.context == 2
    assert np.prod([resolved.policy.mesh.data, resolved.policy.mesh.tensor]) == 1
