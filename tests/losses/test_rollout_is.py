"""REINFORCE weighted by the ratio to the rollout policy."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl.losses.rollout_is import rollout_is

CONFIG = SimpleNamespace(eps_clip_low=0.5, eps_clip_high=1.0)


def test_literal_value_gradient_and_clip_ratio():
    # ratios to the rollout policy 1.5, 0.5, 2, 4 with p = 3/8, 1/8, 1/2, 1/2; the band is open:
    # 0.5 < r < 2, so only the first is inside: L = -1.5 * 2 * log(3/8) = 2.9424878, gradient -3
    new = np.log(np.array([[0.375, 0.125, 0.5, 0.5]], np.float32))
    rollout = np.log(np.array([[0.25, 0.25, 0.25, 0.125]], np.float32))
    advantages = np.full_like(new, 2.0)

    def objective(log_probs):
        loss, metrics = rollout_is(log_probs, None, advantages, CONFIG, rollout_log_probs=rollout)
        return loss.sum(), (loss, metrics)

    grad, (loss, metrics) = jax.grad(objective, has_aux=True)(new)
    np.testing.assert_allclose(loss, [[2.9424878, 0, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[-3, 0, 0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_ratio"], [[0, 1, 1, 1]])


def test_it_needs_rollout_log_probs():
    with pytest.raises(ValueError, match="'rollout_is' needs rollout_log_probs, got None"):
        rollout_is(np.zeros((1, 1)), np.zeros((1, 1)), np.zeros((1, 1)), CONFIG)
