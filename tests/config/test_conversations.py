"""What conversations exclude, and that what is allowed passes."""

import warnings

import pytest

from tests.config.test_validation import check

GYM = "environment.skyrl_gym"
STEP_WISE = {"generator.step_wise_trajectories": True, "generator.max_turns": 3}


@pytest.mark.parametrize(
    "overrides",
    [
        {"generator.batched": True},
        {"generator.max_turns": 3, "generator.max_input_length": 2048},
        {"generator.max_turns": 3, "generator.sampling_params.stop": ["</a>"]},
        {**STEP_WISE, "generator.merge_stepwise_output": True},
        {"environment.skyrl_gym.env_timeout_seconds": None},
    ],
)
def test_what_is_allowed(overrides):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"environment.env_class": "gsm8"},
            "environment.env_class='gsm8': unknown environment 'gsm8'; did you mean 'gsm8k'",
        ),
        ({"generator.max_turns": 0}, "generator.max_turns=0: must be positive"),
        ({f"{GYM}.search.topk": 0}, "search.topk=0: must be positive; set it to 1"),
        ({f"{GYM}.search.search_url": "localhost:8000"}, "'localhost:8000': must begin with http"),
        ({f"{GYM}.llm_as_a_judge.base_url": "file:///x"}, "base_url='file:///x': must begin"),
        ({f"{GYM}.llm_as_a_judge.max_attempts": 0}, "max_attempts=0: must be positive"),
        (  # 5 x 120 + 1.5 (1 + 2 + 4 + 8)
            {"environment.env_class": "search", f"{GYM}.search.timeout": 120},
            r"search.timeout=120: 5 attempts .* up to 622.5 s, more than .*env_timeout_seconds=300",
        ),
        (
            {"environment.env_class": "llm_as_a_judge", f"{GYM}.env_timeout_seconds": 250.0},
            r"llm_as_a_judge.timeout=60.0: 4 attempts .* up to 250.5 s",  # 240 + 1.5 (1 + 2 + 4)
        ),
        ({f"{GYM}.llm_as_a_judge.prompt": "Is it?"}, r"prompt='Is it\?': .* hold {response}"),
        (
            {f"{GYM}.llm_as_a_judge.sampling_params": {"n": 2}},
            r"sampling_params={'n': 2}: must not hold 'n'; remove it",
        ),
        (
            {"generator.max_input_length": 600},
            "max_input_length=600: with one turn it must equal trainer.max_prompt_length=512",
        ),
        (
            {"generator.max_turns": 2, "generator.max_input_length": 511},
            "max_input_length=511: shorter than a prompt .*; set it to 512 or more",
        ),
        (
            {"generator.max_turns": 2, "generator.batched": True},
            "generator.batched=True: with generator.max_turns=2: .*set it to False",
        ),
        (
            {"generator.merge_stepwise_output": True},
            "nothing to merge without generator.step_wise_trajectories",
        ),
        ({**STEP_WISE, "generator.use_conversation_multi_turn": False}, "set it to True"),
        (
            {**STEP_WISE, "trainer.algorithm.advantage_estimator": "reinforce++"},
            "advantage_estimator='reinforce[+][+]': with generator.step_wise_trajectories=True",
        ),
        ({**STEP_WISE, "trainer.algorithm.loss_reduction": "token_mean_legacy"}, "'token_mean'"),
        (
            {
                **STEP_WISE,
                "trainer.algorithm.use_kl_in_reward": True,
                "trainer.algorithm.use_kl_loss": False,
            },
            "use_kl_in_reward=True: with generator.step_wise",
        ),
        ({**STEP_WISE, "trainer.algorithm.advantage_batch_normalize": True}, "set it to False"),
        ({**STEP_WISE, "generator.max_turns": 1, "generator.batched": True}, "batched=True: with"),
        ({"generator.sampling_params.stop": [""]}, r"sampling_params.stop=\[''\]: would end at"),
        ({"generator.eval_sampling_params.stop": ["a", ""]}, "eval_sampling_params.stop="),
        (
            {"environment.skyrl_gym.max_env_workers": -1},
            "max_env_workers=-1: must not be negative; set it to 0 or more",
        ),
        ({"environment.skyrl_gym.env_timeout_seconds": 0.0}, "env_timeout_seconds=0.0: must be"),
        (
            {"environment.skyrl_gym.ray_env_workers": -1},
            "ray_env_workers=-1: must not be negative; set it to 0",
        ),
        (
            {
                "environment.skyrl_gym.ray_env_workers": 2,
                "environment.skyrl_gym.max_env_workers": 0,
            },
            "max_env_workers=0: with environment.skyrl_gym.ray_env_workers=2: no call",
        ),
    ],
)
def test_what_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        check(overrides)
