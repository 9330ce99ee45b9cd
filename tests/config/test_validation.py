import copy
import pickle
import warnings

import pytest

from jaxrl import registry
from jaxrl.config import (
    AlgorithmConfig,
    TrainConfig,
    make_config,
    resolve,
    validate,
)
from jaxrl.config.dataclass_config import flatten
from jaxrl.config_error import ConfigError


def check(overrides, num_devices=1):
    validate(TrainConfig.from_cli_overrides(overrides), num_devices)


def my_loss(log_probs, old_log_probs, advantages, config, loss_mask=None, *, beta=0.1):
    return -beta * log_probs * advantages, {}


def my_estimator(token_level_rewards, response_mask, index, **kwargs):
    return token_level_rewards, token_level_rewards


def test_defaults_are_valid_and_silent():
    config = TrainConfig()
    before = copy.deepcopy(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(config)
        validate(resolve(config), num_devices=8)
    assert config == before


def test_nan_is_refused_wherever_it_stands():
    with pytest.raises(ValueError, match="optimizer_config.lr=nan: is not a number"):
        check({"trainer.policy.optimizer_config.lr": float("nan")})


def test_settings_of_a_feature_that_is_off_may_have_any_value():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(
            {
                "trainer.policy.model.lora.alpha": 32,
                "trainer.critic_mini_batch_size": 64,
                "trainer.critic.optimizer_config.lr": 1e-5,
                "trainer.algorithm.kl_ctrl.horizon": 1,
                "trainer.algorithm.cispo.cispo_eps_clip_high": 5,
                "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high": 3,
            }
        )


def test_inert_fields_are_named_in_one_warning():
    with pytest.warns(UserWarning) as caught:
        check(
            {
                "generator.inference_engine.async_engine": False,
                "trainer.policy.use_torch_compile": True,
            }
        )
    assert [str(w.message) for w in caught] == [
        "config fields without effect in jaxrl: trainer.policy.use_torch_compile=True (everything "
        "is jitted); generator.inference_engine.async_engine=False (vLLM only)"
    ]


def test_fields_of_a_user_class_are_not_judged():
    from dataclasses import dataclass

    @dataclass
    class MyAlgorithmConfig(AlgorithmConfig):
        my_param: int = 42

    cls = make_config(algorithm_cls=MyAlgorithmConfig)
    validate(cls.from_cli_overrides({"trainer.algorithm.my_param": 1}))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"trainer.strategy": "fsdp3"},
            r"trainer.strategy='fsdp3': must be 'jax' or 'fsdp' or 'fsdp2' or 'megatron'; did you "
            r"mean 'fsdp2?'\?",
        ),
        (
            {"trainer.resume_mode": "last"},
            r"trainer.resume_mode='last': must be None or 'none' or 'latest' or 'from_path'; did "
            r"you mean 'latest'\?",
        ),
        (
            {"trainer.policy.optimizer_config.scheduler": "cosin"},
            r"trainer.policy.optimizer_config.scheduler='cosin': .* did you mean 'cosine'\?",
        ),
        (
            {"trainer.algorithm.kl_estimator_type": "k4"},
            r"trainer.algorithm.kl_estimator_type='k4': must be "
            r"'k1' or 'k2' or 'k3' or 'k3\+' or 'abs'",
        ),
        (
            {"trainer.algorithm.loss_reduction": "tokenmean"},
            r"trainer.algorithm.loss_reduction='tokenmean': .* did you mean 'token_mean'\?",
        ),
        (
            {"generator.sampling_params.additional_kwargs": {"min_token": 4}},
            r"sampling_params.additional_kwargs={'min_token': 4}: the native engine takes "
            r"'min_tokens'",
        ),
        (
            {"generator.sampling_params.repetition_penalty": 0.0},
            r"sampling_params.repetition_penalty=0.0: must be > 0; 1.0 is off",
        ),
        (
            {"generator.inference_engine.num_engines": 3},
            r"num_engines=3: times tensor_parallel_size=1 is 3, which does not divide 1 devices",
        ),
        (
            {"generator.inference_engine.gpu_memory_utilization": 1.5},
            r"gpu_memory_utilization=1.5: must be in \(0, 1\]; it is a share of the memory",
        ),
        (
            {"generator.inference_engine.backend": "sglang"},
            r"inference_engine.backend='sglang': not available yet, must be 'native' or 'vllm'",
        ),
        (
            {"generator.inference_engine.model_dtype": "float16"},
            r"generator.inference_engine.model_dtype='float16': must be 'float32' or 'bfloat16' or "
            r"'auto'",
        ),
        (
            {"trainer.logger": "swanlab"},
            r"trainer.logger='swanlab': not available yet, must be 'console' or 'jsonl' or 'tens",
        ),
        (
            {"trainer.logger": "['console', 'tensorbord']"},
            r"trainer.logger='tensorbord': must be .*; did you mean 'tensorboard'\?",
        ),
        (
            {"trainer.watching.on_alarm": "halt"},
            r"trainer.watching.on_alarm='halt': must be 'warn' or 'checkpoint' or 'stop'",
        ),
        (
            {"trainer.watching.thresholds": {"entropy_colapse": 0.1}},
            r"thresholds.entropy_colapse=0.1: no such alarm, .* mean 'entropy_collapse'\?",
        ),
        (
            {"trainer.watching.thresholds": {"not_finite": float("nan")}},
            r"trainer.watching.thresholds.not_finite=nan: is not a number|must be a number",
        ),
        (
            {"trainer.watching.trace_steps": [0, 3]},
            r"trainer.watching.trace_steps=\[0, 3\]: steps are numbered from 1",
        ),
        (
            {"generator.sampling_params.logprobs": 2},
            r"generator.sampling_params.logprobs=2: must be None or 0 or 1",
        ),
        (
            {"trainer.train_batch_size": 0},
            r"trainer.train_batch_size=0: must be positive; set it to 1 or more",
        ),
        (
            {"generator.n_samples_per_prompt": -1},
            r"generator.n_samples_per_prompt=-1: must be positive",
        ),
        (
            {"trainer.max_ckpts_to_keep": 0},
            r"trainer.max_ckpts_to_keep=0: must be positive, or -1 \(all\)",
        ),
        ({"trainer.eval_interval": 0}, r"trainer.eval_interval=0: must be positive, or -1 \(off\)"),
        (
            {"trainer.max_training_steps": 0},
            r"trainer.max_training_steps=0: must be positive, or None \(all epochs\)",
        ),
        (
            {"trainer.algorithm.eps_clip_low": -0.1},
            r"trainer.algorithm.eps_clip_low=-0.1: must not be negative; set it to 0 or more",
        ),
        (
            {"trainer.policy.optimizer_config.max_grad_norm": 0},
            r"max_grad_norm=0.0: must be positive; a large number such as 1e9 turns clipping off",
        ),
        (
            {"trainer.policy.optimizer_config.adam_betas": [0.9]},
            r"adam_betas=\[0.9\]: must be two numbers in \[0, 1\), e.g. \[0.9, 0.999\]",
        ),
        (
            {"trainer.train_batch_size": 100},
            r"trainer.train_batch_size=100: a step has fewer prompts than one minibatch "
            r"\(trainer.policy_mini_batch_size=256\); set policy_mini_batch_size to 100 or less",
        ),
        (
            {"trainer.train_batch_size": 10, "trainer.policy_mini_batch_size": 4},
            r"trainer.train_batch_size=10: not a multiple of trainer.policy_mini_batch_size=4 "
            r"\(10 = 2 x 4 \+ 2\); set it to 8 or 12",
        ),
        (
            {"generator.max_input_length": 600},
            r"generator.max_input_length=600: with one turn it must equal "
            r"trainer.max_prompt_length=512; leave it None",
        ),
        (
            {"trainer.algorithm.temperature": 0.7},
            r"trainer.algorithm.temperature=0.7: differs from "
            r"generator.sampling_params.temperature=1.0: .*; leave it None",
        ),
        (
            {
                "trainer.algorithm.loss_reduction": "seq_mean_token_sum_norm",
                "trainer.algorithm.max_seq_len": 0,
            },
            r"trainer.algorithm.max_seq_len=0: loss_reduction='seq_mean_token_sum_norm' divides by "
            r"it; set it to the longest",
        ),
        (
            {"generator.sampling_params.temperature": 0},
            r"generator.sampling_params.temperature=0.0: must be > 0 to train, e.g. 1.0",
        ),
        (
            {"generator.eval_sampling_params.temperature": -1},
            r"generator.eval_sampling_params.temperature=-1.0: must be 0 \(greedy\) or more",
        ),
        (
            {"trainer.policy.model.lora.rank": -1},
            r"trainer.policy.model.lora.rank=-1: must not be negative; set it to 0 or more",
        ),
        (
            {"trainer.policy.model.lora.alpha": 0},
            r"trainer.policy.model.lora.alpha=0: must be positive",
        ),
        (
            {"trainer.policy.model.lora.dropout": 1.0},
            r"trainer.policy.model.lora.dropout=1.0: must be in \[0, 1\); 0.0 is off",
        ),
        (
            {"trainer.policy.model.lora.init_method": "xavier"},
            r"init_method='xavier': not available yet, must be 'kaiming' or 'gaussian'",
        ),
        (
            {"generator.sampling_params.top_p": 0},
            r"generator.sampling_params.top_p=0.0: must be in \(0, 1\]; 1.0 is off",
        ),
        (
            {"generator.sampling_params.min_p": 2},
            r"generator.sampling_params.min_p=2.0: must be in \[0, 1\]; 0.0 is off",
        ),
        (
            {"generator.sampling_params.top_k": 0},
            r"generator.sampling_params.top_k=0: must be positive, or -1 \(off\)",
        ),
        (
            {
                "generator.sampling_params.top_p": 0.9,
                "generator.sampling_params.keep_sampling_mask": True,
            },
            r"generator.sampling_params.keep_sampling_mask=True: needs top_k, which bounds",
        ),
        (
            {"trainer.rope_theta": 1e6, "generator.rope_theta": 1e5},
            r"generator.rope_theta=100000.0: differs from trainer.rope_theta=1000000.0: .* None",
        ),
        (
            {"generator.rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            r"generator.rope_scaling=.*: differs from trainer.rope_scaling=None",
        ),
        ({"trainer.rope_theta": 0.5}, r"trainer.rope_theta=0.5: must be > 1"),
        (
            {"trainer.policy.model.path": None},
            r"trainer.policy.model.path=None: set a Hugging Face model folder",
        ),
        ({"data.train_data": []}, r"data.train_data=\[\]: set at least one Parquet or JSONL file"),
        (
            {"trainer.resume_mode": "from_path"},
            r"trainer.resume_path=None: trainer.resume_mode='from_path' needs it; set the folder",
        ),
        (
            {"generator.chat_template.source": "file"},
            r"generator.chat_template.name_or_path=None: generator.chat_template.source='file' "
            r"needs it; set the path of a jinja file",
        ),
        (
            {"generator.chat_template.name_or_path": "qwen3_with_thinking"},
            r"generator.chat_template.name_or_path='qwen3_with_thinking': named templates are not "
            r"available yet; set generator.chat_template.source='file'",
        ),
        (
            {"trainer.algorithm.policy_loss_type": "regularr"},
            r"trainer.algorithm.policy_loss_type='regularr': .*'regular'.*\"my_pkg.my_module:my_",
        ),
        (
            {"trainer.algorithm.policy_loss_type": "no_such_pkg.module:loss"},
            r"trainer.algorithm.policy_loss_type='no_such_pkg.module:loss': .*no_such_pkg",
        ),
        (
            {"trainer.algorithm.policy_loss_kwargs": {"beta": 1}},
            r"trainer.algorithm.policy_loss_kwargs.beta=1: 'regular' takes no such parameter",
        ),
        (
            {"trainer.algorithm.policy_loss_type": "dro"},
            r"trainer.algorithm.policy_loss_kwargs.beta=None: must be > 0; it has no default",
        ),
        (
            {
                "trainer.algorithm.policy_loss_type": "bapo",
                "trainer.algorithm.policy_loss_kwargs": {"low_max": 0.5},
            },
            r"trainer.algorithm.policy_loss_kwargs.low_min=0.6: must be between 0 and low_max=0.5",
        ),
    ],
)
def test_error_names_field_value_and_fix(overrides, message):
    with pytest.raises(ConfigError, match=message) as raised:
        check(overrides)
    error = pickle.loads(pickle.dumps(raised.value))  # of another process
    assert str(error) == str(raised.value) == f"{error.field}={error.value!r}: {error.remedy}"
    assert any(f"{error.field}.".startswith(f"{name}.") for name in flatten(TrainConfig()))


def test_functions_by_path_and_by_registered_name():
    module = __name__
    check(
        {
            "trainer.algorithm.policy_loss_type": f"{module}:my_loss",
            "trainer.algorithm.policy_loss_kwargs": {"beta": 0.5},
            "trainer.algorithm.advantage_estimator": f"{module}:my_estimator",
        }
    )
    registry.PolicyLossRegistry.register("my_loss", my_loss)
    try:
        check({"trainer.algorithm.policy_loss_type": "my_loss"})
    finally:
        registry.PolicyLossRegistry.unregister("my_loss")


def test_a_group_that_fills_one_set_warns():
    message = "n_samples_per_prompt=4: in a group of 4 the advantage of 'pass_at_k' is 0; set 5 or"
    four = {
        "generator.n_samples_per_prompt": 4,
        "trainer.algorithm.advantage_estimator": "pass_at_k",
    }
    with pytest.warns(UserWarning, match=message):
        check(four)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(four | {"trainer.algorithm.advantage_kwargs": {"k": 3}})


@pytest.mark.parametrize(
    ("estimator", "effect"),
    [
        ("grpo", "the reward itself"),
        ("rloo", "0"),
        ("gdpo", "its rewards, normalised over the batch"),
    ],
)
def test_groups_of_one_warn(estimator, effect):
    message = rf"n_samples_per_prompt=1: .* advantage of '{estimator}' is {effect}; set 2 or more"
    with pytest.warns(UserWarning, match=message):
        check(
            {
                "generator.n_samples_per_prompt": 1,
                "trainer.algorithm.advantage_estimator": estimator,
            }
        )


@pytest.mark.parametrize("field", ["trainer.export_path", "trainer.log_path"])
def test_only_checkpoints_may_go_to_a_bucket(field):
    with pytest.raises(ValueError, match=rf"{field}='gs://bucket/x': must be a local folder"):
        check({field: "gs://bucket/x"})


@pytest.mark.parametrize(
    "overrides",
    [
        {"trainer.algorithm.kl_loss_coef": 0},
        {"trainer.strategy": "fsdp2"},
        {"trainer.logger": ["console", "tensorboard"]},
        {"generator.sampling_params.temperature": 0.7},
        {"generator.sampling_params.logprobs": None},
        {"trainer.update_epochs_per_batch": 2},
        {"generator.apply_overlong_filtering": True, "generator.zero_reward_on_non_stop": True},
        {"trainer.bf16": True, "generator.inference_engine.model_dtype": "bfloat16"},
        {"trainer.resume_mode": "from_path", "trainer.resume_path": "ckpts/global_step_3"},
        {"trainer.algorithm.loss_reduction": "seq_mean_token_sum_norm"},
        {"trainer.ckpt_path": "gs://bucket/checkpoints"},
    ],
)
def test_accepted_without_a_word(overrides):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(overrides)
