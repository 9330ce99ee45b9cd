"""Which log-probs a step compares the policy with, and what they cost."""

import numpy as np
import pytest

from jaxrl.config import AlgorithmConfig, DecoupledPPOConfig, TrainConfig
from jaxrl.records.batch_file import batch_path, load_batch
from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer
from jaxrl.training.objective import policy_objective
from jaxrl.training.old_log_probs import with_old_log_probs
from jaxrl.training.staleness import with_staleness
from tests.test_train import metric_lines, small
from tests.training.test_update import make_batch


def anchored(algorithm, batch, step=5):
    """The batch with its old log-probs and the age of its tokens, and the number of passes."""
    config = TrainConfig()
    config.trainer.algorithm = algorithm
    config.trainer.train_batch_size, config.trainer.policy_mini_batch_size = 8, 4
    passes = []

    def forward(given, with_entropy):
        passes.append(with_entropy)
        return np.full_like(given.rewards, -7), np.zeros_like(given.rewards)

    if "staleness" in policy_objective(algorithm, 1).reads:
        batch = with_staleness(batch, step)
    batch, _ = with_old_log_probs(
        batch, forward, settings=config.trainer, sampling=config.generator.sampling_params
    )
    return batch, len(passes)


def test_the_sampler_stands_in_for_the_old_policy_without_a_forward_pass():
    batch = make_batch().replace(old_log_probs=None, staleness=None)
    found, passes = anchored(AlgorithmConfig(old_log_probs="rollout"), batch)
    assert passes == 0
    assert found.old_log_probs is batch.rollout_log_probs
    found, passes = anchored(AlgorithmConfig(), batch)
    assert passes == 1
    assert (found.old_log_probs == -7).all()
    assert found.staleness is None  # nobody asks


def test_the_age_of_tokens_is_counted_from_the_finished_steps():
    batch = make_batch().replace(old_log_probs=None, staleness=None)
    proximal = DecoupledPPOConfig(proximal="log_linear")
    algorithm = AlgorithmConfig(policy_loss_type="decoupled_ppo", decoupled_ppo=proximal)
    found, passes = anchored(algorithm, batch)
    assert passes == 0
    assert found.old_log_probs is None
    expected = np.where(batch.loss_mask != 0, 5 - batch.token_versions, 0)
    np.testing.assert_array_equal(found.staleness, expected)
    assert expected.max() == 5  # of version 0
    kept = batch.replace(context_versions=np.minimum(batch.token_versions, 1))  # old keys, values
    older = np.where(batch.loss_mask != 0, 5 - np.minimum(batch.token_versions, 1), 0)
    np.testing.assert_array_equal(anchored(algorithm, kept)[0].staleness, older)
    assert (older > expected).any()
    unknown, _ = anchored(algorithm, batch.replace(token_versions=None))
    assert unknown.staleness is None


class Aged(Trainer):
    """Says that every other sample is of the version before, and keeps what the loss got."""

    def rollouts(self, step):
        output, uids = super().rollouts(step)
        assert all(set(row) == {step - 1} for row in output["token_versions"])
        if step > 1:
            for row in output["token_versions"][::2]:
                row[:] = [step - 2] * len(row)
        return output, uids


class AgedExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return Aged(*args, **kwargs)


@pytest.mark.slow
def test_a_run_with_tokens_of_several_ages_compiles_nothing_anew(tmp_path):
    changes = {
        "trainer.algorithm.policy_loss_type": "decoupled_ppo",
        "trainer.algorithm.decoupled_ppo.proximal": "log_linear",
        "trainer.algorithm.use_kl_loss": False,
        "trainer.max_training_steps": 3,
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": -1,
        "trainer.use_sample_packing": True,
    }
    trainer = AgedExp(small(tmp_path, **changes)).run()
    assert trainer.watch.recompiles == 0
    batch = load_batch(batch_path(tmp_path / "exports", 3))
    assert batch.old_log_probs is None
    sampled = batch.loss_mask != 0
    for row, age in ((0, 1), (1, 0)):
        assert set(batch.token_versions[row][sampled[row]]) == {2 - age}
        assert set(batch.staleness[row][sampled[row]]) == {age}
    lines = metric_lines(tmp_path)
    # the sampler is the policy: even the older half was drawn by the newest weights
    weight = "policy/loss_metrics/behave_weight_mean"
    assert lines[0][weight] == pytest.approx(1, abs=1e-5)
    assert all(line[weight] == pytest.approx(1, abs=0.05) for line in lines)
