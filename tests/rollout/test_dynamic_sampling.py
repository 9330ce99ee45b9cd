import itertools

import pytest

from jaxrl.config import DynamicSamplingConfig, OverlongBufferConfig, TrainConfig
from jaxrl.rollout.conversations.dynamic_sampling import (
    DynamicSamplingError,
    collect,
    distinct_uids,
    dynamic_sampling,
)
from jaxrl.training.rewards import shape_rewards


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
            "loss_masks": [[1]] * len(rows),
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


def test_rows_with_nothing_to_learn_from_are_no_evidence():
    """a's 0 is a failed trajectory; of b one is left; d was cut off, which `judged` masks."""
    given = {"a": [0, 1, 1], "b": [0, 1, 0], "c": [0, 1, 0], "d": [0, 1, 1]}
    masks = [[0], [1], [1], [0], [1], [0], [1], [1], [0], [1], [1], [1]]

    def draw(attempt):
        output, uids = batches(given)[0](1)
        return {**output, "loss_masks": masks}, uids

    def judged(output):
        return {**output, "loss_masks": masks[:9] + [[0], [1], [1]]}

    settings = DynamicSamplingConfig(type="filter", max_sample_batches=1)
    output, uids = dynamic_sampling(draw, settings, prompts=1, tol=1e-6, seed=(1,), judged=judged)
    assert uids == ["c"] * 3
    assert output["loss_masks"] == [[1], [1], [0]]  # as they were drawn


@pytest.mark.parametrize("kind", ["filter", "replace"])
def test_all_steps_of_a_trajectory_stay_together(kind):
    """Samples of a: 1 step earning 1, 2 steps earning 1; of b: 2 steps earning 1, 1 step 0."""

    def draw(attempt):
        return {
            "response_ids": [["a0"], ["a1"], ["a1+"], ["b0"], ["b0+"], ["b1"]],
            "rewards": [[1.0], [0.0], [1.0], [0.0], [1.0], [0.0]],
            "loss_masks": [[1]] * 6,
            "is_last_step": [True, False, True, False, True, True],
            "rollout_metrics": {},
        }, ["a", "a", "b", "b"]

    settings = DynamicSamplingConfig(type=kind)
    output, uids = dynamic_sampling(draw, settings, prompts=2, tol=1e-6, seed=(1,))
    assert output["response_ids"] == [["b0"], ["b0+"], ["b1"]] * 2
    assert output["is_last_step"] == [False, True, True] * 2
    assert uids == ["b", "b", "b#2", "b#2"]


def test_prompts_are_judged_before_the_overlong_punishment():
    """Two right answers of 8 and 16 tokens; the second is trained on with 1 - (16 - 10) / 10."""
    config = TrainConfig()
    algorithm, generator = config.trainer.algorithm, config.generator
    config.trainer.train_batch_size = 1
    algorithm.dynamic_sampling = DynamicSamplingConfig(type="filter", max_sample_batches=1)
    algorithm.overlong_buffer = OverlongBufferConfig(len=10, penalty_factor=1.0)
    generator.sampling_params.max_generate_length = 20
    output = {
        "response_ids": [[1] * 8, [1] * 16],
        "rewards": [1.0, 1.0],
        "loss_masks": [[1] * 8, [1] * 16],
        "stop_reasons": ["stop", "stop"],
        "rollout_metrics": {},
    }
    shaped, _ = shape_rewards(output, ["a", "a"], generator, algorithm)
    assert [sum(rewards) for rewards in shaped["rewards"]] == pytest.approx([1.0, 0.4])
    with pytest.raises(DynamicSamplingError):  # alike, as in DAPO
        collect(lambda attempt: (output, ["a", "a"]), config, step=1)
    algorithm.zero_variance_filter = True  # judges what is trained on
    shaped, _ = shape_rewards(output, ["a", "a"], generator, algorithm)
    assert all(map(any, shaped["loss_masks"]))
