"""REINFORCE with a clipped importance weight."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl.losses.cispo import cispo
from jaxrl.training.objective import reduce_metric


def config(low=0.5, high=1.0, anchor="old"):
    return SimpleNamespace(
        cispo=SimpleNamespace(cispo_eps_clip_low=low, cispo_eps_clip_high=high, cispo_anchor=anchor)
    )


# New probabilities 1/2, 1/2, 1/8; ratios to the old policy 4, 1, 1/4, to the rollout policy 1, 2, 1
NEW = np.log(np.array([[0.5, 0.5, 0.125]], np.float32))
OLD = np.log(np.array([[0.125, 0.5, 0.5]], np.float32))
ROLLOUT = np.log(np.array([[0.5, 0.25, 0.125]], np.float32))
ADVANTAGES = np.array([[1, -1, 2]], np.float32)


def loss_and_grad(config, mask=None):
    def objective(log_probs):
        loss, metrics = cispo(log_probs, OLD, ADVANTAGES, config, mask, ROLLOUT)
        return loss.sum(), (loss, metrics)

    grad, (loss, metrics) = jax.grad(objective, has_aux=True)(NEW)
    return loss, grad, metrics


def test_literal_value_gradient_and_metrics():
    # bounds 0.5 and 2: weights 2, 1, 0.5; L = -w A log p, gradient -w A
    #   log 2 = 0.6931472: -2 * 1 * -0.6931472 = 1.3862944; 1 * -0.6931472 = -0.6931472;
    #   -0.5 * 2 * -2.0794415 = 2.0794415; gradients -2, 1, -1
    loss, grad, metrics = loss_and_grad(config())
    np.testing.assert_allclose(loss, [[1.3862944, -0.6931472, 2.0794415]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[-2, 1, -1]], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_ratio"], [[1, 0, 1]])
    np.testing.assert_allclose(metrics["cispo/ratio_mean"], [[4, 1, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(metrics["cispo/ratio_clamped_mean"], [[2, 1, 0.5]], rtol=1e-6)


def test_literal_of_the_rollout_anchor():
    # ratios 1, 2, 1, none beyond the bounds: gradients -1, 2, -2
    _, grad, metrics = loss_and_grad(config(anchor="rollout"))
    np.testing.assert_allclose(grad, [[-1, 2, -2]], rtol=1e-6)
    assert not metrics["clip_ratio"].any()


def test_a_clipped_token_keeps_its_gradient():
    # a band of 1 to 1: all weights are 1, the gradient is -A
    _, grad, _ = loss_and_grad(config(low=0.0, high=0.0))
    np.testing.assert_allclose(grad, -ADVANTAGES, rtol=1e-6)


def test_masked_tokens_have_no_part_in_the_extremes():
    mask = np.array([[0, 1, 1]], np.float32)
    _, _, metrics = loss_and_grad(config(), mask)
    extremes = {
        k: reduce_metric(k, metrics[k], mask, mask / 2)
        for k in ("cispo/ratio_max", "cispo/ratio_min")
    }
    assert extremes == {"cispo/ratio_max": 1.0, "cispo/ratio_min": 0.25}
    empty = np.zeros_like(mask)
    assert reduce_metric("cispo/ratio_max", metrics["cispo/ratio_max"], empty, empty) == -np.inf


def test_unknown_anchor_and_missing_log_probs():
    with pytest.raises(ValueError, match="cispo_anchor='new' must be 'old' or 'rollout'"):
        cispo(NEW, OLD, ADVANTAGES, config(anchor="new"))
    with pytest.raises(ValueError, match="'rollout' needs rollout_log_probs, got None"):
        cispo(NEW, OLD, ADVANTAGES, config(anchor="rollout"))
