"""Runs whose objective changes from step to step: entropy's coefficient, a critic's head start."""

import jax
import numpy as np
import pytest

from jaxrl.train import BasePPOExp, exit_status
from jaxrl.trainer import Trainer
from tests.test_resume import stopped_as_whole
from tests.test_train import metric_lines, small

ADAPTIVE = {
    "trainer.algorithm.use_entropy_loss": True,
    "trainer.algorithm.entropy_loss_coef": 0.02,
    "trainer.algorithm.entropy_ctrl.type": "adaptive",
    "trainer.algorithm.entropy_ctrl.target": 50.0,  # more than there can be: it rises
    "trainer.algorithm.entropy_ctrl.delta": 0.01,
    "trainer.algorithm.entropy_ctrl.max_coef": 0.045,
    "trainer.algorithm.opsm_delta": 0.1,
    "trainer.algorithm.top_entropy_quantile": 0.5,
    "trainer.algorithm.positive_nll_coef": 0.1,
    "trainer.algorithm.use_unbiased_kl": True,
    "trainer.algorithm.kl_loss_reduction": "loss",
    "trainer.algorithm.off_policy_correction.preset": "k3_rs_token_tis",
}


@pytest.mark.slow  # three runs; tests/test_memory.py resumes what is kept between steps
def test_the_coefficient_of_the_entropy_is_resumed(tmp_path):
    whole, _ = stopped_as_whole(tmp_path, lambda folder: small(folder, **ADAPTIVE))
    used = [x["policy/entropy_coef"] for x in metric_lines(whole) if "policy/entropy_coef" in x]
    np.testing.assert_allclose(used, [0.03, 0.04, 0.045, 0.045], rtol=1e-6)  # of the step after


class Watched(Trainer):
    """Records of each step whether it left the policy's weights as they were."""

    stayed = {}  # noqa: RUF012

    def update(self, batch, step):
        before = jax.device_get(self.state.params)
        super().update(batch, step)
        same = jax.tree.map(np.array_equal, before, jax.device_get(self.state.params))
        self.stayed[step] = all(jax.tree.leaves(same))


class WatchedExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return Watched(*args, **kwargs)


@pytest.mark.slow
def test_while_the_critic_warms_up_the_policy_stays(tmp_path):
    settings = {
        "trainer.algorithm.advantage_estimator": "gae",
        "trainer.critic.model.path": "configs/tiny_char_model",
        "trainer.critic.model.random_init": True,
        "trainer.critic_mini_batch_size": 2,
        "trainer.critic_warmup_steps": 2,
        "trainer.max_training_steps": 3,
    }
    assert exit_status(WatchedExp, small(tmp_path, **settings)) == 0
    assert Watched.stayed == {1: True, 2: True, 3: False}
    steps = [x for x in metric_lines(tmp_path) if "critic/critic_loss" in x]
    assert len(steps) == 3
    assert ["policy/policy_loss" in x for x in steps] == [False, False, True]
