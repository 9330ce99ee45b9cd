"""Several rewards, each compared with its group apart."""

import jax
import numpy as np
import pytest

from jaxrl.advantages.gdpo import gdpo as eager
from jaxrl.config import TrainConfig
from jaxrl.training.rewards import advantages_of, make_estimate
from tests.training.test_update import make_batch

gdpo = jax.jit(eager)

MASK = np.array([[0, 1, 1]] * 4, np.float32)
REWARDS = np.zeros((4, 3), np.float32)


def advantages(terms, index, weights, **more):
    found, returns = gdpo(
        REWARDS[: len(terms)],
        MASK[: len(terms)],
        np.array(index),
        reward_terms=np.array(terms, np.float32),
        reward_weights=np.array(weights, np.float32),
        **more,
    )
    np.testing.assert_array_equal(found, returns)
    np.testing.assert_array_equal(found[:, 0], 0)
    np.testing.assert_array_equal(found[:, 1], found[:, 2])
    return np.asarray(found[:, 1])


def test_literal():
    # one group, rewards (1, 0), (0, 1), (0, 0), (1, 1). Each has mean 1/2 and (n - 1) deviation
    # sqrt(4 (1/4) / 3) = 0.5773503, so a_k = +-0.8660254; with weights 1 and 0.5:
    #   a = 0.8660254 (1 - 0.5, -1 + 0.5, -1 - 0.5, 1 + 0.5) = 0.433, -0.433, -1.299, 1.299
    # mean 0, var 2 (0.1875 + 1.6875) / 3 = 1.25: A = a / 1.1180340
    found = advantages([[1, 0], [0, 1], [0, 0], [1, 1]], [0] * 4, [1, 0.5])
    expected = np.array([0.4330127, -0.4330127, -1.2990381, 1.2990381]) / 1.1180340
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_samples_of_the_same_sum_differ():
    # (1, 0) and (0, 1) have the sum 1 where GRPO gives 0; a rare reward counts for more here
    terms = [[1, 0], [0, 1], [0, 1], [0, 1]]
    found = advantages(terms, [0] * 4, [1, 1])
    # a_1 = (1 - 1/4) / 0.5 = 1.5 and -0.5; a_2 = -1.5 and 0.5: they add up to 0 with equal weights
    np.testing.assert_allclose(found, 0, atol=1e-5)
    found = advantages(terms, [0] * 4, [2, 1])
    # a = 1.5, -0.5, -0.5, -0.5; var 1: A = a
    np.testing.assert_allclose(found, [1.5, -0.5, -0.5, -0.5], rtol=1e-5)


def test_a_failed_row_counts_nowhere():
    terms = [[1, 0], [0, 1], [0, 0], [1, 1]]
    valid = np.array([1, 1, 0, 1], bool)
    found = advantages(terms, [0, 0, 0, 0], [1, 1], valid_mask=valid)
    assert found[2] == 0
    without = advantages([terms[0], terms[1], terms[3]], [0, 0, 0], [1, 1])
    np.testing.assert_allclose(found[valid], without, rtol=1e-5)


def test_equal_rewards_are_no_advantage():
    np.testing.assert_array_equal(advantages([[0.1, 3]] * 4, [0, 0, 1, 1], [1, 1]), 0)


@pytest.mark.parametrize("weights", [{}, {"b": 2.0, "a": 1.0}])
def test_weights_are_those_of_the_names(weights):
    """The terms are in alphabetical order, and so are the weights that they get."""
    batch = make_batch()
    terms = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    algorithm = TrainConfig().trainer.algorithm
    algorithm.advantage_estimator = "gdpo"
    estimate = make_estimate(algorithm)
    _, found, _ = advantages_of(estimate, batch.replace(reward_terms=terms), None, weights)
    expected, _ = gdpo(
        batch.rewards,
        batch.response_mask,
        batch.index,
        loss_mask=batch.loss_mask,
        reward_terms=terms,
        reward_weights=np.array([1.0, 2.0 if weights else 1.0], np.float32),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
