"""Samples that go on in the next step are refused where they cannot, or nothing corrects."""

import pytest

from jaxrl.config import TrainConfig, objective_card, resolve, validate

GROUP = "generator.partial_rollouts"
BOTH = {f"{GROUP}.max_tokens_per_step": 512, f"{GROUP}.extra_prompts": 64}
SIZES = {"trainer.train_batch_size": 64, "trainer.policy_mini_batch_size": 64}
CORRECTED = {"trainer.algorithm.off_policy_correction.tis_ratio_type": "token"}


def config_with(*parts):
    settings = {name: value for part in parts for name, value in part.items()}
    return TrainConfig.from_cli_overrides(settings)


def test_the_card_says_what_is_carried():
    config = config_with(BOTH, CORRECTED, SIZES)
    validate(config)
    card = " ".join(objective_card(resolve(config)).split())
    assert "of 128 groups under way the 64 oldest that are at their end are trained" in card


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (BOTH, r"max_tokens_per_step=512: trains on tokens of older policies"),
        ({f"{GROUP}.extra_prompts": 4}, r"extra_prompts=4: has no effect without max_tokens"),
        (CORRECTED | {f"{GROUP}.max_tokens_per_step": 5}, r"extra_prompts=0: must be at least 1"),
        (
            BOTH | CORRECTED | {"trainer.fully_async.enabled": True},
            r"=512: is for the synchronous trainer",
        ),
        (BOTH | CORRECTED | {"generator.max_turns": 2}, r"=512: needs generator.max_turns=1"),
        (
            BOTH | CORRECTED | {"generator.sampling_params.stop": ["</a>"]},
            r"=512: with generator.sampling_params.stop=\['</a>'\]: a string that",
        ),
        (BOTH | CORRECTED | {"trainer.exact": "log_probs"}, r"=512: with trainer.exact"),
    ],
)
def test_what_cannot_be_carried_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        validate(config_with(settings))
