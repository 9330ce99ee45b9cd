"""Group-relative advantages."""

from functools import partial

import jax
import numpy as np
import pytest

from jaxrl.advantages import (
    dr_grpo,
    gfpo,
    gpg,
    grpo,
    grpo_batch_std,
    grpo_loo,
    grpo_token,
    maxrl,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)

# Two groups, scores 1, 0, 0 and 3, 1 (interleaved); row 1 answers with one token, the others two.
# Group 0: mean 1/3, deviations 2/3, -1/3, -1/3; variance (4/9 + 1/9 + 1/9) / 2 = 1/3,
#   std 0.5773503: advantages 1.1547005, -0.5773503, -0.5773503
# Group 1: mean 2, deviations 1, -1; variance 2 / 1, std 1.4142136: 0.7071068, -0.7071068
INDEX = np.array([0, 1, 0, 1, 0], np.int32)
SCORES = np.array([1, 3, 0, 1, 0], np.float32)
MASK = np.array([[0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 1, 1], [0, 1, 1]], np.float32)
ADVANTAGES = np.array([1.1547005, 0.7071068, -0.5773503, -0.7071068, -0.5773503])
CENTRED = np.array([2 / 3, 1, -1 / 3, -1, -1 / 3])


def rewards_at_end(scores, mask):
    """Each row's score on its last response token."""
    rewards = np.zeros_like(mask)
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    rewards[np.arange(len(mask)), last] = scores
    return rewards


REWARDS = rewards_at_end(SCORES, MASK)


@partial(jax.jit, static_argnums=0)
def all_of(estimators, *given, **more):
    """The advantages of several in one program, by their names."""
    return {x.__name__: x(*given, **more)[0] for x in estimators}


def test_literal_of_interleaved_groups_of_different_size():
    advantages, returns = grpo(REWARDS, MASK, INDEX)
    np.testing.assert_allclose(advantages, ADVANTAGES[:, None] * MASK, rtol=1e-5)
    np.testing.assert_array_equal(returns, advantages)


def test_literal_without_the_standard_deviation():
    advantages, _ = grpo(REWARDS, MASK, INDEX, grpo_norm_by_std=False)
    np.testing.assert_allclose(advantages, CENTRED[:, None] * MASK, rtol=1e-6)


def test_epsilon_is_added_to_the_standard_deviation():
    # row 0: (2/3) / (0.5773503 + 1) = 0.4226497
    advantages, _ = grpo(REWARDS, MASK, INDEX, epsilon=1.0)
    np.testing.assert_allclose(advantages[0, 1], 0.4226497, rtol=1e-6)


def test_rewards_per_token_are_summed():
    spread = np.array([[0, 0.25, 0.75], [0, 3, 0], [0, -1, 1], [0, 2, -1], [0, 0, 0]], np.float32)
    np.testing.assert_array_equal(grpo(spread, MASK, INDEX)[0], grpo(REWARDS, MASK, INDEX)[0])


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_permuted_rows_give_permuted_advantages(order):
    permuted, _ = grpo(REWARDS[order], MASK[order], INDEX[order])
    np.testing.assert_allclose(permuted, (ADVANTAGES[:, None] * MASK)[order], rtol=1e-5)


def test_the_names_of_the_groups_do_not_matter():
    renamed, _ = grpo(REWARDS, MASK, np.array([3, 1, 3, 1, 3]))
    np.testing.assert_array_equal(renamed, grpo(REWARDS, MASK, INDEX)[0])


def test_a_group_of_one_keeps_its_score():
    # mean 0, std 1: 5 / (1 + 1e-6)
    rewards, mask = np.array([[5.0], [1.0], [3.0]], np.float32), np.ones((3, 1), np.float32)
    advantages, _ = jax.jit(grpo)(rewards, mask, np.array([1, 0, 0]))
    np.testing.assert_allclose(advantages[:, 0], [5.0, -0.7071068, 0.7071068], rtol=1e-5)


RELATIVE = [grpo, grpo_token, dr_grpo, rloo, maxrl, grpo_loo, grpo_batch_std, gfpo, gpg, opo]


@pytest.mark.parametrize(("rows", "reward"), [(4, 0.5), (12, 5.1), (7, 100.1)])
def test_equal_rewards_give_exactly_zero(rows, reward):
    # In float32 the sum of 12 x 5.1 divided by 12 is not 5.1; over a std of as little that is 0.9.
    rewards = np.full((rows, 1), reward, np.float32)
    estimators = *RELATIVE, reinforce_plus_plus_baseline
    found = all_of(estimators, rewards, np.ones((rows, 1)), np.zeros(rows, np.int32))
    assert len(found) == 11
    assert {name: x for name, x in found.items() if not np.array_equal(x, 0 * rewards)} == {}


# Scores 1, 0, 1 of one prompt; the environment of a fourth sample failed: masked, score 0.
#   grpo: mean 2/3, deviations 1/3, -2/3, 1/3; variance (1/9 + 4/9 + 1/9) / 2 = 1/3, std 0.5773503
#   rloo: 1 - (0 + 1) / 2, 0 - (1 + 1) / 2; maxrl: 1/3 / (2/3), -2/3 / (2/3)
#   grpo_loo: the others of a 1 are 0, 1, std 0.7071068, those of the 0 do not vary
#   grpo_batch_std: of 1, 0, 1, 2 with mean 1 the std is sqrt(2 / 3) = 0.8164966
#   gpg: 3 of 4 that count are in a group with a difference: 4/3 (1/3, -2/3, 1/3)
# With the 0 of the failure the mean would be 1/2. A second prompt: 2 beside a failure, nothing to
# compare it with: 0. A third, a single sample that failed: 0.
FAILED = np.array([0, 0, 0, 1, 0, 1, 1], bool)
WITHOUT_FAILURES = {
    grpo: [0.5773503, -1.1547005, 0.5773503, 0, 0, 0, 0],
    grpo_token: [0.5773503, -1.1547005, 0.5773503, 0, 0, 0, 0],
    dr_grpo: [1 / 3, -2 / 3, 1 / 3, 0, 0, 0, 0],
    rloo: [0.5, -1, 0.5, 0, 0, 0, 0],
    maxrl: [0.5, -1, 0.5, 0, 0, 0, 0],
    grpo_loo: [0.7071068, -1, 0.7071068, 0, 0, 0, 0],
    grpo_batch_std: [0.4082483, -0.8164966, 0.4082483, 0, 0, 0, 0],
    gfpo: [0.5773503, -1.1547005, 0.5773503, 0, 0, 0, 0],
    gpg: [4 / 9, -8 / 9, 4 / 9, 0, 0, 0, 0],
}


@pytest.mark.parametrize("said_by", ["valid_mask", "loss_mask", "both"])
def test_rows_of_failed_environments_have_no_part_in_their_group(said_by):
    rewards = np.array([[0, 1], [0, 0], [0, 1], [0, 0], [0, 2], [0, 0], [0, 0]], np.float32)
    mask, index = np.ones_like(rewards), np.array([0, 0, 0, 0, 1, 1, 2], np.int32)
    said = {"valid_mask": ~FAILED, "loss_mask": mask * ~FAILED[:, None]}
    given = said if said_by == "both" else {said_by: said[said_by]}
    found = all_of(tuple(WITHOUT_FAILURES), rewards, mask, index, **given)
    wrong = {
        estimator.__name__: found[estimator.__name__]
        for estimator, advantages in WITHOUT_FAILURES.items()
        if not np.allclose(
            found[estimator.__name__], np.array(advantages)[:, None] * mask, rtol=1e-5, atol=1e-6
        )
    }
    assert wrong == {}


def test_a_valid_row_counts_though_it_is_masked():
    # a truncated response under overlong filtering: not trained on, but it was judged
    mask, estimators = np.ones_like(REWARDS), tuple(WITHOUT_FAILURES)
    said = {"loss_mask": mask * (SCORES > 0)[:, None], "valid_mask": np.ones(5, bool)}
    counted = all_of(estimators, REWARDS, mask, INDEX, **said)
    expected = all_of(estimators, REWARDS, mask, INDEX)
    assert {n: x for n, x in counted.items() if not np.array_equal(x, expected[n])} == {}


def test_jit_equals_eager():
    for eager, jitted in zip(
        grpo(REWARDS, MASK, INDEX), jax.jit(grpo)(REWARDS, MASK, INDEX), strict=True
    ):
        np.testing.assert_allclose(jitted, eager, rtol=1e-6)


def test_vmap_over_batches():
    rewards, mask = np.stack([REWARDS, 2 * REWARDS]), np.stack([MASK, MASK])
    index = np.stack([INDEX, np.zeros_like(INDEX)])
    advantages, _ = jax.jit(jax.vmap(grpo))(rewards, mask, index)
    np.testing.assert_allclose(advantages[0], ADVANTAGES[:, None] * MASK, rtol=1e-5)
    np.testing.assert_allclose(
        advantages[1], grpo(2 * REWARDS, MASK, np.zeros_like(INDEX))[0], rtol=1e-5
    )


def test_keywords_of_other_estimators_are_ignored():
    advantages, _ = grpo(REWARDS, MASK, INDEX, values=None, config=None, gamma=0.9, lambd=0.9)
    np.testing.assert_allclose(advantages, ADVANTAGES[:, None] * MASK, rtol=1e-5)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(AssertionError, match="shape"):
        grpo(REWARDS, MASK[:, :1], INDEX)
