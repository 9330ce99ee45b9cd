"""Runs whose estimators look at more than sums of rewards: their names, turns, greedy answers."""

import pytest

from jaxrl.train import BasePPOExp, exit_status
from tests.test_resume import TALKS, stopped_as_whole
from tests.test_train import small


def even(action, **_):
    """A second reward, for the quickstart's task: half for an even number of characters."""
    return 0.5 * (len(action) % 2 == 0)


RUNS = {
    "gdpo": {
        "environment.reward_functions": ["tests.test_estimator_data:even"],
        "environment.reward_weights": {"environment": 1.0, "even": 0.5},
    },
    "gigpo": {
        **TALKS,
        "generator.step_wise_trajectories": True,
        "trainer.algorithm.advantage_kwargs": {"step_gamma": 0.9},
    },
    "remax": {"generator.n_samples_per_prompt": 2},
}


@pytest.mark.slow  # what is restored: tests/test_resume.py; these columns: test_reward_terms.py
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_resumed_to_the_bit(tmp_path, name):
    settings = {**RUNS[name], "trainer.algorithm.advantage_estimator": name}
    stopped_as_whole(tmp_path, lambda folder: small(folder, **settings))


def test_a_reward_without_a_name_is_refused_where_each_counts(tmp_path, capsys):
    settings = {"trainer.algorithm.advantage_estimator": "gdpo"}
    assert exit_status(BasePPOExp, small(tmp_path, **settings)) == 2
    assert "'gdpo' normalises rewards by name, and the environment" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"trainer.algorithm.advantage_estimator": "gigpo"},
            "generator.step_wise_trajectories=False: advantage_estimator='gigpo' compares turns",
        ),
        (
            {
                "trainer.algorithm.advantage_estimator": "gdpo",
                "generator.zero_reward_on_non_stop": True,
            },
            "generator.zero_reward_on_non_stop='on': changes the sum of the rewards",
        ),
        (
            {
                "trainer.algorithm.advantage_estimator": "remax",
                "generator.partial_rollouts.max_tokens_per_step": 4,
                "generator.partial_rollouts.extra_prompts": 2,
                "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
            },
            "max_tokens_per_step=4: advantage_estimator='remax' compares with the greedy answer",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, capsys, settings, said):
    assert exit_status(BasePPOExp, small(tmp_path, **settings)) == 2
    assert said in capsys.readouterr().err
