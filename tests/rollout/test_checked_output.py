"""What a generator of one's own gives is checked, and named."""

import numpy as np
import pytest

from jaxrl.rollout.generator import checked_output

GONE = object()


def columns(**changes):
    output = {
        "prompt_token_ids": [[5, 13], [7]],
        "response_ids": [[1, 2], [9]],
        "rewards": [0.5, [1.0]],
        "loss_masks": [[1, 0], [1]],
        "stop_reasons": ["stop", "length"],
        "rollout_logprobs": [[-0.5, 0.0], [-1.25]],
        "policy_versions": [3, 4],
        "rollout_metrics": {"generate/avg_turns": 1.5},
        "score": [object(), "mine"],
    }
    return {k: v for k, v in {**output, **changes}.items() if v is not GONE}


def test_arrays_and_tuples_become_lists():
    good = columns()
    assert checked_output(good, "Mine", 2) == good
    given = columns(
        rewards=np.array([0.5, 1.0]),
        loss_masks=[np.array([True, False]), (1,)],
        policy_versions=np.array([3, 4], np.int32),
        rollout_logprobs=None,
        score=good["score"],
    )
    expected = columns(rewards=[0.5, 1.0], rollout_logprobs=None, score=good["score"])
    assert checked_output(given, "Mine", 2) == expected
    found = checked_output(columns(rewards=(np.float32(0.5), np.array([1.0]))), "Mine", 2)[
        "rewards"
    ]
    assert found == [0.5, [1.0]] and type(found[0]) is float


def test_a_trajectory_may_have_several_rows():
    assert checked_output(columns(is_last_step=np.array([False, True])), "Mine", 1)["is_last_step"][
        1
    ]
    with pytest.raises(ValueError, match="Mine.generate gave 1 trajectories in 2 rows for 1 "):
        checked_output(columns(is_last_step=[True, False]), "Mine", 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_versions": GONE, "loss_masks": GONE}, "no loss_masks, policy_versions: see"),
        ({"rewards": None}, "rewards=None: give a list, one for each row"),
        ({"rewards": [0.5]}, "1 rewards for 2 response_ids"),
        ({"stop_reasons": ["stop"] * 3}, "3 stop_reasons for 2 response_ids"),
        ({"score": [1]}, "1 score for 2 response_ids"),
        ({"rewards": [0.5, None]}, r"rewards\[1\]=None: give a list of numbers or one number"),
        ({"rewards": [[0.5], 1.0]}, r"rewards\[0\]=\[0.5\]: give one entry for each of the 2 resp"),
        ({"rewards": [np.eye(2), 1.0]}, r"rewards\[0\]=.*: give a list of numbers or one number"),
        ({"loss_masks": [[1, 0], 1]}, r"loss_masks\[1\]=1: give a list of numbers"),
        ({"loss_masks": [[1, [0]], [1]]}, r"loss_masks\[0\]=\[1, \[0\]\]: give a list of numbers"),
        ({"response_ids": [[1, 2.5], [9]]}, r"response_ids\[0\]=.*: give a list of integers"),
        ({"rollout_logprobs": [[-0.5], [0.0]]}, r"rollout_logprobs\[0\]=\[-0.5\]: give one entry"),
        ({"stop_reasons": ["stop", None]}, r"stop_reasons\[1\]=None: give one str"),
        ({"policy_versions": [0, 1.5]}, r"policy_versions\[1\]=1.5: give one int"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(ValueError, match=f"Mine.generate gave {message}"):
        checked_output(columns(**changes), "Mine", 2)


def test_trajectories_that_were_not_asked_for_are_refused():
    with pytest.raises(
        ValueError, match="gave 2 trajectories in 2 rows for 3 entries of the batch"
    ):
        checked_output(columns(), "Mine", 3)
