"""How much likelier a teacher finds each token."""

import numpy as np
import pytest

from jaxrl import config as cfg
from jaxrl.advantages.on_policy_distillation import on_policy_distillation

MASK = np.array([[0, 1, 1, 1]], np.float32)
STUDENT = np.log(np.array([[1, 0.5, 0.25, 0.5]], np.float32))
TEACHER = np.log(np.array([[0.5, 0.25, 0.5, 0.5]], np.float32))
LN2 = np.log(2)


def estimate(**more):
    rewards = np.full((1, 4), 9.0, np.float32)
    index = np.zeros(1, np.int32)
    data = {"old_log_probs": STUDENT, "ref_log_probs": TEACHER}
    return on_policy_distillation(rewards, MASK, index, **data, **more)


def test_literal():
    # log 0.25/0.5 = -ln 2, log 0.5/0.25 = ln 2, log 1 = 0; the prompt and the reward play no part
    for found in estimate():
        np.testing.assert_allclose(found, [[0, -LN2, LN2, 0]], rtol=1e-6)


def test_observations_have_none():
    advantages, _ = estimate(loss_mask=np.array([[0, 1, 0, 1]], np.float32))
    np.testing.assert_allclose(advantages, [[0, -LN2, 0, 0]], rtol=1e-6)


def test_its_mean_over_the_students_tokens_is_minus_the_reverse_kl():
    """sum_a p(a) (log q(a) - log p(a)) = -KL(p || q), by hand for three tokens."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    advantages, _ = on_policy_distillation(
        np.zeros((3, 1)),
        np.ones((3, 1)),
        np.arange(3),
        old_log_probs=np.log(p)[:, None],
        ref_log_probs=np.log(q)[:, None],
    )
    # 0.5 ln(0.5/0.2) + 0.2 ln(0.2/0.5) = 0.3 ln 2.5
    assert float(p @ np.asarray(advantages)[:, 0]) == pytest.approx(-0.3 * np.log(2.5), rel=1e-5)


def test_the_policy_cannot_be_its_own_teacher():
    config = cfg.apply_overrides(
        cfg.TrainConfig(),
        {"trainer.algorithm.advantage_estimator": "on_policy_distillation"},
    )
    with pytest.raises(ValueError, match=r"trainer.ref.model.path=.*is the policy's own model"):
        cfg.validate(config)
    cfg.validate(cfg.apply_overrides(config, {"trainer.ref.model.path": "a/teacher"}))


def test_rows_of_failed_environments_have_no_advantage():
    # teacher less student on the one sampled token: -1 - (-3) = 2
    ones, index = np.ones((2, 1)), np.arange(2)
    advantages, _ = on_policy_distillation(
        ones,
        ones,
        index,
        old_log_probs=-3 * ones,
        ref_log_probs=-ones,
        loss_mask=np.array([[1.0], [0.0]]),
    )
    np.testing.assert_array_equal(advantages, [[2], [0]])
