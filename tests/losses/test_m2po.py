"""A trust region on the second moment of the log ratios."""

import jax
import numpy as np
import pytest

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.m2po import ROW, m2po

# Log ratios; four that the advantage pushes on, two that it pulls back.
LOG_RATIOS = np.array([[0.1, 0.2, 0.5], [-0.3, -0.9, 2.0]], np.float32)
ADVANTAGES = np.array([[1, 1, 1], [-1, 1, -1]], np.float32)
ROLLOUT = np.full_like(LOG_RATIOS, -3)
NEW = ROLLOUT + LOG_RATIOS


def loss_and_grad(new=NEW, advantages=ADVANTAGES, **hyperparameters):
    def objective(log_probs):
        rollout = ROLLOUT[: len(new)]
        loss, metrics = m2po(log_probs, None, advantages, None, None, rollout, **hyperparameters)
        return loss.sum(), (loss, metrics["clip_ratio"])

    grad, (loss, dropped) = jax.grad(objective, has_aux=True)(new)
    return loss, dropped, grad


def test_literal_value_gradient_and_dropped_tokens():
    # squares of the four: 0.01, 0.04, 0.25, 0.09, mean 0.0975; without 0.25: 0.14 / 3 = 0.0467;
    # without 0.09 too: 0.05 / 2 = 0.025 <= 0.04. L = -r A, gradient the same
    #   exp(0.1) = 1.1051709, exp(0.2) = 1.2214028, exp(-0.9) = 0.4065697, exp(2) = 7.3890561
    loss, dropped, grad = loss_and_grad()
    expected = [[-1.1051709, -1.2214028, 0], [0, -0.4065697, 7.3890561]]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, expected, rtol=1e-5)
    np.testing.assert_array_equal(dropped, [[0, 0, 1], [1, 0, 0]])


@pytest.mark.parametrize(
    ("tau", "expected"),
    [
        (0.05, [[0, 0, 1], [0, 0, 0]]),  # 0.0467
        (0.1, [[0, 0, 0], [0, 0, 0]]),  # 0.0975
        (0.02, [[0, 1, 1], [1, 0, 0]]),  # 0.01
        (0.001, [[1, 1, 1], [1, 0, 0]]),  # not even the nearest is near enough
    ],
)
def test_as_few_as_need_be_are_dropped(tau, expected):
    _, dropped, _ = loss_and_grad(tau=tau)
    np.testing.assert_array_equal(dropped, expected)


def test_of_tokens_that_are_equally_far_all_stay_or_none():
    # squares 0.25, 0.25, 0.01: with one of the two the mean is 0.13
    new = ROLLOUT[:1] + np.array([[0.5, 0.1, 0.5]], np.float32)
    _, dropped, _ = loss_and_grad(new, ADVANTAGES[:1], tau=0.14)
    np.testing.assert_array_equal(dropped, [[1, 0, 1]])
    _, dropped, _ = loss_and_grad(new, ADVANTAGES[:1], tau=0.18)
    assert not dropped.any()


def test_masked_tokens_do_not_count():
    # of 0.01, 0.04 and 0.09 the mean is 0.0467; the far token is masked
    mask = np.array([[1, 1, 0], [1, 1, 1]], np.float32)
    _, metrics = m2po(NEW, None, ADVANTAGES, None, mask, ROLLOUT, tau=0.05)
    assert not metrics["clip_ratio"].any()


@pytest.mark.parametrize(
    ("advantages", "mask"), [([[1, 1, 0]], [[1, 1, 1]]), ([[1, 1, 1]], [[1, 1, 0]])]
)
def test_a_token_without_advantage_or_masked_does_not_lower_the_mean(advantages, mask):
    # 0.04, 0.09: mean 0.065, without 0.09: 0.04 <= 0.06; with a third, 0.01 or 0, neither is
    # dropped: 0.14 / 3 = 0.0467, 0.13 / 3 = 0.0433
    new = ROLLOUT[:1] + np.array([[0.2, 0.3, 0.1]], np.float32)
    advantages, mask = np.array(advantages, np.float32), np.array(mask, np.float32)
    _, metrics = m2po(new, None, advantages, None, mask, ROLLOUT[:1], tau=0.06)
    np.testing.assert_array_equal(metrics["clip_ratio"], [[0, 1, 0]])


def test_what_it_needs():
    with pytest.raises(ValueError, match="'m2po' needs rollout_log_probs, got None"):
        m2po(NEW, NEW, ADVANTAGES, None)
    ((field, fix),) = ROW.check(AlgorithmConfig(policy_loss_kwargs={"tau": 0.0}))
    assert (field, fix) == ("policy_loss_kwargs.tau", "must be > 0, e.g. 0.04")
