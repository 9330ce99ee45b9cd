"""pass@k and intervals: literals, brute force over subsets, coverage."""

import itertools
import math

import numpy as np
import pytest

from jaxrl.training.eval_metrics import default_ks, eval_metrics, interval, pass_at_k


def test_pass_at_k_literal():
    # n = 5, c = 2: k = 1: 2/5; k = 2: 1 - C(3,2)/C(5,2) = 1 - 3/10; k = 3: 1 - C(3,3)/C(5,3)
    # = 1 - 1/10; k = 4: fewer than 4 fail, so every subset of 4 holds one that passed
    passed = np.array([[1, 0, 1, 0, 0], [0] * 5, [1] * 5], bool)
    found = [pass_at_k(passed, k).tolist() for k in range(1, 6)]
    np.testing.assert_allclose(
        found, [[0.4, 0, 1], [0.7, 0, 1], [0.9, 0, 1], [1, 0, 1], [1, 0, 1]], atol=1e-12
    )


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n):
    passed = np.arange(n)[None] < np.arange(n + 1)[:, None]  # c = 0 ... n
    for k in range(1, n + 1):
        chosen = [list(subset) for subset in itertools.combinations(range(n), k)]
        expected = [np.mean([row[s].any() for s in chosen]) for row in passed]
        np.testing.assert_allclose(pass_at_k(passed, k), expected, atol=1e-12)


def test_pass_at_k_is_not_the_plug_in_estimate():
    # 1 - (1 - c/n)^k is biased: over all outcomes of 4 samples with p = 1/2, whose pass@2 is 3/4
    outcomes = np.array(list(itertools.product([False, True], repeat=4)))
    assert pass_at_k(outcomes, 2).mean() == pytest.approx(0.75, abs=1e-12)
    plug_in = 1 - (1 - outcomes.mean(1)) ** 2
    assert plug_in.mean() == pytest.approx(0.6875)


def test_pass_at_k_of_many_samples_does_not_overflow():
    passed = np.arange(5000)[None] < 3  # 1 - C(4997, 100) / C(5000, 100)
    expected = 1 - math.comb(4997, 100) / math.comb(5000, 100)
    assert pass_at_k(passed, 100)[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("k", [0, 4])
def test_k_beyond_the_samples_is_refused(k):
    with pytest.raises(ValueError, match=f"pass@{k} of 3 samples.*between 1 and 3"):
        pass_at_k(np.zeros((2, 3), bool), k)


def test_students_interval_literal():
    # values 1, 2, 3: mean 2, standard error 1 / sqrt(3); t of 2 degrees at 97.5 % = 4.302653
    low, high = interval(np.array([1.0, 2.0, 3.0]), share=False, samples=1)
    assert (low, high) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))


def test_wilsons_interval_literal():
    # 2 of 4 pass: p = 1/2, se^2 = (1/3) / 4 = 1/12, effective size (1/4) / (1/12) = 3;
    # t of 3 degrees = 3.182446, t^2 = 10.127964; half = t / (1 + t^2/3) * sqrt(1/12 + t^2/36)
    half = 3.182446 / (1 + 10.127964 / 3) * (1 / 12 + 10.127964 / 36) ** 0.5
    ends = interval(np.array([0.0, 1.0, 1.0, 0.0]), share=True, samples=1)
    assert ends == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)


def test_an_interval_keeps_a_width_where_all_prompts_pass():
    # p = 1, size 9, t of 8 degrees = 2.306004, t^2 = 5.317654: low = 1 / (1 + t^2 / 9)
    low, high = interval(np.ones(9), share=True, samples=4)
    assert (low, high) == pytest.approx((1 / (1 + 5.317654 / 9), 1.0), abs=1e-6)
    assert interval(np.ones(1), share=True, samples=4) is None


def test_copies_of_a_sample_make_nothing_surer():
    # the samples of a prompt agree: 4 of each tell no more than 1
    once = np.array([[0.0], [1.0], [1.0], [0.0], [1.0]])
    one, four = (eval_metrics(scores, [1]) for scores in (once, np.repeat(once, 4, axis=1)))
    assert four["pass_at_1_ci_low"] == pytest.approx(one["pass_at_1_ci_low"])
    assert four["avg_score_ci_high"] == pytest.approx(one["avg_score_ci_high"])


@pytest.mark.parametrize("alpha, beta", [(1.0, 1.0), (19.0, 1.0), (0.2, 0.4)])
def test_the_interval_covers_the_truth_at_its_level(alpha, beta):
    # 2000 evaluations of 40 prompts, 4 samples each, of Beta-distributed difficulty
    rng, hits = np.random.default_rng(0), 0
    for _ in range(2000):
        chances = rng.beta(alpha, beta, size=(40, 1))
        values = (rng.random((40, 4)) < chances).mean(1)
        low, high = interval(values, share=True, samples=4)
        hits += low <= alpha / (alpha + beta) <= high
    assert 0.94 <= hits / 2000 <= 0.97


def test_ks():
    assert [default_ks(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_scores_that_are_no_shares_have_students_interval():
    scores = np.array([[0.5, 1.5], [2.0, 2.0], [3.0, 3.0]])  # the means 1, 2, 3 from above
    metrics = eval_metrics(scores, [1, 2])
    assert metrics["avg_score_ci_low"] == pytest.approx(2 - 4.302653 / 3**0.5)
    assert (metrics["pass_at_1"], metrics["pass_at_2"]) == (1.0, 1.0)


def test_the_interval_of_scores_from_0_to_1_stays_there():
    scores = np.array([[0.9, 1.0], [1.0, 1.0], [1.0, 1.0]])  # means 0.95, 1, 1: 0.9833 +- 0.0717
    metrics = eval_metrics(scores, [1])
    assert metrics["avg_score_ci_low"] == pytest.approx(
        0.98333 - 4.302653 * 0.0288675 / 3**0.5, abs=1e-4
    )
    assert metrics["avg_score_ci_high"] == 1.0
