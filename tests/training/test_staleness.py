"""The age of rollouts, from the versions of their tokens."""

import numpy as np
import pytest

from jaxrl.training.staleness import oldest_versions, staleness_metrics, token_staleness

# a prompt token, two of version 3, an observation, one of version 5; a row with nothing learnt
VERSIONS = np.array([[-1, 3, 3, -1, 5], [-1, 0, 0, -1, -1]], np.int32)
MASK = np.array([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0]], np.float32)


def test_age_is_counted_from_the_version_that_the_step_begins_with():
    age = token_staleness(VERSIONS, MASK, 5)
    np.testing.assert_array_equal(age, [[0, 2, 2, 0, 0], [0, 0, 0, 0, 0]])
    assert age.dtype == np.int32


def test_a_token_counts_as_the_older_of_its_two_versions():
    contexts = [[-1, 3, 3, -1, 4], [-1, -1, 0, -1, -1]]  # the last token was drawn by 5; -1: unsaid
    older = oldest_versions(VERSIONS, contexts)
    np.testing.assert_array_equal(older, [[-1, 3, 3, -1, 4], [-1, 0, 0, -1, -1]])
    np.testing.assert_array_equal(oldest_versions(VERSIONS, None), VERSIONS)
    np.testing.assert_array_equal(token_staleness(older, MASK, 5)[0], [0, 2, 2, 0, 1])


def test_metrics_literal():
    # ages 2, 2, 0: mean 4/3, two of three are older; one trajectory has a token older than 1
    assert staleness_metrics(VERSIONS, MASK, 5, 1) == {
        "async/staleness_mean": 4 / 3,
        "async/staleness_max": 2,
        "async/staleness_min": 0,
        "async/staleness_ratio": 2 / 3,
        "async/staleness_violation_count": 1,
    }
    assert staleness_metrics(VERSIONS, MASK, 5, 2)["async/staleness_violation_count"] == 0


def test_a_batch_without_a_sampled_token_has_no_age():
    assert staleness_metrics(VERSIONS, 0 * MASK, 5, 1) == {}


def test_a_sampled_token_without_a_version_is_refused():
    with pytest.raises(ValueError, match="'token_versions' for some sampled tokens only"):
        token_staleness(VERSIONS, np.array([[0, 1, 1, 1, 1], [0, 0, 0, 0, 0]]), 5)
