"""A run of each kind of layer is killed, goes on, and is the run that nobody disturbed.

Dense layers are those of tests/test_resume.py; experts have more to keep, tests/test_experts.py.
"""

import pytest

from jaxrl.train import train
from tests.test_resume import kill_after_step_2
from tests.test_train import ROOT, assert_bitwise_equal, metric_lines, small


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixture", "hybrid", "latent"])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, kind):
    changes = {"trainer.policy.model.path": str(ROOT / "configs" / f"tiny_{kind}_model")}
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    parts.mkdir()
    undisturbed = train(small(whole, **changes))
    kill_after_step_2(parts, small(parts, **changes))
    resumed = train(small(parts, **changes))
    assert metric_lines(parts) == metric_lines(whole)
    assert_bitwise_equal(resumed.state, undisturbed.state)
