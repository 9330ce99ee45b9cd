"""A trust region on the divergence."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl.losses.dppo import dppo


def config(kind="binary_tv", low=0.25, high=0.25):
    return SimpleNamespace(dppo=SimpleNamespace(dppo_type=kind, delta_low=low, delta_high=high))


# p (new) and q (rollout): up by 0.5, down by 0.5, up by exactly 0.25, up by 0.5
P = np.log(np.array([[0.75, 0.25, 0.5, 0.75]], np.float32))
Q = np.log(np.array([[0.25, 0.75, 0.25, 0.25]], np.float32))
ADVANTAGES = np.array([[1, -1, 1, -1]], np.float32)


def loss_and_grad(config, old=None, rollout=Q, advantages=ADVANTAGES):
    def objective(log_probs):
        loss, metrics = dppo(log_probs, old, advantages, config, None, rollout)
        return loss.sum(), (loss, metrics["clip_ratio"])

    grad, (loss, dropped) = jax.grad(objective, has_aux=True)(P)
    return loss, grad, dropped


def test_literal_total_variation():
    # tokens 0 and 1 moved by 0.5 > 0.25 where A pushes them: dropped; token 2 is at the bound and
    # token 3 moves back: kept with L = -r A, gradient -r A: r = 2 and 3
    loss, grad, dropped = loss_and_grad(config())
    np.testing.assert_allclose(loss, [[0, 0, -2, 3]], rtol=1e-6)
    np.testing.assert_allclose(grad, [[0, 0, -2, 3]], rtol=1e-6)
    np.testing.assert_array_equal(dropped, [[1, 1, 0, 0]])


def test_literal_binary_kl():
    # KL(q, p) of token 0: 1/4 log(1/3) + 3/4 log(3) = 0.5493061; of token 1 the same;
    # of token 2 (q 1/4, p 1/2): 1/4 log(1/2) + 3/4 log(3/2) = 0.1308124
    for bound, expected in ((0.55, [[0, 0, 0, 0]]), (0.54, [[1, 1, 0, 0]]), (0.13, [[1, 1, 1, 0]])):
        _, _, dropped = loss_and_grad(config("binary_kl", bound, bound))
        np.testing.assert_array_equal(dropped, expected)


def test_the_bounds_are_separate():
    _, _, dropped = loss_and_grad(config(low=0.6))
    np.testing.assert_array_equal(dropped, [[1, 0, 0, 0]])
    _, _, dropped = loss_and_grad(config(high=0.6))
    np.testing.assert_array_equal(dropped, [[0, 1, 0, 0]])


def test_the_anchor_is_the_rollout_policy_if_it_is_known():
    with_rollout = loss_and_grad(config(), old=P, rollout=Q)
    with_old = loss_and_grad(config(), old=Q, rollout=None)
    for one, other in zip(with_rollout, with_old, strict=True):
        np.testing.assert_array_equal(one, other)


def test_unknown_divergence_and_no_anchor():
    with pytest.raises(ValueError, match="Invalid DPPO type 'tv'. Must be 'binary_tv'"):
        loss_and_grad(config("tv"))
    with pytest.raises(ValueError, match="needs rollout_log_probs or old_log_probs"):
        loss_and_grad(config(), old=None, rollout=None)
