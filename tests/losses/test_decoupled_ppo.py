"""Decoupled PPO: a weight to the proximal policy, a clip around it."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl.losses.decoupled_ppo import decoupled_ppo
from jaxrl.losses.regular import regular


def config(proximal="forward", cap=5.0):
    own = SimpleNamespace(proximal=proximal, behave_cap=cap)
    return SimpleNamespace(eps_clip_low=0.2, eps_clip_high=0.2, decoupled_ppo=own)


def logs(*probabilities):
    return np.log(np.array([probabilities], np.float32))


def results(config, new, old, rollout, advantages, **keywords):
    advantages = np.array([advantages], np.float32)

    def objective(log_probs):
        given = log_probs, old, advantages, config
        loss, metrics = decoupled_ppo(*given, rollout_log_probs=rollout, **keywords)
        return loss.sum(), (loss, metrics)

    grad, (loss, metrics) = jax.grad(objective, has_aux=True)(new)
    return loss, grad, metrics


def test_literal_forward():
    # token 0: w = 1/2 / 1/4 = 2, r = 5/8 / 1/2 = 1.25, A = 2: -2 * 1.2 * 2 = -4.8, clipped
    # token 1: w = 1/4 / 1/2 = 0.5, r = 1, A = 2: -0.5 * 2 = -1, gradient -w r A = -1
    # token 2: w = 1/2 / 1/12 = 6 > 5: nothing (r = 0.5, A = -1 is clipped, too)
    # token 3: w = 1/2 / 1/8 = 4, r = 1.5, A = -1: -4 min(-1.5, -1.2) = 6, gradient -w r A = 6
    loss, grad, metrics = results(
        config(),
        new=logs(5 / 8, 1 / 4, 1 / 4, 3 / 4),
        old=logs(1 / 2, 1 / 4, 1 / 2, 1 / 2),
        rollout=logs(1 / 4, 1 / 2, 1 / 12, 1 / 8),
        advantages=[2, 2, -1, -1],
    )
    np.testing.assert_allclose(loss, [[-4.8, -1, 0, 6]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[0, -1, 0, 6]], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_ratio"], [[1, 0, 1, 0]])
    np.testing.assert_array_equal(metrics["behave_masked"], [[0, 0, 1, 0]])
    np.testing.assert_allclose(metrics["behave_weight_mean"], [[2, 0.5, 6, 4]], rtol=1e-6)


def test_literal_log_linear():
    # token 0, d = 0: prox = rollout: w = 1, r = 0.55 / 0.5 = 1.1, A = 1: -1.1
    # token 1, d = 1: prox = 1/4 * 4^(1/2) = 1/2: w = 2, r = 2, A = 1: -2 * 1.2 = -2.4, clipped
    # token 2, d = 1, A = -1: -2 min(-2, -1.2) = 4
    # token 3, d = 3: prox = 16^(-3/4) = 1/8: w = 1/8, r = 1/2, A = 1: -1/8 * 1/2 = -1/16
    # token 4, d = 3: prox = 1/16 * 16^(3/4) = 1/2: w = 8 > 5: nothing
    loss, grad, metrics = results(
        config("log_linear"),
        new=logs(0.55, 1, 1, 1 / 16, 1),
        old=None,
        rollout=logs(0.5, 1 / 4, 1 / 4, 1, 1 / 16),
        advantages=[1, 1, -1, 1, 1],
        staleness=np.array([[0, 1, 1, 3, 3]], np.int32),
    )
    np.testing.assert_allclose(loss, [[-1.1, -2.4, 4, -1 / 16, 0]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[-1.1, 0, 4, -1 / 16, 0]], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_ratio"], [[0, 1, 0, 0, 1]])
    np.testing.assert_array_equal(metrics["behave_masked"], [[0, 0, 0, 0, 1]])


def test_a_weight_at_the_cap_is_kept():
    same = logs(1 / 2)
    loss, _, _ = results(config(cap=2.0), new=same, old=same, rollout=logs(1 / 4), advantages=[1])
    np.testing.assert_array_equal(loss, [[-2]])


def test_without_staleness_both_forms_are_ppo():
    """The sampler is the policy at the start of the step: w = 1, the clip is around it."""
    rng = np.random.default_rng(0)
    new, old = (np.float32(rng.normal(-1.5, 0.4, (1, 9))) for _ in range(2))
    advantages = rng.normal(size=9)
    expected, _ = regular(new, old, np.float32(advantages)[None], config())
    age = np.zeros((1, 9), np.int32)
    for form, given in (("forward", {}), ("log_linear", {"staleness": age})):
        loss, _, _ = results(config(form), new, old, old, advantages, **given)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_what_is_missing_is_named():
    x = logs(0.5)
    with pytest.raises(ValueError, match="'decoupled_ppo' needs rollout_log_probs, got None"):
        results(config(), x, x, None, [1])
    with pytest.raises(ValueError, match="proximal='forward' needs old_log_probs, got None"):
        results(config(), x, None, x, [1])
    with pytest.raises(ValueError, match="the generator gives no 'token_versions'"):
        results(config("log_linear"), x, x, x, [1])
    with pytest.raises(ValueError, match="proximal='old' must be 'forward' or 'log_linear'"):
        results(config("old"), x, x, x, [1])
