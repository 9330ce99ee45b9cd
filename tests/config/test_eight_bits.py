"""A sampler in 8 bits needs an objective that corrects for it."""

import pytest

from jaxrl.config import TrainConfig, objective_card, resolve, validate
from jaxrl.config.supervised import validate_sft

ENGINE, ALGORITHM = "generator.inference_engine", "trainer.algorithm"
INT8, FP8 = {f"{ENGINE}.quantization": "int8"}, {f"{ENGINE}.kv_cache_dtype": "fp8"}
TOKEN = {f"{ALGORITHM}.off_policy_correction.tis_ratio_type": "token"}


def rollout_loss(log_probs, old_log_probs, advantages, config, rollout_log_probs=None):
    return -log_probs * advantages, {}


def plain_loss(log_probs, old_log_probs, advantages, config):
    return -log_probs * advantages, {}


def loss(name):
    return {f"{ALGORITHM}.policy_loss_type": name}


def config_with(*parts):
    settings = {name: value for part in parts for name, value in part.items()}
    return TrainConfig.from_cli_overrides(settings)


@pytest.mark.parametrize("eight", [INT8, FP8], ids=str)
@pytest.mark.parametrize(
    "correction",
    [
        TOKEN,
        {f"{ALGORITHM}.off_policy_correction.outlier_token_is_threshold_low": 1e-4},
        {f"{ALGORITHM}.old_log_probs": "rollout"},
        loss("decoupled_ppo"),
        loss("rollout_is"),
        loss(f"{__name__}:rollout_loss"),
    ],
    ids=str,
)
def test_what_corrects_is_enough(eight, correction):
    validate(config_with(eight, correction))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            INT8,
            r"quantization='int8': samples from another .*tis_ratio_type='token' or .* or None",
        ),
        (FP8, r"kv_cache_dtype='fp8': samples from another distribution than the policy"),
        (INT8 | loss(f"{__name__}:plain_loss"), r"quantization='int8': samples from another"),
        (
            INT8 | TOKEN | {"trainer.exact": "log_probs"},
            r"'int8': trainer.exact='log_probs' promises",
        ),
        (
            INT8 | TOKEN | {f"{ENGINE}.backend": "vllm"},
            r"quantization='int8': is for jaxrl's own engine .* engine_init_kwargs\); set None",
        ),
        (
            FP8
            | TOKEN
            | {f"{ENGINE}.run_engines_locally": False, f"{ENGINE}.remote_urls": ["http://a:1"]},
            r"kv_cache_dtype='fp8': is for jaxrl's own engine",
        ),
        (
            {f"{ENGINE}.engine_init_kwargs": {"quantization": "int8"}},
            r"engine_init_kwargs=.*set generator.inference_engine.quantization",
        ),
        ({f"{ENGINE}.quantization": "int4"}, r"quantization='int4': must be None or 'int8' or"),
    ],
    ids=str,
)
def test_what_nothing_corrects_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        validate(config_with(settings))


def test_supervised_fine_tuning_has_no_sampler():
    with pytest.raises(ValueError, match="quantization='int8': has no effect in supervised"):
        validate_sft(config_with(INT8))


def test_the_card_names_the_correction():
    def line(*parts):
        card = objective_card(resolve(config_with(*parts)))
        return next((x for x in card.splitlines() if "8 bits" in x), None)

    assert line() is None
    assert line(INT8, TOKEN).endswith(
        "8 bits (weights int8): corrected by c, the off-policy correction"
    )
    rollout = {f"{ALGORITHM}.old_log_probs": "rollout"}
    assert "(keys and values fp8): corrected by r, which is" in line(FP8, rollout)
