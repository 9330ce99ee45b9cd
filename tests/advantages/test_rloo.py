"""Leave-one-out advantages."""

import jax
import numpy as np
import pytest

from jaxrl.advantages.rloo import rloo as eager

rloo = jax.jit(eager, static_argnames="grpo_norm_by_std")

# Two groups, scores 1, 0, 0 and 3, 1 (interleaved). The baseline is the mean of the others:
#   group 0: 1 - 0 = 1; 0 - (1 + 0) / 2 = -1/2 twice
#   group 1: 3 - 1 = 2; 1 - 3 = -2
INDEX = np.array([0, 1, 0, 1, 0], np.int32)
MASK = np.array([[0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 1, 1], [0, 1, 1]], np.float32)
REWARDS = np.array([[0, 0, 1], [0, 3, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]], np.float32)
ADVANTAGES = np.array([1, 2, -0.5, -2, -0.5])


def test_literal_of_interleaved_groups_of_different_size():
    advantages, returns = rloo(REWARDS, MASK, INDEX)
    np.testing.assert_allclose(advantages, ADVANTAGES[:, None] * MASK, rtol=1e-6)
    np.testing.assert_array_equal(returns, advantages)


def test_equals_the_definition_in_a_loop():
    rng = np.random.default_rng(0)
    index = rng.integers(0, 4, 12)
    scores = rng.normal(0, 1, 12).astype(np.float32)
    expected = []
    for i in range(12):
        others = [scores[j] for j in range(12) if j != i and index[j] == index[i]]
        expected.append(scores[i] - np.mean(others) if others else 0.0)
    advantages, _ = rloo(scores[:, None], np.ones((12, 1), np.float32), index)
    np.testing.assert_allclose(advantages[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_rewards_per_token_are_summed():
    spread = np.array([[0, 0.25, 0.75], [0, 3, 0], [0, -1, 1], [0, 2, -1], [0, 0, 0]], np.float32)
    np.testing.assert_array_equal(rloo(spread, MASK, INDEX)[0], rloo(REWARDS, MASK, INDEX)[0])


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_permuted_rows_give_permuted_advantages(order):
    permuted, _ = rloo(REWARDS[order], MASK[order], INDEX[order])
    np.testing.assert_allclose(permuted, (ADVANTAGES[:, None] * MASK)[order], rtol=1e-6)


def test_a_group_of_one_gets_zero():
    rewards, mask = np.array([[5.0], [1.0], [3.0]], np.float32), np.ones((3, 1), np.float32)
    advantages, _ = rloo(rewards, mask, np.array([1, 0, 0]))
    np.testing.assert_allclose(advantages[:, 0], [0, -2, 2], rtol=1e-6)


def test_vmap_over_batches():
    # second batch, one group of five with scores 1 3 0 1 0, sum 5: s - (5 - s) / 4
    #   1 - 1 = 0; 3 - 0.5 = 2.5; 0 - 1.25 = -1.25; 0; -1.25
    given = ([REWARDS, REWARDS], [MASK, MASK], [INDEX, np.zeros_like(INDEX)])
    advantages, _ = jax.vmap(rloo)(*map(np.stack, given))
    np.testing.assert_allclose(advantages[0], ADVANTAGES[:, None] * MASK, rtol=1e-6)
    np.testing.assert_allclose(advantages[1, :, 1], [0, 2.5, -1.25, 0, -1.25], rtol=1e-6, atol=1e-6)


def test_keywords_of_other_estimators_are_ignored():
    advantages, _ = rloo(REWARDS, MASK, INDEX, values=None, config=None, grpo_norm_by_std=True)
    np.testing.assert_allclose(advantages, ADVANTAGES[:, None] * MASK, rtol=1e-6)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(AssertionError, match="shape"):
        rloo(REWARDS, MASK[:, :1], INDEX)
