"""Generalised advantage estimation."""

import jax
import numpy as np
import pytest

from jaxrl.advantages.gae import gae as eager

gae = jax.jit(eager, static_argnames=("gamma", "lambd"))

# One row, r = 1, 2, 3, V = 1, 1, 2 (0 after the end):
#   errors delta = 1 + g V' - V: with g = 1: 1 + 1 - 1 = 1, 2 + 2 - 1 = 3, 3 + 0 - 2 = 1
REWARDS = np.array([[1, 2, 3]], np.float32)
VALUES = np.array([[1, 1, 2]], np.float32)
MASK = np.ones((1, 3), np.float32)
INDEX = np.array([0])


def whitened(row):
    """Shifted to mean 0 and scaled to a variance (n - 1) of 1."""
    row = np.array(row, float)
    return (row - row.mean()) / np.sqrt(row.var(ddof=1) + 1e-8)


def test_literal_returns_and_advantages():
    # gamma = lambda = 1: G = 5, 4, 1, returns G + V = 6, 5, 3
    # mean 10/3, deviations 5/3, 2/3, -7/3; variance (25 + 4 + 49) / 9 / 2 = 4.3333333,
    # std 2.0816660: advantages 0.8006408, 0.3202563, -1.1208971
    advantages, returns = gae(REWARDS, MASK, INDEX, VALUES)
    np.testing.assert_allclose(returns, [[6, 5, 3]], rtol=1e-6)
    np.testing.assert_allclose(advantages, [[0.8006408, 0.3202563, -1.1208971]], rtol=1e-5)


def test_literal_discounts():
    # gamma 1/2: delta = 1 + 0.5 - 1 = 0.5, 2 + 1 - 1 = 2, 3 - 2 = 1
    #   lambda 1: G = 0.5 + (2 + 0.5) / 2 = 1.75, 2.5, 1; returns 2.75, 3.5, 3
    _, returns = gae(REWARDS, MASK, INDEX, VALUES, gamma=0.5)
    np.testing.assert_allclose(returns, [[2.75, 3.5, 3]], rtol=1e-6)
    # lambda 1/2, gamma 1: delta = 1, 3, 1: G = 1 + 3.5 / 2 = 2.75, 3.5, 1; returns 3.75, 4.5, 3
    _, returns = gae(REWARDS, MASK, INDEX, VALUES, lambd=0.5)
    np.testing.assert_allclose(returns, [[3.75, 4.5, 3]], rtol=1e-6)


def test_observation_tokens_are_passed_over():
    # the literal row with an observation between the first tokens and one at the end; what is
    # earned on an observation (2 of the 2 + 0; 3 of the 0 + 3) counts for the token before
    rewards = np.array([[0, 1, 0, 2, 3, 0]], np.float32)
    values = np.array([[1, 77, 1, 2, np.nan, 0]], np.float32)
    response = np.array([[1, 1, 1, 1, 1, 0]], np.float32)
    loss_mask = np.array([[1, 0, 1, 1, 0, 0]], np.float32)
    plain = np.array([[1, 0, 5]], np.float32)
    expected, expected_returns = gae(plain, MASK, INDEX, VALUES, gamma=0.9, lambd=0.8)
    advantages, returns = gae(
        rewards, response, INDEX, values, gamma=0.9, lambd=0.8, loss_mask=loss_mask
    )
    sampled = loss_mask[0] == 1
    np.testing.assert_allclose(np.asarray(advantages)[:, sampled], expected, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(returns)[:, sampled], expected_returns, rtol=1e-6)
    assert not np.asarray(advantages)[:, ~sampled].any()
    assert not np.asarray(returns)[:, ~sampled].any()


def test_padding_on_either_side_changes_nothing():
    expected = gae(REWARDS, MASK, INDEX, VALUES, gamma=0.9, lambd=0.8)
    for left, right in ((2, 0), (0, 3), (1, 1)):
        wide = [np.pad(x, [(0, 0), (left, right)]) for x in (REWARDS, MASK, VALUES)]
        wide[0][:, :left] = 9  # a reward outside the response is none
        found = gae(wide[0], wide[1], INDEX, wide[2], gamma=0.9, lambd=0.8)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(one)[:, left : left + 3], other, rtol=1e-5)


def test_advantages_are_normalised_over_the_batch():
    # rows of one token: G = 1 - 0, 4 - 1, 2 - 0
    rewards, values = np.array([[1.0], [4], [2]]), np.array([[0.0], [1], [0]])
    advantages, _ = gae(rewards, np.ones((3, 1)), np.arange(3), values)
    np.testing.assert_allclose(np.asarray(advantages)[:, 0], whitened([1, 3, 2]), rtol=1e-5)


def test_fewer_than_two_tokens_have_advantage_zero():
    for mask in (np.array([[0, 1, 0]], np.float32), np.zeros((1, 3), np.float32)):
        advantages, returns = gae(REWARDS, mask, INDEX, VALUES)
        np.testing.assert_array_equal(advantages, np.zeros((1, 3)))
        assert np.isfinite(returns).all()


def test_it_needs_values():
    with pytest.raises(ValueError, match="'gae' needs the values of a critic, got None"):
        gae(REWARDS, MASK, INDEX)


def test_rows_without_a_sampled_token_have_no_part():
    # SkyRL counts rows of padding, copies of row 0, in mean and variance of the batch.
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 3, 4)).astype(np.float32)
    response_mask, index = np.ones((3, 4), np.float32), np.arange(3)
    loss_mask = np.array([[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]], np.float32)
    alone = gae(*(x[:2] for x in (rewards, response_mask, index, values)), loss_mask=loss_mask[:2])
    beside = gae(rewards, response_mask, index, values, loss_mask=loss_mask)
    for two, three in zip(alone, beside, strict=True):
        np.testing.assert_allclose(three[:2], two, rtol=1e-6)
        np.testing.assert_array_equal(three[2], np.zeros(4))
