import re
import warnings

import pytest

from jaxrl.config import AlgorithmConfig, TrainConfig, resolve, validate
from jaxrl.config.objective_requirements import allowed_reductions, corrects_itself, ratio_anchor
from jaxrl.config.oddities import warn_of_scale
from jaxrl.config.validation import check_objective
from jaxrl.losses.dppo import dppo  # noqa: F401, for a path
from jaxrl.losses.gmpo import gmpo  # noqa: F401, for a path

CORRECTION = "off_policy_correction"
HIGH = "outlier_token_is_threshold_high"
INCOHERENT = [
    (
        {"use_kl_in_reward": True},
        r"use_kl_in_reward=True: the KL would count twice, .*; set use_kl_loss to False",
    ),
    (
        {"use_kl_loss": False, "use_kl_in_reward": True, "kl_ctrl.horizon": 0},
        r"kl_ctrl.horizon=0: must be > 0",
    ),
    ({"kl_ctrl.type": "adaptive", "kl_ctrl.kl_target": 0}, r"kl_ctrl.kl_target=0.0: must be > 0"),
    ({"kl_ctrl.type": "adaptiv"}, r"kl_ctrl.type='adaptiv': must be .*mean 'adaptive'"),
    ({"policy_loss_type": "dual_clip", "clip_ratio_c": 1}, r"clip_ratio_c=1.0: must be > 1"),
    ({"policy_loss_type": "sapo", "sapo.tau_neg": 0}, r"sapo.tau_neg=0.0: must be > 0"),
    ({"dppo.dppo_type": "tv"}, r"dppo.dppo_type='tv': must be 'binary_tv' or 'binary_kl'"),
    ({"cispo.cispo_anchor": "new"}, r"cispo.cispo_anchor='new': must be 'old' or 'rollout'"),
    (
        {"policy_loss_type": f"{__name__}:one_number", f"{CORRECTION}.tis_ratio_type": "token"},
        r"policy_loss_type='.*:one_number': it returns one number: .* would have no effect",
    ),
    (
        {"policy_loss_type": "cispo", "cispo.cispo_anchor": "new"},
        r"cispo.cispo_anchor='new': must be 'old' or 'rollout'",
    ),
    (
        {"policy_loss_type": "cispo", "cispo.cispo_eps_clip_low": -1},
        r"cispo.cispo_eps_clip_low=-1.0: must be 0 or more",
    ),
    (
        {"policy_loss_type": "dppo", "dppo.dppo_type": "tv"},
        r"dppo.dppo_type='tv': must be 'binary_tv' or 'binary_kl'",
    ),
    ({"policy_loss_type": "dppo", "dppo.delta_low": -1}, r"dppo.delta_low=-1.0: must be 0 or more"),
    (
        {"policy_loss_type": "clip_cov", "clip_cov.clip_ratio": 0},
        r"clip_cov.clip_ratio=0.0: must be in \(0, 1\]",
    ),
    (
        {"policy_loss_type": "clip_cov", "clip_cov.clip_cov_lb": 6},
        r"clip_cov.clip_cov_lb=6.0: must be below clip_cov_ub=5.0",
    ),
    (
        {"policy_loss_type": "kl_cov", "kl_cov.kl_cov_frac": 2},
        r"kl_cov.kl_cov_frac=2.0: must be in \(0, 1\]",
    ),
    (
        {"policy_loss_type": "gmpo"},
        r"loss_reduction='token_mean': policy_loss_type='gmpo' is defined with 'sequence_mean' on",
    ),
    *(
        (
            {"policy_loss_type": name, "loss_reduction": "sequence_mean", **correction},
            rf"policy_loss_type='{name}': no off-policy correction is defined for it: .*; turn off",
        )
        for name in ("gmpo", "clip_cov", "kl_cov", "cross_entropy")
        for correction in (
            {f"{CORRECTION}.tis_ratio_type": "token"},
            {f"{CORRECTION}.outlier_token_is_threshold_high": 100},
        )
    ),
    *(
        (
            {"policy_loss_type": name, f"{CORRECTION}.tis_ratio_type": "sequence", **anchor},
            rf"tis_ratio_type='sequence': policy_loss_type='{name}' takes its ratio against the "
            r"rollout policy already: .* count twice; set it to None",
        )
        for name, anchor in (
            ("cispo", {"cispo.cispo_anchor": "rollout"}),
            ("rollout_is", {}),
            ("dppo", {}),
        )
    ),
    # a built-in by its path, or by the path of a module that imports it
    (
        {
            "policy_loss_type": "jaxrl.losses.rollout_is:rollout_is",
            f"{CORRECTION}.tis_ratio_type": "token",
        },
        r"policy_loss_type='rollout_is' takes its ratio against the rollout policy already",
    ),
    *(
        (
            {"policy_loss_type": path, f"{CORRECTION}.tis_ratio_type": "token"},
            r"policy_loss_type='dppo' takes its ratio against the rollout policy already",
        )
        for path in ("jaxrl.losses.dppo:dppo", f"{__name__}:dppo")
    ),
    ({"policy_loss_type": f"{__name__}:gmpo"}, r"policy_loss_type='gmpo' is defined with 'seq"),
    ({"advantage_estimator": "jaxrl.advantages:gae"}, r"'gae': needs the values of a critic"),
    ({f"{CORRECTION}.tis_ratio_type": "tokens"}, r"tis_ratio_type='tokens': .* mean 'token'"),
    ({f"{CORRECTION}.sequence_mask_metric": "geo"}, r"metric='geo': must be None or 'geometric'"),
    (
        {f"{CORRECTION}.tis_ratio_type": "token", f"{CORRECTION}.token_tis_ratio_clip_high": 0},
        r"token_tis_ratio_clip_high=0.0: must be > 0: it caps weights",
    ),
    (
        {f"{CORRECTION}.token_mask_is_threshold_low": 0.5},
        r"token_mask_is_threshold_low=0.5: the token mask has two bounds; set also "
        r"token_mask_is_threshold_high, or neither",
    ),
    (
        {f"{CORRECTION}.token_mask_is_threshold_high": 2},
        r"token_mask_is_threshold_high=2.0: .* set also token_mask_is_threshold_low",
    ),
    (
        {f"{CORRECTION}.geo_mask_low": 2},
        r"geo_mask_low=2.0: must be below geo_mask_high=1.01: nothing would be left",
    ),
    *(
        (
            {f"{CORRECTION}.{bound}": value},
            rf"{bound}={value}: would drop what trainer and sampler agree on, .*; must be 1 or",
        )
        for bound, value in (
            ("outlier_token_is_threshold_high", -1.0),
            ("outlier_token_is_threshold_low", 1.5),
            ("product_mask_high", 0.9),
            ("geo_mask_low", 1.005),
        )
    ),
    (
        {f"{CORRECTION}.outlier_token_is_threshold_low": 2, f"{CORRECTION}.{HIGH}": 1.5},
        r"outlier_token_is_threshold_low=2.0: must be below",
    ),
    (
        {"policy_loss_type": "rollout_is", "eps_clip_low": 0, "eps_clip_high": 0},
        r"eps_clip_low=0.0: and eps_clip_high=0: no ratio lies strictly inside the band",
    ),
    (
        {"policy_loss_type": "kl_cov", "kl_cov.ppo_kl_coef": -1},
        r"kl_cov.ppo_kl_coef=-1.0: must be 0 or more",
    ),
    ({"gamma": 1.5}, r"gamma=1.5: must be in \[0, 1\]"),
    ({"lambd": -0.5}, r"lambd=-0.5: must be in \[0, 1\]"),
    (
        {"advantage_estimator": "grpo_token", "advantage_kwargs": {"gamma": 2.0}},
        r"advantage_kwargs.gamma=2.0: must be in \[0, 1\]",
    ),
    *(
        (
            {"policy_loss_type": "luffy", "policy_loss_kwargs": {"gamma": value}},
            rf"policy_loss_kwargs.gamma={re.escape(repr(value))}: {said}",
        )
        for value, said in (
            (float("inf"), "is not finite"),
            ("0.1", "is text; write 0.1"),
            ("a", "expected float"),
            (0, "must be positive"),
        )
    ),
    (
        {"policy_loss_type": "dro", "policy_loss_kwargs": {"beta": True}},
        r"policy_loss_kwargs.beta=True: expected float",
    ),
    ({"clip_ratio_c": float("nan")}, "clip_ratio_c=nan: is not a number"),
    ({"advantage_kwargs": {"epsilon": float("nan")}}, "advantage_kwargs.epsilon=nan: is not a nu"),
    ({"use_tis": True}, r"tis_imp_ratio_cap=-1.0: must be > 0: .* turns the loss around"),
    (
        {"use_tis": True, "tis_imp_ratio_cap": 2, f"{CORRECTION}.tis_ratio_type": "sequence"},
        r"use_tis=True: at odds with trainer.algorithm.off_policy_correction",
    ),
    ({"dynamic_sampling.type": "filtr"}, r"dynamic_sampling.type='filtr': .* mean 'filter'"),
    ({"dynamic_sampling.max_sample_batches": 0}, r"max_sample_batches=0: must be positive, or -1"),
    ({"dynamic_sampling.min_replace_ratio": 2}, r"min_replace_ratio=2.0: must be in \[0, 1\]"),
    (
        {"zero_variance_filter_tol": -1},
        r"zero_variance_filter_tol=-1.0: must not be negative; set it to 0",
    ),
    ({"overlong_buffer": {"len": 2000}}, r"overlong_buffer.len=2000: must be in .*length=1024\]"),
    (
        {"overlong_buffer": {"len": 20, "penalty_factor": -1}},
        r"overlong_buffer.penalty_factor=-1.0: must not be negative; set it to 0",
    ),
    (
        {"advantage_estimator": "gae"},
        r"'gae': needs the values of a critic, and .*critic.model.path=None; .* 'grpo' or 'reinf",
    ),
    ({"advantage_kwargs": {"b": 1}, "advantage_estimator": f"{__name__}:strict"}, r"kwargs.b=1"),
    *(
        (
            {"advantage_estimator": name, "advantage_kwargs": {setting: 0.5}},
            rf"advantage_kwargs.{setting}=0.5: .* takes no such parameter, (only \[.+\]|and none)",
        )
        for name, setting in (("grpo", "gamma"), ("rloo", "epsilon"), ("dr_grpo", "epsilom"))
    ),
    (
        {"advantage_estimator": "rloo", "advantage_kwargs": {"response_mask": 3.0}},
        r"advantage_kwargs.response_mask=3.0: the trainer supplies 'response_mask'; remove it",
    ),
    (
        {"advantage_estimator": "reinforce++", "advantage_kwargs": {"loss_mask": 3.0}},
        r"advantage_kwargs.loss_mask=3.0: the trainer supplies",
    ),
    (
        {"policy_loss_type": f"{__name__}:takes_all", "policy_loss_kwargs": {"loss_mask": 0.3}},
        r"policy_loss_kwargs.loss_mask=0.3: the trainer supplies",
    ),
    (
        {"policy_loss_type": f"{__name__}:wants_more"},
        r"policy loss '.*:wants_more': nobody supplies its parameter 'temperature'",
    ),
    ({"advantage_estimator": f"{__name__}:critical"}, r":critical': needs the values of a critic"),
]
ODD = [
    ({"policy_loss_type": "gspo"}, "loss_reduction='token_mean': gspo is defined with 'sequence"),
    ({"policy_loss_type": "sapo"}, "loss_reduction='token_mean': sapo is defined with 'sequence"),
    (
        {"policy_loss_type": "gspo", "loss_reduction": "sequence_mean"},
        "eps_clip_low=0.2, eps_clip_high=0.2: gspo's .*; its paper has 3e-4 and 4e-4",
    ),
    (
        {"policy_loss_type": "gmpo", "loss_reduction": "sequence_mean"},
        "eps_clip_low=0.2, eps_clip_high=0.2: gmpo .*; its paper has 0.4 and 0.4",
    ),
    (
        {"policy_loss_type": "cispo", "cispo.cispo_eps_clip_low": 0},
        "cispo.cispo_eps_clip_low=0: no weight is below 1",
    ),
    ({"policy_loss_type": "cross_entropy"}, "rewards and advantage_estimator='grpo' have no"),
    ({"kl_estimator_type": "k1"}, "kl_estimator_type='k1': .*same for every token"),
    (
        {"use_kl_loss": False, "use_kl_in_reward": True, "kl_loss_coef": 0},
        "kl_loss_coef=0: use_kl_in_reward has no effect",
    ),
    (
        {"use_kl_loss": False, "use_kl_in_reward": True, "advantage_estimator": "maxrl"},
        "'maxrl' divides by the mean reward.*use_kl_in_reward rewards can be others",
    ),
    (
        {"overlong_buffer": {"len": 256}, "advantage_estimator": "jaxrl.advantages.maxrl:maxrl"},
        "'maxrl' divides by the mean reward.*overlong_buffer rewards can be others",
    ),
    (
        {"kl_loss_coef": 0.01},
        r"'k3' with kl_loss_coef=0.01: .* gradient is that of KL\(reference | policy\)",
    ),
    (
        {"policy_loss_type": "rollout_is"},
        r"outside of \(0.8, 1.2\); GLM-5 and IcePop have .* \(0.5, 5\): set 0.5 and 4.0",
    ),
    (
        {"use_kl_loss": False, "use_kl_in_reward": True},
        r"kl_estimator_type='k3': as a reward its gradient is .*; set 'k1'",
    ),
    (
        {"advantage_batch_normalize": True, "advantage_estimator": "reinforce++"},
        r"advantage_batch_normalize=True: 'reinforce\+\+' normalises over the batch itself",
    ),
    ({"eps_clip_low": 1}, "eps_clip_low=1: ratios are positive; 1 - 1 is no lower bound"),
    (
        {"kl_ctrl.type": "adaptive"},
        "kl_ctrl.type='adaptive' has no effect without use_kl_in_reward",
    ),
    ({"loss_reduction": "token_mean_legacy"}, "depends on trainer.micro_train_batch_size_per_gpu"),
    ({f"{CORRECTION}.renormalize": True}, "renormalize=True: there is no correction"),
    ({"use_tis": True, "tis_imp_ratio_cap": 2}, "use_tis=True is deprecated; set trainer"),
]
COHERENT = [
    {"advantage_kwargs": {"epsilon": 1e-4, "grpo_norm_by_std": False}},
    {"advantage_estimator": "grpo_token", "advantage_kwargs": {"gamma": 0.5}},
    {"policy_loss_type": f"{__name__}:takes_all", "policy_loss_kwargs": {"beta": 0.3}},
    {
        "policy_loss_type": "gspo",
        "loss_reduction": "sequence_mean",
        "eps_clip_low": 3e-4,
        "eps_clip_high": 4e-4,
    },
    {
        "policy_loss_type": "gmpo",
        "loss_reduction": "sequence_mean",
        "eps_clip_low": 0.4,
        "eps_clip_high": 0.4,
    },
    {"policy_loss_type": "cispo", "cispo.cispo_anchor": "rollout"},
    {
        "policy_loss_type": "gmpo",
        "loss_reduction": "sequence_mean",
        "eps_clip_low": 1.0,
        "eps_clip_high": 1.0,
    },
    # masks count nothing twice
    {
        "policy_loss_type": "rollout_is",
        "eps_clip_low": 0.5,
        "eps_clip_high": 4.0,
        f"{CORRECTION}.sequence_mask_metric": "product",
    },
    {"kl_estimator_type": "k2", "kl_loss_coef": 0.1},
    {"advantage_estimator": "maxrl"},
    {
        "use_kl_loss": False,
        "use_kl_in_reward": True,
        "kl_estimator_type": "k1",
        "kl_ctrl.type": "adaptive",
    },
    {"dynamic_sampling.type": "filter", "zero_variance_filter": True},
    {"overlong_buffer": {"len": 256}, "advantage_batch_normalize": True},
    {"loss_reduction": "prompt_mean", "advantage_estimator": "dr_grpo"},
    {f"{CORRECTION}.tis_ratio_type": "token", f"{CORRECTION}.renormalize": True},
    # to a function of the user's infinity may mean something
    {"policy_loss_type": f"{__name__}:takes_all", "policy_loss_kwargs": {"cap": float("inf")}},
    # hyperparameters of losses that are not chosen
    {"sapo.tau_pos": 0, "clip_ratio_c": 0.5, "kl_cov.kl_cov_frac": 0},
]


def strict(token_level_rewards, response_mask, index):
    return token_level_rewards, token_level_rewards


def wants_more(log_probs, old_log_probs, advantages, config, temperature):
    return -log_probs, {}


def takes_all(log_probs, old_log_probs, advantages, config, **kwargs):
    return -log_probs, {}


def one_number(log_probs, old_log_probs, advantages, config):
    return -(log_probs * advantages).mean(), 0.0


def critical(token_level_rewards, response_mask, index, values):
    return values, values


def check(settings):
    overrides = {f"trainer.algorithm.{name}": value for name, value in settings.items()}
    validate(TrainConfig.from_cli_overrides(overrides))


@pytest.mark.parametrize(("settings", "message"), INCOHERENT, ids=str)
def test_an_incoherent_objective_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        check(settings)


@pytest.mark.parametrize(("settings", "message"), ODD, ids=str)
def test_an_oddity_is_a_warning(settings, message):
    with pytest.warns(UserWarning) as caught:
        check(settings)
    text = " ".join(str(warning.message) for warning in caught)
    assert re.search(message, text)


@pytest.mark.parametrize("settings", COHERENT, ids=str)
def test_a_coherent_objective_is_accepted_without_a_word(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(settings)


@pytest.mark.parametrize(
    ("estimator", "settings"),
    [("grpo_token", {"gamma": 0.0}), ("gae", {"advantage_kwargs": {"gamma": 0.0}})],
)
def test_turns_that_learn_nothing_from_later_ones_are_warned_of(estimator, settings):
    settings = {f"trainer.algorithm.{name}": value for name, value in settings.items()}

    def said(**more):
        overrides = {"trainer.algorithm.advantage_estimator": estimator, **settings, **more}
        if estimator == "gae":
            overrides["trainer.critic.model.path"] = "m"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            validate(TrainConfig.from_cli_overrides(overrides))
        return [str(w.message) for w in caught if "later turns" in str(w.message)]

    assert said(**{"generator.max_turns": 4}) == [
        "trainer.algorithm.gamma=0 with generator.max_turns=4: a turn learns nothing from the "
        "rewards of later turns; set 1.0"
    ]
    assert not said()
    grpo = {"generator.max_turns": 4, "trainer.algorithm.advantage_estimator": "grpo"}
    if estimator == "grpo_token":
        assert not said(**grpo)  # which takes no gamma


def warned(overrides):
    with pytest.warns(UserWarning) as caught:
        validate(TrainConfig.from_cli_overrides(overrides))
    return " ".join(str(warning.message) for warning in caught)


ALGORITHM = "trainer.algorithm"
ONE_UPDATE = {"trainer.train_batch_size": 8, "trainer.policy_mini_batch_size": 8}
TWO_UPDATES = {**ONE_UPDATE, "trainer.update_epochs_per_batch": 2}
LORA = {"trainer.policy.model.lora.rank": 8, "trainer.policy.model.lora.dropout": 0.1}


def loss_settings(name):
    settings = {
        "gspo": {"eps_clip_low": 3e-4, "eps_clip_high": 4e-4},
        "gmpo": {"eps_clip_low": 0.4, "eps_clip_high": 0.4},
    }.get(name, {})
    reduction = "sequence_mean" if name in ("gspo", "sapo", "gmpo") else "token_mean"
    settings |= {"policy_loss_type": name, "loss_reduction": reduction}
    return {f"{ALGORITHM}.{field}": value for field, value in settings.items()}


@pytest.mark.parametrize("name", ["dual_clip", "gspo", "sapo", "cispo", "gmpo", "kl_cov"])
def test_a_loss_whose_ratio_is_always_one_is_a_warning(name):
    said = warned(ONE_UPDATE | loss_settings(name))
    assert f"policy_loss_type='{name}' with one update on each batch: its ratio is 1" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(TrainConfig.from_cli_overrides(TWO_UPDATES | loss_settings(name)))


@pytest.mark.parametrize("name", ["regular", "importance_sampling", "dppo", "clip_cov"])
def test_others_have_their_meaning_with_one_update(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(TrainConfig.from_cli_overrides(ONE_UPDATE | loss_settings(name)))


def test_an_estimate_of_what_is_known_is_a_warning():
    proximal = {f"{ALGORITHM}.decoupled_ppo.proximal": "log_linear"}
    given = loss_settings("decoupled_ppo") | proximal
    assert "proximal='log_linear' with one update on each batch" in warned(ONE_UPDATE | given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(TrainConfig.from_cli_overrides(TWO_UPDATES | given))


@pytest.mark.parametrize(("updates", "name"), [(TWO_UPDATES, "regular"), (ONE_UPDATE, "dppo")])
def test_dropout_on_one_side_of_a_ratio_is_a_warning(updates, name):
    said = warned(updates | LORA | loss_settings(name))
    assert "lora.dropout=0.1: the ratio is against log-probs without dropout" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(TrainConfig.from_cli_overrides(ONE_UPDATE | LORA))  # both sides are one pass


def test_reward_functions_leave_zero_and_one():
    terms = {"environment.reward_functions": ["jaxrl.envs.shaping:repetition"]}
    said = warned({f"{ALGORITHM}.advantage_estimator": "maxrl", **terms})
    assert "environment.reward_functions rewards can be others" in said


def test_a_function_is_the_same_loss_by_every_path():
    dppo_by_path = AlgorithmConfig(policy_loss_type="jaxrl.losses.dppo:dppo")  # not resolved
    assert (ratio_anchor(dppo_by_path), corrects_itself(dppo_by_path)) == ("rollout", True)
    assert allowed_reductions("jaxrl.losses.gmpo:gmpo") == ("sequence_mean",)


def test_the_deprecated_token_weights_become_the_correction():
    config = TrainConfig()
    config.trainer.algorithm.use_tis, config.trainer.algorithm.tis_imp_ratio_cap = True, 3.0
    for _ in range(2):  # resolving again changes nothing
        config = resolve(config)
        correction = config.trainer.algorithm.off_policy_correction
        assert correction.tis_ratio_type == "token"
        assert correction.token_tis_ratio_clip_high == 3.0


def test_the_overlong_punishment_is_of_one_turn():
    overrides = {"trainer.algorithm.overlong_buffer": {"len": 256}, "generator.max_turns": 2}
    config = resolve(TrainConfig.from_cli_overrides(overrides))
    message = r"overlong_buffer=.*: with generator.max_turns=2: .* one turn of it; set it to None"
    with pytest.raises(ValueError, match=message):
        check_objective(config)


def scale(platform="cpu", updates=3, positions=256, **changes):
    config = TrainConfig.from_cli_overrides([f"{k}={v}" for k, v in changes.items()])
    config = resolve(config)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        known = {"positions": positions, "vocabulary": 48, "platform": platform, "devices": 2}
        warn_of_scale(config, updates=updates, **known)
    return [str(warning.message) for warning in told]


def test_what_does_not_fit_run_model_or_machine_is_warned_of():
    fits = {
        "trainer.policy.model.path": "models/x",
        "trainer.max_prompt_length": 200,
        "generator.sampling_params.max_generate_length": 56,  # 200 + 56 = 256
        "generator.eval_sampling_params.max_generate_length": 56,
        "trainer.bf16": "false",
    }
    assert scale(**fits) == []
    warm_up = {"trainer.policy.optimizer_config.num_warmup_steps": 3}
    (line,) = scale(**fits | warm_up)
    assert "num_warmup_steps=3: the run has 3 updates" in line
    assert scale(**fits | warm_up, updates=4) == []
    (line,) = scale(**fits | {"trainer.max_prompt_length": 201})
    assert "max_prompt_length=201: with the response a row may have 257 tokens, and models" in line
    assert scale(**fits | {"trainer.max_prompt_length": 201}, positions=None) == []
    (line,) = scale(**fits | {"generator.sampling_params.stop_token_ids": "[47, 48]"})
    assert "stop_token_ids has [48], which stop nothing" in line
    (line,) = scale(**fits | {"trainer.bf16": "true"})
    assert line.startswith("trainer.bf16=True on a CPU")
    assert scale("tpu", **fits | {"trainer.bf16": "true"}) == []
    counted = "trainer.placement.policy_num_gpus_per_node"
    (line,) = scale(**fits | {counted: 8})
    assert line.startswith(f"{counted}=8: the policy has 2, all devices that there are")
    assert scale(**fits | {counted: 2}) == []
