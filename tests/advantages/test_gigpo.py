"""Trajectories of a prompt, and turns from equal states, compared."""

import numpy as np
import pytest

from jaxrl.advantages.gigpo import gigpo, turn_returns
from jaxrl.config import TrainConfig
from jaxrl.data.packing import empty_batch
from jaxrl.training.rewards import advantages_of, make_estimate, turn_states

# Two trajectories of a prompt: turns 0, 1 and turns 2, 3, 4. Rewards of turns 0, 1; 0, 0, 0.
TRAJECTORY = np.array([0, 0, 1, 1, 1])
INDEX = np.zeros(5, int)
TURN_REWARDS = np.array([0, 1, 0, 0, 0], np.float32)
MASK = np.array([[0, 1, 1]] * 5, np.float32)
REWARDS = np.zeros((5, 3), np.float32)
REWARDS[1, 2] = 1  # of the whole first trajectory, on its last turn
# first turns begin alike, so do turns 1 and 3; turn 4 by itself
STATES = np.array([0, 1, 0, 1, 2])


def advantages(**changes):
    given = {
        "turn_rewards": TURN_REWARDS,
        "turn_states": STATES,
        "trajectory": TRAJECTORY,
        "step_gamma": 0.5,
        **changes,
    }
    found, returns = gigpo(REWARDS, MASK, INDEX, **given)
    np.testing.assert_array_equal(found, returns)
    np.testing.assert_array_equal(found[:, 0], 0)
    np.testing.assert_array_equal(found[:, 1], found[:, 2])
    return np.asarray(found[:, 1])


def test_returns_end_with_their_trajectory():
    # 0 + 0.5 * 1, 1; then 2 + 0.5 (3 + 0.5 * 4) = 4.5, 3 + 0.5 * 4 = 5, 4
    goes_on = np.array([True, False, True, True, False])
    found = turn_returns(np.array([0, 1, 2, 3, 4], np.float32), goes_on, 0.5)
    np.testing.assert_allclose(found, [0.5, 1, 4.5, 5, 4])


def test_literal():
    # scores 1 and 0: mean 0.5, without deviations A_E = 0.5, -0.5. Returns 0.5, 1; 0, 0, 0:
    # state 0: 0.5 and 0 -> 0.25, -0.25; state 1: 1 and 0 -> 0.5, -0.5; state 2 alone: 0
    found = advantages(grpo_norm_by_std=False)
    np.testing.assert_allclose(found, [0.75, 1, -0.75, -1, -0.5], rtol=1e-6)
    found = advantages(grpo_norm_by_std=False, step_weight=2.0)
    np.testing.assert_allclose(found, [1, 1.5, -1, -1.5, -0.5], rtol=1e-6)
    # n - 1: deviations of two values are their half difference times sqrt 2
    found = advantages()
    one = 1 / np.sqrt(2)
    np.testing.assert_allclose(found, [2 * one, 2 * one, -2 * one, -2 * one, -one], rtol=1e-4)


def test_a_failed_trajectory_counts_nowhere():
    valid = np.array([1, 1, 0, 0, 0], bool)
    np.testing.assert_array_equal(advantages(valid_mask=valid), 0)  # nobody to compare with


def batch_of_turns():
    """Prompt 7 8: the first answers 1, is told 5, answers 2; the other 3, told 5, 4, told 6, 9."""
    rows = [[7, 8, 1], [7, 8, 1, 5, 2], [7, 8, 3], [7, 8, 3, 5, 4], [7, 8, 3, 5, 4, 6, 9]]
    batch = empty_batch(5, 8)
    tokens, mask = np.zeros((5, 8), np.int32), np.zeros((5, 8), np.float32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
        mask[row, len(ids) - 1] = 1
    rewards = np.zeros((5, 8), np.float32)
    rewards[1, 4] = 1
    return batch.replace(
        tokens=tokens,
        lengths=np.array([len(x) for x in rows], np.int32),
        response_mask=mask,
        loss_mask=mask,
        rewards=rewards,
        index=INDEX.astype(np.int32),
        is_last_step=np.array([False, True, False, False, True]),
        valid_mask=np.ones(5, bool),
        turn_rewards=TURN_REWARDS,
    )


def test_states_are_what_the_environment_said():
    # the prompt, 5, the prompt, 5, 6
    np.testing.assert_array_equal(turn_states(batch_of_turns()), STATES)
    apart = batch_of_turns().replace(index=np.array([0, 0, 1, 1, 1], np.int32))
    np.testing.assert_array_equal(turn_states(apart), [0, 1, 2, 3, 4])  # of another prompt


@pytest.mark.parametrize("by_std", [True, False])
def test_the_trainer_gives_each_turn_its_own(by_std):
    """Rows are added until there are few shapes, and count nowhere."""
    algorithm = TrainConfig().trainer.algorithm
    algorithm.advantage_estimator, algorithm.grpo_norm_by_std = "gigpo", by_std
    algorithm.advantage_kwargs = {"step_gamma": 0.5}
    batch = batch_of_turns()
    _, found, _ = advantages_of(make_estimate(algorithm), batch, None, per_turn=True)
    assert found.shape == (5, 8)
    expected = advantages(grpo_norm_by_std=by_std)[:, None] * batch.response_mask
    np.testing.assert_allclose(found, expected, rtol=1e-5)
