"""A row per turn: what the rows are, how they merge, and the advantage that they share."""

import dataclasses

import numpy as np

from jaxrl.config import AlgorithmConfig, GeneratorConfig
from jaxrl.data.columns import last_steps, trajectory_numbers
from jaxrl.data.packing import collate, minibatches
from jaxrl.rollout.conversations.step_wise import merge_steps
from jaxrl.training.metrics import rollout_metrics
from jaxrl.training.rewards import advantages_of, make_estimate, shape_rewards
from jaxrl.types import TrajectoryID
from tests.rollout.scripted import completion, converse, make_prompt
from tests.rollout.test_multi_turn import ASK, END, TALK, TOKENIZER, by_turn

SHORT = make_prompt(TOKENIZER, "12", uid="0:q", says=[None])
REPLIES = by_turn([3, 4, END], [5, END], [6, END])


def step_wise():
    return converse(REPLIES, [TALK, SHORT], TOKENIZER, step_wise_trajectories=True)


def test_a_row_per_turn():
    output = step_wise()
    assert output["prompt_token_ids"] == [
        [1, 2, ASK],
        [1, 2, ASK, 3, 4, END, 10, 11, ASK],
        [1, 2, ASK, 3, 4, END, 10, 11, ASK, 5, END, 12, ASK],
        [1, 2, ASK],
    ]
    assert output["response_ids"] == [[3, 4, END], [5, END], [6, END], [3, 4, END]]
    assert output["loss_masks"] == [[1, 1, 1], [1, 1], [1, 1], [1, 1, 1]]
    # turns earn 1, 2 and 3: the last row has their sum
    assert output["rewards"] == [[0, 0, 0], [0, 0], [0, 6], 1]
    assert output["rollout_logprobs"][1] == [-0.125, -0.25]
    assert output["is_last_step"] == [False, False, True, True]
    assert output["trajectory_ids"] == [TrajectoryID("0:p", 0)] * 3 + [TrajectoryID("0:q", 0)]


def test_merged_rows_are_the_conversation():
    merged, whole = merge_steps(step_wise()), converse(REPLIES, [TALK, SHORT], TOKENIZER)
    same = "prompt_token_ids response_ids loss_masks rollout_logprobs stop_reasons policy_versions"
    same += " token_versions context_versions"
    assert all(merged[name] == whole[name] for name in same.split())
    assert merged["is_last_step"] == [True, True]
    assert sum(merged["rewards"][0]) == sum(whole["rewards"][0]) == 6


def test_recorded_sets_go_with_their_tokens():
    replies = [
        completion(tokens, "stop", sampling_mask_ids=[(t, 2, -1) for t in tokens])
        for tokens in ([3, 4, END], [5, END], [6, END])
    ]
    spoken = by_turn(*replies)
    whole = converse(spoken, [TALK], TOKENIZER)
    assert whole["kept"] == [
        [
            *((3, 2, -1), (4, 2, -1), (END, 2, -1), (), (), ()),
            *((5, 2, -1), (END, 2, -1), (), ()),
            *((6, 2, -1), (END, 2, -1)),
        ]
    ]
    rows = converse(spoken, [TALK], TOKENIZER, step_wise_trajectories=True)
    assert rows["kept"][1] == [(5, 2, -1), (END, 2, -1)]
    assert merge_steps(rows)["kept"] == whole["kept"]
    batch = collate({**whole, "rewards": [[0.0] * 12]}, [0])
    assert batch.kept.shape == (1, 16, 3)
    # three tokens of the prompt before
    np.testing.assert_array_equal(batch.kept[0, 3], [3, 2, -1])
    np.testing.assert_array_equal(batch.kept[0, 6], [-1, -1, -1])


def test_versions_go_with_their_tokens():
    replies = [
        dataclasses.replace(completion(tokens, "stop"), versions=drew, context_versions=oldest)
        for tokens, drew, oldest in (
            ([3, 4, END], [4, 4, 5], [3, 3, 3]),
            ([5, END], [5, 6], [3, 4]),
            ([6, END], [7, 8], [5, 6]),
        )
    ]
    rows = converse(by_turn(*replies), [TALK], TOKENIZER, step_wise_trajectories=True)
    assert rows["token_versions"] == [[4, 4, 5], [5, 6], [7, 8]]
    assert rows["context_versions"] == [[3, 3, 3], [3, 4], [5, 6]]
    whole = converse(by_turn(*replies), [TALK], TOKENIZER)
    for name in ("token_versions", "context_versions"):
        assert merge_steps(rows)[name] == whole[name]


def test_steps_that_do_not_go_on_stay_apart():
    # row 1 goes on from row 0 with 9 between; row 2 does not; row 3 is another trajectory
    output = {
        "prompt_token_ids": [[1], [1, 2, 9], [1, 2, 8], [1]],
        "response_ids": [[2], [3], [4], [2]],
        "rewards": [0.5, 1.0, 2.0, 3.0],
        "loss_masks": [[1], [1], [1], [1]],
        "stop_reasons": ["stop", "length", "stop", "stop"],
        "rollout_logprobs": [[-1.0], [-2.0], [-3.0], [-4.0]],
        "policy_versions": [4, 5, 6, 7],
        "token_versions": [[4], [5], [6], [7]],
        "context_versions": [[4], [4], [6], [7]],
        "rollout_metrics": {"a": 1.0},
        "is_last_step": [False, False, True, True],
    }
    assert merge_steps(output) == {
        "prompt_token_ids": [[1], [1, 2, 8], [1]],
        "response_ids": [[2, 9, 3], [4], [2]],
        "rewards": [1.0, 2.0, 3.0],
        "loss_masks": [[1, 0, 1], [1], [1]],
        "stop_reasons": ["length", "stop", "stop"],
        "rollout_logprobs": [[-1.0, 0, -2.0], [-3.0], [-4.0]],
        "policy_versions": [4, 6, 7],
        "token_versions": [[4, -1, 5], [6], [7]],
        "context_versions": [[4, -1, 4], [6], [7]],
        "rollout_metrics": {"a": 1.0},
        "is_last_step": [False, True, True],
    }
    assert output["response_ids"] == [[2], [3], [4], [2]]  # not changed


def test_whose_row_is_whose():
    assert trajectory_numbers([False, True, True, False, False, True]).tolist() == [
        0,
        0,
        1,
        2,
        2,
        2,
    ]
    output = step_wise()
    assert last_steps(output)["response_ids"] == [[6, END], [3, 4, END]]
    assert last_steps(last_steps(output)) == last_steps(output)


def test_metrics_and_filters_look_at_trajectories():
    output = step_wise()
    metrics = rollout_metrics(output, ["p", "q"], 1, 48)
    assert metrics["reward/avg_raw_reward"] == 3.5  # (6 + 1) / 2
    assert metrics["generate/batch_num_seq"] == 4
    # as samples of one prompt they differ; with rewards 6 and 6 they do not
    algorithm = AlgorithmConfig(zero_variance_filter=True)
    shaped, _ = shape_rewards(output, ["p", "p"], GeneratorConfig(), algorithm)
    assert shaped["loss_masks"] == output["loss_masks"]
    output["rewards"][3] = 6.0
    shaped, _ = shape_rewards(output, ["p", "p"], GeneratorConfig(), algorithm)
    assert not any(map(any, shaped["loss_masks"]))


def test_all_rows_of_a_trajectory_have_its_advantage():
    output, _ = shape_rewards(step_wise(), ["p", "p"], GeneratorConfig(), AlgorithmConfig())
    batch = collate(output, index=[0, 0, 0, 0])
    estimate = make_estimate(AlgorithmConfig(advantage_estimator="grpo", grpo_norm_by_std=False))
    _, advantages, returns = advantages_of(estimate, batch)
    # 6 and 1 about their mean 3.5
    expected = np.array([2.5, 2.5, 2.5, -2.5])[:, None] * batch.response_mask
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    np.testing.assert_allclose(returns, expected, rtol=1e-6)


def test_minibatches_have_whole_prompts_with_as_many_rows_as_they_take():
    output, _ = shape_rewards(step_wise(), ["p", "q"], GeneratorConfig(), AlgorithmConfig())
    parts = minibatches(collate(output, index=[0, 0, 0, 1]), 1)
    assert [part.row_ids.tolist() for part in parts] == [[0, 1, 2], [3]]
    assert [part.index.tolist() for part in parts] == [[0, 0, 0], [0]]
    assert len(minibatches(collate(output, index=[0, 0, 0, 1]), 2)) == 1


def test_without_steps_nothing_is_merged():
    output = converse(REPLIES, [SHORT], TOKENIZER)
    assert "is_last_step" not in output
    assert merge_steps(output) is output
