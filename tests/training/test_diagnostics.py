"""Statistics of a batch by group and by correctness."""

import numpy as np
import pytest

from jaxrl.data.packing import empty_batch
from jaxrl.training.diagnostics import advantages_by_correctness, group_metrics, length_metrics


def test_groups_literal():
    # a 1 1 and d 0 0 are all the same, b 0 1 and c 0 2 differ: deviations 0, 1/2, 1, 0
    scores = np.array([1.0, 1, 0, 1, 0, 2, 0, 0])
    assert group_metrics(scores, list("aabbccdd")) == {
        "reward/max_raw_reward": 2,
        "reward/min_raw_reward": 0,
        "reward/group_std": 0.375,
        "reward/zero_variance_ratio": 0.5,
        "reward/all_correct_ratio": 0.25,
        "reward/none_correct_ratio": 0.25,
    }


def test_single_samples_have_no_variance_to_speak_of():
    assert set(group_metrics(np.array([0.0, 1.0]), ["a", "b"])) == {
        "reward/max_raw_reward",
        "reward/min_raw_reward",
    }


def test_lengths_by_reward():
    output = {
        "response_ids": [[1] * 2, [1] * 5, [1] * 4],
        "stop_reasons": ["stop", "length", "stop"],
    }
    assert length_metrics(output, np.array([1.0, 1.0, 1.0])) == {
        "generate/max_tokens_non_zero_rewards": 5,
        "generate/stop_ratio_non_zero_rewards": pytest.approx(2 / 3),
    }


def test_advantages_by_correctness_literal():
    # correct: 3 and 1 (mean 2, deviation 1), incorrect: -2; the masked 9 counts nowhere
    batch = empty_batch(2, 3).replace(
        loss_mask=np.array([[0, 1, 1], [0, 1, 0]], np.float32),
        advantages=np.array([[9, 3, 1], [9, -2, 9]], np.float32),
    )
    metrics = advantages_by_correctness(batch, np.array([0.5, 0.0]))
    assert metrics["loss/advantage_mean_correct"] == 2
    assert metrics["loss/advantage_std_correct"] == 1
    assert metrics["loss/advantage_mean_incorrect"] == -2
    assert metrics["loss/advantage_abs_max"] == 3
    assert metrics["loss/advantage_mean"] == pytest.approx(2 / 3)


def test_the_rows_of_a_trajectory_are_correct_if_its_last_is():
    batch = empty_batch(3, 2).replace(
        loss_mask=np.array([[0, 1]] * 3, np.float32),
        advantages=np.array([[0, 1], [0, 2], [0, -1]], np.float32),
        is_last_step=np.array([False, True, True]),
    )
    metrics = advantages_by_correctness(batch, np.array([0.0, 1.0, 0.0]))
    assert metrics["loss/advantage_mean_correct"] == 1.5
    assert metrics["loss/advantage_mean_incorrect"] == -1
