"""Generalised advantage estimation with one lambda for the critic and one for the policy."""

import jax
import numpy as np
import pytest

from jaxrl.advantages.gae import gae as eager_gae
from jaxrl.advantages.vapo import vapo as eager

gae = jax.jit(eager_gae, static_argnames=("gamma", "lambd"))
vapo = jax.jit(eager, static_argnames=("gamma", "lambd", "critic_lambd", "length_adaptive_alpha"))

# The row of test_gae: r = 1, 2, 3, V = 1, 1, 2: errors 1, 3, 1. Returns with lambda 1: 6, 5, 3.
# With alpha 1/2 and 3 tokens lambda = 1 - 1/1.5 = 1/3: G = 1 + (3 + 1/3) / 3 = 19/9, 10/3, 1
# A second row of 2 tokens, r = 0, 4, V = 1, 1: errors 0, 3; alpha l = 1, lambda 0: G = 0, 3,
#   returns 0 + 3 + 1 = 4, 4. A third row failed.
# G of the 5 tokens: mean 17/9, deviations 2/9, 13/9, -8/9, -17/9, 10/9; squares (4 + 169 + 64 + 289
#   + 100) / 81 = 626/81, over 4: 1.9320988, std 1.3899996
#   advantages 0.1598722, 1.0391691, -0.6394886; -1.3589134, 0.7993608
REWARDS = np.array([[1, 2, 3], [0, 4, 0], [0, 0, 0]], np.float32)
VALUES = np.array([[1, 1, 2], [1, 1, 9], [1, 1, 1]], np.float32)
MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1]], np.float32)
LOSS_MASK = MASK * np.array([[1], [1], [0]], np.float32)
INDEX = np.zeros(3, int)


def test_literal():
    advantages, returns = vapo(REWARDS, LOSS_MASK, INDEX, VALUES, length_adaptive_alpha=0.5)
    np.testing.assert_allclose(returns, [[6, 5, 3], [4, 4, 0], [0, 0, 0]], rtol=1e-6)
    expected = [[0.1598722, 1.0391691, -0.6394886], [-1.3589134, 0.7993608, 0], [0, 0, 0]]
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)


def test_short_rows_look_one_token_ahead():
    # by default alpha l is 0.15: lambda 0, as for GAE with lambda 0; the returns have lambda 1
    given = REWARDS, MASK, INDEX, VALUES
    advantages, returns = vapo(*given, gamma=0.9, loss_mask=LOSS_MASK)
    expected, _ = gae(*given, gamma=0.9, lambd=0.0, loss_mask=LOSS_MASK)
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    _, expected = gae(*given, gamma=0.9, lambd=1.0, loss_mask=LOSS_MASK)
    np.testing.assert_allclose(returns, expected, rtol=1e-6)


def test_without_alpha_the_two_lambdas_are_fixed():
    given = REWARDS, MASK, INDEX, VALUES
    advantages, returns = vapo(*given, lambd=0.95, critic_lambd=0.5, length_adaptive_alpha=None)
    np.testing.assert_allclose(advantages, gae(*given, lambd=0.95)[0], rtol=1e-6)
    np.testing.assert_allclose(returns, gae(*given, lambd=0.5)[1], rtol=1e-6)


def test_equals_the_definition_over_observations():
    """A = sum_k (gamma lambda)^k delta_(t + k) over the sampled tokens alone, in loops."""
    rng = np.random.default_rng(0)
    shape, gamma, alpha = (4, 40), 0.9, 0.3
    rewards, values = rng.normal(size=(2, *shape))
    response = (np.arange(40) >= 3) * np.ones(shape)
    loss_mask = response * (rng.random(shape) < 0.7)
    loss_mask[3] = 0
    sums, expected = np.zeros(shape), np.zeros(shape)
    for i in range(3):
        at = np.flatnonzero(loss_mask[i])
        owner = np.maximum(np.searchsorted(at, np.arange(40), side="right") - 1, 0)
        earned = [(rewards[i] * response[i])[owner == n].sum() for n in range(len(at))]
        v = np.append(values[i, at], 0)
        errors = earned + gamma * v[1:] - v[:-1]
        lambd = max(1 - 1 / (alpha * len(at)), 0)
        for n in range(len(at)):
            steps = np.arange(len(at) - n)
            sums[i, at[n]] = ((gamma * lambd) ** steps * errors[n:]).sum()
            expected[i, at[n]] = (gamma**steps * errors[n:]).sum() + v[n]
    tokens = sums[loss_mask != 0]
    normalised = (sums - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8) * loss_mask
    with jax.enable_x64(True):
        advantages, returns = vapo(
            rewards,
            response,
            np.zeros(4, int),
            np.where(loss_mask != 0, values, np.nan),
            gamma=gamma,
            length_adaptive_alpha=alpha,
            loss_mask=loss_mask,
        )
    np.testing.assert_allclose(advantages, normalised, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(returns, expected, rtol=1e-9, atol=1e-12)


def test_it_needs_values():
    with pytest.raises(ValueError, match="'vapo' needs the values of a critic, got None"):
        vapo(REWARDS, MASK, INDEX)
