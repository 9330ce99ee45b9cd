import itertools

import pytest

from jaxrl.config import DynamicSamplingConfig
from jaxrl.rollout.dynamic_sampling import (
    DynamicSamplingError,
    distinct_uids,
    dynamic_sampling,
)


def batches(*drawn):
    """A `draw` of batches given as {uid: rewards of its samples}; tokens name uid and sample."""
    asked = []

    def draw(attempt):
        asked.append(attempt)
        batch = drawn[attempt - 1]
        rows = [(uid, i, r) for uid, rewards in batch.items() for i, r in enumerate(rewards)]
        return {
            "response_ids": [[f"{uid}{i}"] for uid, i, _ in rows],
            "rewards": [r for *_, r in rows],
            "rollout_metrics": {"environment/score": float(attempt)},
        }, [uid for uid, *_ in rows]

    return draw, asked


def sample(draw, **settings):
    return dynamic_sampling(
        draw, DynamicSamplingConfig(**settings), prompts=3, tol=1e-6, seed=(42, 7)
    )


def test_filter_collects_prompts_whose_rewards_differ_and_leaves_out_the_surplus():
    draw, asked = batches(
        {"a": [0, 1], "b": [1, 1], "c": [0, 0]},
        {"d": [[0.5, 0.5], [0.0, 1.0]], "e": [0, 0], "f": [1, 0]},  # d earns 1 twice
        {"a": [1, 0], "g": [0, 1], "h": [1, 1]},
    )
    output, uids = sample(draw, type="filter")
    assert asked == [1, 2, 3]
    assert uids == ["a", "a", "f", "f", "a#2", "a#2"]  # drawn again: a group of its own
    assert output["response_ids"] == [["a0"], ["a1"], ["f0"], ["f1"], ["a0"], ["a1"]]
    assert output["rewards"] == [0, 1, 1, 0, 1, 0]
    assert output["rollout_metrics"] == {"environment/score": 2.0}  # (1 + 2 + 3) / 3


def test_replace_lets_good_prompts_stand_in_for_the_others():
    draw, asked = batches(
        {"a": [1, 1], "b": [1, 1], "c": [0, 0]},  # none of three differs
        {"a": [0, 1], "b": [1, 1], "c": [0, 0]},
    )
    output, uids = sample(draw, type="replace", min_replace_ratio=0.3)
    assert asked == [1, 2]
    assert uids == ["a", "a", "a#2", "a#2", "a#3", "a#3"]
    assert output["response_ids"] == [["a0"], ["a1"]] * 3


def test_the_stand_ins_are_a_function_of_the_seed():
    given = {"a": [0, 1], "b": [1, 1], "c": [0, 1]}
    first, second = (sample(batches(given)[0], type="replace") for _ in range(2))
    assert first == second
    assert first[0]["response_ids"][2][0] in ("a0", "c0")


@pytest.mark.parametrize("kind", ["filter", "replace"])
def test_too_many_batches_are_an_error(kind):
    draw, asked = batches(*itertools.repeat({"a": [1, 1], "b": [0, 1], "c": [0, 0]}, 5))
    message = (
        rf"dynamic sampling \('{kind}'\) drew 2 batches of 3 prompts and has \d to train on; in "
        r"the last one the rewards of 1 differed. .*max_sample_batches \(-1 = never give up\)"
    )
    with pytest.raises(DynamicSamplingError, match=message):
        sample(draw, type=kind, max_sample_batches=2, min_replace_ratio=0.5)
    assert asked == [1, 2]


def test_uids_of_groups():
    assert distinct_uids(["a", "a", "b", "b", "a", "a"], 2) == ["a", "a", "b", "b", "a#2", "a#2"]
