"""Scores and length statistics."""

import numpy as np
import pytest

from jaxrl.config import SamplingParams
from jaxrl.data.packing import empty_batch
from jaxrl.training.metrics import (
    check_surprise,
    generate_metrics,
    mismatch_metrics,
    outcome,
    score_metrics,
)


def test_outcome_sums_rewards_per_token():
    assert outcome(0.5) == 0.5
    assert outcome([0.25, -1.0, 0.5]) == -0.25


def test_score_metrics_literal():
    # a passes by its second sample, b does not (0 is no pass), c by its only; scores 0 1 0 -1 2
    #   mean 2/5; two of three prompts pass; positive parts 0 1 0 0 2, mean 3/5
    metrics = score_metrics([0.0, 1.0, 0.0, -1.0, 2.0], ["a", "a", "b", "b", "c"], samples=2)
    assert metrics == {
        "avg_score": 0.4,
        "pass_at_2": pytest.approx(2 / 3),
        "mean_positive_reward": 0.6,
    }


def test_the_samples_of_a_prompt_need_not_be_neighbours():
    assert score_metrics([1.0, 0.0, 0.0], ["a", "b", "a"], samples=2)["pass_at_2"] == 0.5


def test_score_metrics_of_rewards_per_token():
    # sums 1 - 2 = -1 and 0.5; no pass and a pass; positive tokens 1 and 0.5
    metrics = score_metrics([[1.0, -2.0], [0.25, 0.25]], ["a", "b"], samples=1)
    assert metrics == {"avg_score": -0.25, "pass_at_1": 0.5, "mean_positive_reward": 0.75}


def columns(**changes):
    return {
        "response_ids": [[1] * 2, [1] * 4, [1] * 6],
        "rewards": [1.0, [0.0] * 4, [0.5] * 6],
        "stop_reasons": ["stop", "length", "stop"],
        "rollout_metrics": {"environment/exact": 0.5},
        **changes,
    }


def test_generate_metrics_literal():
    # 12 tokens [1, 1, ...] as little-endian int32: crc32(b"\x01\0\0\0" * 12) = 2329099562
    # lengths 2 4 6: mean 4, deviation sqrt((4 + 0 + 4) / 3) = 1.6329932; rewarded are 2 and 6
    metrics = generate_metrics(columns(), 2)
    assert metrics.pop("generate/std_num_tokens") == pytest.approx(1.6329932)
    assert metrics.pop("generate/stop_ratio") == pytest.approx(2 / 3)
    assert metrics == {
        "generate/batch_num_seq": 3,
        "generate/min_num_tokens": 2,
        "generate/max_num_tokens": 6,
        "generate/avg_num_tokens": 4.0,
        "generate/avg_tokens_non_zero_rewards": 4.0,
        "generate/avg_tokens_zero_rewards": 4.0,
        "generate/max_tokens_non_zero_rewards": 6.0,
        "generate/max_tokens_zero_rewards": 4.0,
        "generate/stop_ratio_non_zero_rewards": 1.0,
        "generate/stop_ratio_zero_rewards": 0.0,
        "generate/unknown_ids": 0,
        "generate/tokens_crc32": 2329099562,
        "environment/exact": 0.5,
    }


def test_tokens_that_the_tokenizer_has_not_are_counted():
    # of 3 ids: 3 and 7 are none of them
    output = columns(response_ids=[[0, 3], [2, 1, 0, 2], [7, 2, 3, 0, 0, 0]])
    assert generate_metrics(output, 3)["generate/unknown_ids"] == 3
    assert generate_metrics(output, 8)["generate/unknown_ids"] == 0


def test_generate_metrics_when_nothing_is_rewarded():
    metrics = generate_metrics(columns(rewards=[0.0, 0.0, 0.0]), 2)
    assert metrics["generate/avg_tokens_non_zero_rewards"] == 0.0
    assert metrics["generate/avg_tokens_zero_rewards"] == 4.0


def surprise(noise):
    """Of 64 x 63 tokens of a policy, to one whose logits have so much noise."""
    rng = np.random.default_rng(0)
    shape = 64, 64
    logits = rng.normal(size=(*shape, 16))
    tokens = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    logits = logits + noise * rng.normal(size=logits.shape)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    said = np.take_along_axis(log_p, tokens[..., None], -1)[..., 0]
    mask = np.ones(shape, np.float32)
    mask[:, 0] = 0
    batch = empty_batch(*shape).replace(loss_mask=mask, old_log_probs=said, rollout_log_probs=None)
    return mismatch_metrics(batch, -(np.exp(log_p) * log_p).sum(-1))


def test_the_surprise_of_the_policys_own_tokens_is_standard_normal():
    metrics = surprise(0.0)
    assert abs(metrics["policy/rollout_surprise_z"]) < 3
    check_surprise(metrics, SamplingParams())


def test_tokens_of_stale_weights_surprise():
    metrics = surprise(0.5)
    check_surprise(metrics, SamplingParams(top_p=0.9))  # they are not meant to be the policy's
    with pytest.raises(RuntimeError, match=r"rollout_surprise_z=\d.*stale or wrong weights"):
        check_surprise(metrics, SamplingParams())
