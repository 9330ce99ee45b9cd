"""What a loss may take its ratio against, and when."""

import re
import warnings

import pytest

from jaxrl.config import TrainConfig, resolve, validate
from jaxrl.config.objective_requirements import needs_old_log_probs, ratio_anchor
from jaxrl.config.validation import check_staleness
from jaxrl.losses import LOSSES

ROLLOUT = {"old_log_probs": "rollout"}
TOKEN = {"off_policy_correction.tis_ratio_type": "token"}
MASK = "off_policy_correction.sequence_mask_metric"
LOG_LINEAR = {"policy_loss_type": "decoupled_ppo", "decoupled_ppo.proximal": "log_linear"}


def my_loss(log_probs, old_log_probs, advantages, config):
    return -log_probs * advantages, {}


def config_with(settings):
    overrides = {f"trainer.algorithm.{name}": value for name, value in settings.items()}
    return TrainConfig.from_cli_overrides(overrides)


def algorithm_with(**settings):
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    return resolve(config_with(dotted)).trainer.algorithm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"old_log_probs": "sampler"}, r"old_log_probs='sampler': must be 'trainer' or 'rollout'"),
        ({"decoupled_ppo.proximal": "old"}, r"proximal='old': must be 'forward' or 'log_linear'"),
        (
            {"policy_loss_type": "decoupled_ppo", "decoupled_ppo.behave_cap": 0.5},
            r"behave_cap=0.5: must be 1 or more",
        ),
        (
            ROLLOUT | TOKEN,
            r"old_log_probs='rollout': off_policy_correction weighs by .*; set 'trainer', or turn",
        ),
        (
            ROLLOUT | {MASK: "geometric"},
            r"old_log_probs='rollout': off_policy_correction weighs by",
        ),
        (
            ROLLOUT | {"policy_loss_type": "decoupled_ppo"},
            r"old_log_probs='rollout': policy_loss_type='decoupled_ppo' would be clipped around",
        ),
        *(
            (
                settings | TOKEN,
                r"tis_ratio_type='token': policy_loss_type='decoupled_ppo' .* would count twice",
            )
            for settings in ({"policy_loss_type": "decoupled_ppo"}, LOG_LINEAR)
        ),
    ],
    ids=str,
)
def test_what_counts_twice_or_means_nothing_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        validate(config_with(settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ROLLOUT, r"old_log_probs='rollout': needs the sampler's log-probs, .*; set 'trainer'"),
        ({"policy_loss_type": "decoupled_ppo"}, r"type='decoupled_ppo': needs the sampler's"),
    ],
    ids=str,
)
def test_the_log_probs_of_the_sampler_must_be_recorded(settings, message):
    config = config_with(settings)
    config.generator.sampling_params.logprobs = None
    with pytest.raises(ValueError, match=message):
        validate(config)


@pytest.mark.parametrize(
    "settings",
    [
        ROLLOUT,
        LOG_LINEAR,
        LOG_LINEAR | ROLLOUT,
        {"policy_loss_type": "decoupled_ppo"},
        # masks of trainer against sampler count nothing twice
        {"policy_loss_type": "decoupled_ppo", MASK: "geometric"},
        ROLLOUT | {"policy_loss_type": "rollout_is", "eps_clip_low": 0.5, "eps_clip_high": 4.0},
        ROLLOUT | {"use_kl_loss": False, "use_kl_in_reward": True, "kl_estimator_type": "k1"},
    ],
    ids=str,
)
def test_what_makes_sense_is_accepted_without_a_word(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(config_with(settings))


def test_no_forward_pass_where_the_sampler_gives_the_anchor():
    # the default has two updates per step, so that "old" is recomputed
    expected = [
        ({}, "old", True),
        (ROLLOUT, "rollout", False),
        (ROLLOUT | {"policy_loss_type": "importance_sampling"}, "rollout", False),
        (ROLLOUT | {"policy_loss_type": "cross_entropy"}, None, False),
        ({"policy_loss_type": "decoupled_ppo"}, "old", True),
        (LOG_LINEAR, "rollout", False),
        (ROLLOUT | {"use_kl_loss": False, "use_kl_in_reward": True}, "rollout", False),
    ]
    for settings, anchor, needed in expected:
        trainer = resolve(config_with(settings)).trainer
        trainer.train_batch_size, trainer.policy_mini_batch_size = 8, 4
        assert ratio_anchor(trainer.algorithm) == anchor, settings
        assert needs_old_log_probs(trainer) is needed, settings


# ---------------------------------------------------------------- rollouts of an older policy

CORRECTED = {"rollout_is", "dppo", "decoupled_ppo", "topr", "m2po", "ipo"}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_against_the_policy_before_the_step_is_refused_with_stale_rollouts(name):
    algorithm = algorithm_with(policy_loss_type=name)
    check_staleness(algorithm, 0)  # not stale
    if name in CORRECTED:
        check_staleness(algorithm, 4)
        return
    message = rf"policy_loss_type='{name}': with .*max_staleness_steps=4: .* set .*'decoupled_ppo'"
    with pytest.raises(ValueError, match=message) as error:
        check_staleness(algorithm, 4)
    assert ("old_log_probs='rollout'" in str(error.value)) is (name not in {"cross_entropy", "gpg"})
    uncorrected = {"clip_cov", "kl_cov", "gmpo", "cross_entropy", "vespo", "bapo"}
    assert ("tis_ratio_type='token'" in str(error.value)) is (name not in uncorrected)


@pytest.mark.parametrize(
    "settings",
    [
        ROLLOUT,
        TOKEN,
        {"off_policy_correction.tis_ratio_type": "sequence", "policy_loss_type": "gspo"},
        {"policy_loss_type": "cispo", "cispo.cispo_anchor": "rollout"},
        LOG_LINEAR,
        ROLLOUT | {"policy_loss_type": "clip_cov"},
        {"policy_loss_type": f"{__name__}:my_loss"},
    ],
    ids=str,
)
def test_the_ways_to_account_for_staleness(settings):
    check_staleness(resolve(config_with(settings)).trainer.algorithm, 8)


def test_masks_alone_do_not_account_for_staleness():
    settings = {MASK: "geometric"}
    fix = re.escape("off_policy_correction.tis_ratio_type='token'")
    with pytest.raises(ValueError, match=rf"policy_loss_type='regular': .*{fix}"):
        check_staleness(resolve(config_with(settings)).trainer.algorithm, 1)
