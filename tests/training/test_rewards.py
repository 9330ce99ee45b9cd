import jax
import numpy as np
import pytest

from jaxrl.config import (
    AlgorithmConfig,
    GeneratorConfig,
    KLCtrlConfig,
    OverlongBufferConfig,
    SamplingParams,
)
from jaxrl.data.packing import collate, empty_batch
from jaxrl.training.rewards import (
    advantages_of,
    make_estimate,
    nan_advantages,
    next_kl_coef,
    penalize_kl,
    shape_rewards,
)


def output(rewards, lengths):
    return {
        "prompt_token_ids": [[1]] * len(lengths),
        "response_ids": [[2] * n for n in lengths],
        "rewards": rewards,
        "loss_masks": [[1] * n for n in lengths],
        "stop_reasons": ["length" if n == 10 else "stop" for n in lengths],
        "rollout_logprobs": [[-1.0] * n for n in lengths],
        "policy_versions": [0] * len(lengths),
        "rollout_metrics": {},
    }


GENERATOR = GeneratorConfig(sampling_params=SamplingParams(max_generate_length=10))


@pytest.mark.parametrize("per_token", [False, True])
def test_prompts_without_differences_are_masked(per_token):
    # "a" earns 1 and 1, "b" 0 and 1; per token the 1 is spread in two ways that sum to the same
    rewards = (
        [[0.5, 0.5], [0.0, 1.0], [0.0, 0.0], [0.0, 1.0]] if per_token else [1.0, 1.0, 0.0, 1.0]
    )
    given = output(rewards, [2, 2, 2, 2])
    algorithm = AlgorithmConfig(zero_variance_filter=True)
    shaped, metrics = shape_rewards(given, ["a", "a", "b", "b"], GENERATOR, algorithm)
    assert shaped["loss_masks"] == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert metrics == {"reward/num_zero_variance_filtered": 2}
    assert given["loss_masks"] == [[1, 1]] * 4


def test_demonstrations_apart_decide_for_no_sample_and_are_not_filtered():
    # the samples of "a" earn the same, its demonstration more; of "b" it earns what one sample does
    given = output([0.0, 0.0, 1.0, 0.0, 1.0, 1.0], [2] * 6)
    given["demonstrated"] = [False, False, True] * 2
    uids, masks = ["a"] * 3 + ["b"] * 3, {"chord": [[0, 0]] * 2 + [[1, 1]] * 4}
    for loss, expected in (masks | {"luffy": [[1, 1]] * 6}).items():
        algorithm = AlgorithmConfig(zero_variance_filter=True, policy_loss_type=loss)
        assert shape_rewards(given, uids, GENERATOR, algorithm)[0]["loss_masks"] == expected
    given["rewards"] = [1.0] * 6
    algorithm = AlgorithmConfig(zero_variance_filter=True, policy_loss_type="chord")
    shaped, metrics = shape_rewards(given, uids, GENERATOR, algorithm)
    assert shaped["loss_masks"] == [[0, 0], [0, 0], [1, 1]] * 2
    assert metrics == {"reward/num_zero_variance_filtered": 4}


def test_soft_overlong_punishment_takes_from_the_last_token():
    # beyond 10 - 4 = 6 tokens: 0.5 (8 - 6) / 4 = 0.25, 0.5 (10 - 6) / 4 = 0.5
    algorithm = AlgorithmConfig(overlong_buffer=OverlongBufferConfig(len=4, penalty_factor=0.5))
    shaped, _ = shape_rewards(output([1.0, 1.0, 1.0], [6, 8, 10]), "abc", GENERATOR, algorithm)
    assert [sum(r) for r in shaped["rewards"]] == [1.0, 0.75, 0.5]
    assert shaped["rewards"][1] == [0.0] * 7 + [0.75]


def test_each_turn_is_punished_by_its_own_length():
    # turns of 8 and 6 tokens, two given between: 0.5 (8 - 6) / 4 = 0.25 and 0; 10 tokens: 0.5
    algorithm = AlgorithmConfig(overlong_buffer=OverlongBufferConfig(len=4, penalty_factor=0.5))
    given = output([1.0, 1.0], [16, 20])
    given["loss_masks"] = [[1] * 8 + [0] * 2 + [1] * 6, [1] * 8 + [0] * 2 + [1] * 10]
    shaped, _ = shape_rewards(given, "ab", GENERATOR, algorithm)
    assert shaped["rewards"][0] == [0.0] * 7 + [-0.25] + [0.0] * 7 + [1.0]
    assert sum(shaped["rewards"][1]) == 1 - 0.25 - 0.5
    # the same trajectories with a row per turn earn the same
    steps = output([[0.0] * 8, 1.0, [0.0] * 8, 1.0], [8, 6, 8, 10])
    steps["is_last_step"] = [False, True, False, True]
    shaped, _ = shape_rewards(steps, "ab", GENERATOR, algorithm)
    assert [sum(r) for r in shaped["rewards"]] == [0.0, 0.75, 0.0, 0.25]


@pytest.mark.parametrize("reward", [1.0, []])
def test_an_empty_response_has_no_rewards_and_no_punishment(reward):
    algorithm = AlgorithmConfig(overlong_buffer=OverlongBufferConfig(len=4))
    shaped, _ = shape_rewards(output([reward, 1.0], [0, 6]), "ab", GENERATOR, algorithm)
    assert shaped["rewards"] == [[], [0.0] * 5 + [1.0]]
    np.testing.assert_array_equal(collate(shaped, [0, 1]).rewards.sum(1), [0, 1])


def test_the_filter_sees_what_is_left_of_the_rewards():
    # the truncated 1 of the first row becomes 0: both samples of "a" earn the same
    generator = GeneratorConfig(
        sampling_params=SamplingParams(max_generate_length=10), zero_reward_on_non_stop=True
    )
    algorithm = AlgorithmConfig(zero_variance_filter=True)
    shaped, _ = shape_rewards(output([1.0, 0.0], [10, 5]), ["a", "a"], generator, algorithm)
    assert shaped["loss_masks"] == [[0] * 10, [0] * 5]


def test_kl_in_the_rewards():
    # k1 = old - ref = 1, 2 on the two sampled tokens; beta 0.5
    batch = empty_batch(2, 3).replace(
        rewards=np.array([[0, 0, 1], [0, 0, 1]], np.float32),
        loss_mask=np.array([[0, 1, 1], [0, 0, 1]], np.float32),
        old_log_probs=np.array([[9, -1, -1], [9, 9, -1]], np.float32),
        ref_log_probs=np.array([[0, -2, -3], [0, 0, -5]], np.float32),
    )
    algorithm = AlgorithmConfig(kl_estimator_type="k1")
    penalized, metrics = penalize_kl(batch, np.float32(0.5), algorithm)
    # 1 - 0.5 * 2, 1 - 0.5 * 4
    np.testing.assert_allclose(penalized.rewards, [[0, -0.5, 0], [0, 0, -1]])
    assert metrics == {
        "loss/avg_kl": 2.75,  # ((1 + 2) / 2 + 4) / 2
        "loss/avg_kl_max": 3.0,  # (2 + 4) / 2
        "loss/kl_loss_coef": 0.5,
    }


def test_the_kl_of_demonstrations_is_not_that_of_the_policy():
    # k1 = 1 where it was sampled; 5 of the demonstration, for which it pays, and nobody counts it
    batch = empty_batch(2, 1).replace(
        rewards=np.ones((2, 1), np.float32),
        loss_mask=np.ones((2, 1), np.float32),
        old_log_probs=np.array([[-1], [-1]], np.float32),
        ref_log_probs=np.array([[-2], [-6]], np.float32),
        demonstrated=np.array([False, True]),
    )
    algorithm = AlgorithmConfig(kl_estimator_type="k1")
    penalized, metrics = penalize_kl(batch, np.float32(0.5), algorithm)
    np.testing.assert_allclose(penalized.rewards, [[0.5], [-1.5]])
    assert (metrics["loss/avg_kl"], metrics["loss/avg_kl_max"]) == (1.0, 1.0)


def test_the_controller_moves_the_coefficient():
    control = KLCtrlConfig(type="adaptive", kl_target=1.0, horizon=100)
    # 0.5 (1 + clip(2 / 1 - 1, -0.2, 0.2) 10 / 100) = 0.5 x 1.02
    coef = next_kl_coef(0.5, {"loss/avg_kl": 2.0}, control, rows=10)
    assert coef == pytest.approx(0.51)
    assert next_kl_coef(0.5, {"loss/avg_kl": 2.0}, KLCtrlConfig(), rows=10) == 0.5
    assert next_kl_coef(0.5, {}, control, rows=10) == 0.5  # there is no KL


def test_advantages_are_normalised_over_the_sampled_tokens_of_the_batch():
    # row 0 ends with an observation; row 2, a group of its own, is filtered
    given = {
        "token_level_rewards": np.array([[0, 0, 3, 0], [0, 0, 0, 0], [0, 9, 0, 0]], np.float32),
        "response_mask": np.array([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]], np.float32),
        "index": np.array([0, 0, 1], np.int32),
        "loss_mask": np.array([[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]], np.float32),
    }
    algorithm = AlgorithmConfig(grpo_norm_by_std=False, advantage_batch_normalize=True)
    _, advantages, _ = jax.jit(make_estimate(algorithm))(**given)
    # 1.5, 1.5, -1.5: mean 0.5, variance (1 + 1 + 4) / 3 = 2
    expected = np.array([[0, 1, 1, 0], [0, -2, 0, 0], [0, 0, 0, 0]]) / np.sqrt(2)
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)


@pytest.mark.parametrize("filtering", [False, True])
def test_a_failure_is_no_evidence_and_a_truncated_response_is(filtering):
    # rewards 1, 1, 0 of which the last is truncated, masked or not: mean 2/3; the fourth failed
    advantages = [1 / 3, 1 / 3, -2 / 3, 0]
    given = output([1.0, 1.0, 0.0, 0.0], [2, 2, 10, 2])
    given["loss_masks"][3], given["stop_reasons"][3] = [0, 0], "env_error"
    generator = GeneratorConfig(
        sampling_params=SamplingParams(max_generate_length=10), apply_overlong_filtering=filtering
    )
    algorithm = AlgorithmConfig(advantage_estimator="dr_grpo")
    shaped, _ = shape_rewards(given, ["a"] * 4, generator, algorithm)
    batch = collate(shaped, [0, 0, 0, 0])
    _, found, _ = advantages_of(make_estimate(algorithm), batch)
    np.testing.assert_allclose(found[:, 1], advantages, rtol=1e-6)
    assert any(batch.loss_mask[2]) != filtering
    # with a row per turn: the first turn of each is a row that earned nothing by itself
    steps = {
        name: [x for x in column for _ in range(2)] for name, column in given.items() if column
    }
    steps |= {"is_last_step": [False, True] * 4, "rollout_metrics": {}}
    steps["rewards"] = [x for reward in given["rewards"] for x in (0.0, reward)]
    shaped, _ = shape_rewards(steps, ["a"] * 4, generator, algorithm)
    _, found, _ = advantages_of(make_estimate(algorithm), collate(shaped, [0] * 8))
    np.testing.assert_allclose(found[:, 1], np.repeat(advantages, 2), rtol=1e-6)


def test_advantages_that_are_not_finite_name_the_estimator_before_an_update():
    """Rows 0 and 1 earned 1 each; the advantage of row 1 is NaN, that of row 3 is masked."""
    batch = empty_batch(4, 8)
    mask, rewards = np.ones((4, 8), np.float32), np.zeros((4, 8), np.float32)
    mask[3], rewards[:2, 7] = 0, 1
    advantages = np.zeros((4, 8), np.float32)
    advantages[1], advantages[3] = np.nan, np.nan
    index = np.array([0, 0, 1, 1], np.int32)
    batch = batch.replace(loss_mask=mask, rewards=rewards, index=index, advantages=advantages)
    assert nan_advantages(batch, "mine:baseline").startswith(
        "advantage estimator 'mine:baseline' gives the advantage nan to 1 of 4 samples; the "
        "samples of the first one's prompt earned [1.0, 1.0]. Look for a quotient"
    )
    # log-probs of broken weights are not its mistake
    assert not nan_advantages(batch.replace(old_log_probs=advantages), "mine:baseline")
    assert not nan_advantages(batch.replace(advantages=np.zeros((4, 8))), "mine:baseline")
