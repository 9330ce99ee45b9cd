"""Group-relative advantages of the shortest samples."""

from functools import partial

import jax
import numpy as np
import pytest

from jaxrl.advantages.gfpo import gfpo as eager
from jaxrl.advantages.grpo import grpo

gfpo = jax.jit(eager, static_argnames=("keep", "metric", "grpo_norm_by_std"))

# Two are kept. Group 0, lengths 3, 1, 2, 2 with scores 1, 1, 0, 1: the shortest is kept, and the
#   first of length 2: scores 1, 0: mean 1/2, std 1 / sqrt(2): +-0.7071068
# Group 1, lengths 1, 3, scores 2, 4: both: mean 3, std sqrt(2): -+0.7071068
# Group 2, alone: its score. The last row, of group 0, failed: it is the shortest, and not kept.
INDEX = np.array([0, 1, 0, 0, 1, 2, 0, 0])
LENGTHS = np.array([3, 1, 1, 2, 3, 2, 2, 1])
SCORES = np.array([1, 2, 1, 0, 4, 5, 1, 0], np.float32)
HALF = 0.7071068
SHORTEST = np.array([0, -HALF, HALF, -HALF, HALF, 5, 0, 0])
# The best of group 0 per token are 1 / 1 and 1 / 2, not 1 / 3, 0: equal scores
EFFICIENT = np.array([0, -HALF, 0, 0, HALF, 5, 0, 0])
MASK = (np.arange(3) < LENGTHS[:, None]).astype(np.float32)
REWARDS = np.stack([SCORES, 0 * SCORES, 0 * SCORES], axis=1)
VALID = np.arange(8) != 7


@pytest.mark.parametrize("said_by", ["valid_mask", "loss_mask"])
@pytest.mark.parametrize(
    ("metric", "expected"), [("length", SHORTEST), ("token_efficiency", EFFICIENT)]
)
def test_literal_of_unequal_groups(metric, expected, said_by):
    said = {"valid_mask": VALID, "loss_mask": MASK * VALID[:, None]}[said_by]
    estimator = partial(gfpo, keep=2, metric=metric)
    advantages, returns = estimator(REWARDS, MASK, INDEX, **{said_by: said})
    np.testing.assert_allclose(advantages, expected[:, None] * MASK, rtol=1e-5)
    np.testing.assert_array_equal(returns, advantages)


def test_of_equally_efficient_samples_the_shorter_is_kept():
    # scores 2, 2, 1 of lengths 1, 2, 1: 2, 1, 1 per token; the first and the last are kept: mean
    # 3/2, std 1 / sqrt(2)
    mask = np.array([[1, 0], [1, 1], [1, 0]], np.float32)
    rewards = np.array([[2, 0], [2, 0], [1, 0]], np.float32)
    advantages, _ = gfpo(rewards, mask, np.zeros(3, int), keep=2, metric="token_efficiency")
    np.testing.assert_allclose(advantages, [[HALF, 0], [0, 0], [-HALF, 0]], rtol=1e-5)


def test_without_the_standard_deviation():
    # group 0: 1 - 1/2, 0 - 1/2; group 1: 2 - 3, 4 - 3
    advantages, _ = gfpo(REWARDS, MASK, INDEX, keep=2, valid_mask=VALID, grpo_norm_by_std=False)
    expected = np.array([0, -1, 0.5, -0.5, 1, 5, 0, 0])[:, None] * MASK
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)


@pytest.mark.parametrize("metric", ["length", "token_efficiency"])
@pytest.mark.parametrize("keep", [1, 2, 3, 6])
def test_equals_sorting_each_group(metric, keep):
    rng = np.random.default_rng(keep)
    index, scores = rng.integers(0, 5, 20), rng.normal(size=20)
    lengths = rng.permutation(20) + 1
    mask = (np.arange(20) < lengths[:, None]) * 1.0
    expected = np.zeros(20)
    for group in range(5):
        rows = np.flatnonzero(index == group)
        key = lengths if metric == "length" else -scores / lengths
        kept = sorted(rows, key=lambda row: key[row])[:keep]
        if len(rows) == 1:
            expected[kept] = scores[kept] / (1 + 1e-6)
        elif len(kept) > 1:
            expected[kept] = (scores[kept] - scores[kept].mean()) / (
                scores[kept].std(ddof=1) + 1e-6
            )
    with jax.enable_x64(True):
        rewards = np.zeros((20, 20))
        rewards[:, 0] = scores
        found, _ = gfpo(rewards, mask, index, keep=keep, metric=metric)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-10, atol=1e-12)


def test_keeping_all_is_grpo():
    found, _ = gfpo(REWARDS, MASK, INDEX, keep=9)
    np.testing.assert_array_equal(found, jax.jit(grpo)(REWARDS, MASK, INDEX)[0])


def test_another_metric_is_refused():
    with pytest.raises(ValueError, match=r"one of \['length', 'token_efficiency'\], got 'size'"):
        gfpo(REWARDS, MASK, INDEX, metric="size")
