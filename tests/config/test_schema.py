import copy
import dataclasses
import inspect
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_collections
import pytest
import yaml

import jaxrl.config
from jaxrl.config import (
    AlgorithmConfig,
    BaseConfig,
    GeneratorConfig,
    SamplingParams,
    SkyRLTrainConfig,
    TrainConfig,
    TrainerConfig,
    get_config_as_dict,
    get_config_as_yaml_str,
    make_config,
    resolve,
)
from jaxrl.config.dataclass_config import (
    config_class,
    field_docs,
    field_markers,
    field_types,
    flatten,
)
from jaxrl.config.field_status import SAME_DEFAULT, status_of

pytestmark = pytest.mark.check
SEED = json.loads(
    (Path(__file__).parents[1] / "golden/config_defaults_seed.json")
    .read_text()
    .replace("/HOME/", os.path.expanduser("~") + "/")
)
CLASSES = [
    c
    for c in vars(jaxrl.config).values()
    if inspect.isclass(c) and issubclass(c, BaseConfig) and c is not BaseConfig
]
KEYS = sorted({*SEED, *flatten(resolve(TrainConfig())), "generator.eval_sampling_params"})
CHANGED_DEFAULTS = {  # key: (SkyRL, jaxrl)
    **{
        f"trainer.{role}.model.lora.lora_sync_path": ("/tmp/skyrl_lora_sync", None)
        for role in ("policy", "ref", "critic")
    },
    "trainer.strategy": ("fsdp2", "jax"),
    "trainer.policy.optimizer_config.offload_after_step": (True, False),
    "trainer.critic.optimizer_config.offload_after_step": (True, False),
    "trainer.algorithm.cispo.cispo_eps_clip_low": (0.0, 1.0),
    "trainer.algorithm.cispo.cispo_eps_clip_high": (5.0, 4.0),
    "trainer.log_path": (SEED["trainer.log_path"], "runs"),
    "trainer.ckpt_path": (SEED["trainer.ckpt_path"], "runs/test_run/checkpoints"),
    "trainer.export_path": (SEED["trainer.export_path"], "runs/test_run/exports"),
    "trainer.bf16": (True, "auto"),
    "trainer.use_sample_packing": (True, "auto"),
    "trainer.flash_attn": (True, "auto"),
    "trainer.logger": ("wandb", "console"),
    "generator.inference_engine.backend": ("vllm", "native"),
    "generator.inference_engine.model_dtype": ("bfloat16", "auto"),
    "generator.inference_engine.tensor_parallel_size": (1, None),
    "generator.inference_engine.enable_prefix_caching": (True, False),
    "generator.inference_engine.enable_chunked_prefill": (True, False),
}


@dataclass
class MyAlgorithmConfig(AlgorithmConfig):
    my_param: int = 42


@dataclass
class MyTrainerConfig(TrainerConfig):
    algorithm: MyAlgorithmConfig = field(default_factory=MyAlgorithmConfig)
    my_interval: int = 7


@dataclass
class MyGeneratorConfig(GeneratorConfig):
    my_flag: bool = False


def test_there_are_the_34_dataclasses_of_the_reference_and_nine_more():
    ours = {
        "DPPOConfig",
        "DecoupledPPOConfig",
        "OverlongBufferConfig",
        "MeshConfig",
        "ServeConfig",
        "SFTConfig",
    }
    ours |= {"WatchingConfig", "ClusterConfig", "TinkerConfig"}
    assert len(set(CLASSES)) == 34 + len(ours)
    assert SkyRLTrainConfig is TrainConfig


def test_every_field_has_a_string_literal_under_it():
    wrong = []
    for cls in CLASSES:
        names, docs = [f.name for f in dataclasses.fields(cls)], field_docs(cls)
        if names != list(docs):
            wrong.append(f"{cls.__name__}: fields {names}, literals under {list(docs)}")
        ends = (f"{cls.__name__}.{k}: no full stop" for k, doc in docs.items() if doc[-1:] != ".")
        wrong += ends
    assert not wrong, "\n".join(wrong)


def test_resolved_defaults_equal_skyrls_or_are_listed_as_changed():
    ours = flatten(resolve(TrainConfig()))
    assert set(SEED) - set(ours) == set()
    different = {k: (SEED[k], ours[k]) for k in SEED if SEED[k] != ours[k]}
    assert different == CHANGED_DEFAULTS


def check_status(key):
    status = status_of(key)
    assert status is not None
    assert status.status in ("implemented", "mapped", "inert")
    assert status.status == "implemented" or status.note or status.only_with
    skyrl_has_it = key in SEED or key == "generator.eval_sampling_params"
    assert status.skyrl_only == skyrl_has_it
    expected = CHANGED_DEFAULTS[key][0] if key in CHANGED_DEFAULTS else SAME_DEFAULT
    assert status.skyrl_default == expected


def test_every_field_says_what_it_is_in_skyrl():
    wrong = []
    for key in KEYS:
        try:
            check_status(key)
        except Exception as error:
            wrong.append(f"{key}: {error!r}")
    assert not wrong, "\n".join(wrong)


def test_what_a_group_says_of_a_field_is_said_of_one():
    said = {
        (config_class(field_types(cls)[name]), path)
        for cls in CLASSES
        for name, markers in field_markers(cls).items()
        for marker in markers
        if isinstance(marker, dict)
        for path in marker
    }
    assert len(said) > 5
    for group, path in said:
        cls = group
        for name in path.split("."):
            assert cls is not None, path
            assert name in field_types(cls), path
            cls = config_class(field_types(cls)[name])


def test_groups_and_fields_of_a_user_have_no_status():
    for key in ("trainer", "trainer.policy.mesh", "trainer.algorithm.my_param", "my.field"):
        assert status_of(key) is None
    assert status_of("trainer.ref.mesh.data") == status_of("trainer.ref.mesh")  # may be off
    assert status_of("trainer.ref.model.lora.alpha").status == "inert"
    assert status_of("trainer.policy.model.lora.alpha").status == "implemented"


def test_resolve_fills_derived_fields_and_leaves_its_argument_alone():
    config = TrainConfig()
    config.trainer.policy.model.path = "m"
    config.trainer.policy.model.random_init = True
    config.trainer.policy.model_config_kwargs = {"rms_norm_eps": 1e-5}
    config.trainer.max_prompt_length = 100
    config.trainer.rope_theta = 5.0
    config.generator.sampling_params = SamplingParams(max_generate_length=30, temperature=0.7)
    before = copy.deepcopy(config)
    resolved = resolve(config)
    assert config == before
    assert resolved.trainer.ref.model.path == "m"
    assert resolved.trainer.ref.model.random_init is True
    assert resolved.trainer.ref.model_config_kwargs == {"rms_norm_eps": 1e-5}
    assert resolved.generator.max_input_length == 100
    assert resolved.trainer.algorithm.max_seq_len == 130
    assert resolved.trainer.algorithm.temperature == 0.7
    assert resolved.generator.eval_sampling_params == SamplingParams(
        max_generate_length=30, temperature=0.0
    )
    assert resolved.generator.rope_theta == 5.0
    assert resolve(resolved) == resolved


def test_resolve_expands_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = TrainConfig()
    trainer = config.trainer
    trainer.log_path, trainer.ckpt_path, trainer.export_path = "~/runs", "gs://b/~c", "~/exports"
    trainer.resume_path = "~/runs/global_step_1"
    trainer.policy.model.path = "~/model"
    config.data.train_data = ["~/a.parquet", "my.module:prompts(size=1)"]
    trainer = resolve(config).trainer
    assert trainer.log_path == "/home/me/runs"
    assert trainer.ckpt_path == "gs://b/~c"
    assert trainer.export_path == "/home/me/exports"
    assert trainer.resume_path == "/home/me/runs/global_step_1"
    assert trainer.policy.model.path == trainer.ref.model.path == "/home/me/model"
    assert resolve(config).data.train_data == ["/home/me/a.parquet", "my.module:prompts(size=1)"]


def test_resolve_keeps_what_is_set():
    config = TrainConfig()
    config.trainer.ref.model.path = "other"
    config.trainer.policy.model.random_init = True
    config.trainer.algorithm.max_seq_len = 9
    config.generator.eval_sampling_params = SamplingParams(temperature=0.5)
    resolved = resolve(config)
    assert resolved.trainer.ref.model.path == "other"
    assert resolved.trainer.ref.model.random_init is False
    assert resolved.trainer.algorithm.max_seq_len == 9
    assert resolved.generator.eval_sampling_params.temperature == 0.5


def test_sequence_length_of_conversations_is_not_guessed():
    config = TrainConfig()
    config.generator.max_turns = 2
    assert resolve(config).trainer.algorithm.max_seq_len is None


def test_equal_configs_have_equal_hashes_and_dicts_inside_do_not_break_them():
    a, b = AlgorithmConfig(), AlgorithmConfig()
    a.policy_loss_kwargs = {"beta": [1, {"x": 2}], "alpha": 1}
    b.policy_loss_kwargs = {"alpha": 1, "beta": [1, {"x": 2}]}
    assert a == b
    assert hash(a) == hash(b)
    assert hash(AlgorithmConfig(kl_loss_coef=1)) == hash(AlgorithmConfig(kl_loss_coef=1.0))
    assert hash(a) != hash(AlgorithmConfig())
    assert {TrainConfig(): "x"}[TrainConfig()] == "x"


@pytest.mark.parametrize("cls", [AlgorithmConfig, MyAlgorithmConfig])
def test_jit_compiles_once_per_distinct_config(cls):
    traces = []

    @jax.jit
    def clip(x, config):
        traces.append(config)
        return jnp.minimum(x, 1 + config.eps_clip_high)

    assert clip(jnp.float32(3), cls()) == jnp.float32(1.2)
    assert clip(jnp.float32(3), cls()) == jnp.float32(1.2)
    assert len(traces) == 1
    assert clip(jnp.float32(3), cls(eps_clip_high=0.5)) == jnp.float32(1.5)
    assert len(traces) == 2
    assert jax.tree.leaves(cls()) == []


def test_subclasses_hash_by_their_own_fields():
    assert hash(MyAlgorithmConfig()) != hash(MyAlgorithmConfig(my_param=1))
    assert MyAlgorithmConfig() != AlgorithmConfig()


def test_make_config_puts_user_classes_in_place():
    config = make_config(algorithm_cls=MyAlgorithmConfig)()
    assert isinstance(config, TrainConfig)
    assert config.trainer.algorithm == MyAlgorithmConfig()
    config = make_config(trainer_cls=MyTrainerConfig, generator_cls=MyGeneratorConfig)()
    assert config.trainer.my_interval == 7
    assert config.trainer.algorithm.my_param == 42
    assert config.generator.my_flag is False
    assert resolve(config).trainer.algorithm.my_param == 42


def test_user_fields_can_be_set_from_everywhere():
    cls = make_config(algorithm_cls=MyAlgorithmConfig)
    assert cls.from_cli_overrides(["trainer.algorithm.my_param=7"]).trainer.algorithm.my_param == 7
    nested = cls.from_dict_config({"trainer": {"algorithm": {"my_param": 8}}})
    assert nested.trainer.algorithm == MyAlgorithmConfig(my_param=8)


@pytest.mark.parametrize("wrap", [dict, ml_collections.ConfigDict])
def test_from_dict_config_is_laid_over_the_defaults(wrap):
    cfg = wrap(
        {
            "data": {"train_data": ["a.parquet"]},
            "trainer": {
                "policy": {"model": {"random_init": True}},
                "critic": {"optimizer_config": {"weight_decay": 0}},
                "algorithm": {"policy_loss_kwargs": {"beta": 0.1}},
            },
        }
    )
    config = TrainConfig.from_dict_config(cfg)
    assert config.data.train_data == ["a.parquet"]
    assert config.trainer.policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.trainer.policy.model.random_init is True
    # The default of the group is the critic's 5e-6, not OptimizerConfig's 1e-6.
    assert config.trainer.critic.optimizer_config.lr == 5e-6
    assert config.trainer.critic.optimizer_config.weight_decay == 0.0
    assert type(config.trainer.algorithm.policy_loss_kwargs) is dict
    assert config.trainer.seed == 42


def test_optional_groups_and_config_instances_are_accepted():
    config = TrainConfig.from_dict_config(
        {
            "generator": {
                "sampling_params": SamplingParams(top_k=3),
                "eval_sampling_params": {"temperature": 1, "stop_token_ids": (5, 6)},
            }
        }
    )
    assert config.generator.sampling_params.top_k == 3
    assert config.generator.eval_sampling_params == SamplingParams(stop_token_ids=[5, 6])
    assert GeneratorConfig.from_dict_config({"eval_sampling_params": None}) == GeneratorConfig()


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (
            {"trainer": {"algorithm": {"policy_loss_typ": "gspo"}}},
            r"unknown config field 'trainer.algorithm.policy_loss_typ'. Did you mean "
            r"'trainer.algorithm.policy_loss_type'\?$",
        ),
        (
            {"trainer": {"algorithm": {"zzz": 1}}},
            r"unknown config field 'trainer.algorithm.zzz'. Fields of AlgorithmConfig: adv",
        ),
        (
            {"trainer": {"policy_loss_type": "gspo"}},
            r"'trainer.policy_loss_type'. Did you mean 'trainer.algorithm.policy_loss_type'\?",
        ),
        (
            {"algorithm": {"eps_clip_low": 0.1}},
            r"unknown config field 'algorithm'. Did you mean 'trainer.algorithm'\?",
        ),
        ({"trainer": {"seed": "1"}}, r"trainer.seed='1': expected int"),
        ({"trainer": {"seed": True}}, r"trainer.seed=True: expected int"),
        ({"trainer": {"seed": None}}, r"trainer.seed=None: expected int"),
        ({"trainer": {"seed": 1.0}}, r"trainer.seed=1.0: expected int"),
        ({"trainer": {"bf16": 1}}, r"trainer.bf16=1: expected bool"),
        ({"trainer": {"run_name": 3}}, r"trainer.run_name=3: expected str"),
        ({"trainer": {"logger": 3}}, r"trainer.logger=3: expected str \| list\[str\]"),
        (
            {"trainer": {"policy": {"optimizer_config": {"lr": "fast"}}}},
            r"trainer.policy.optimizer_config.lr='fast': expected float",
        ),
        (
            {"trainer": {"policy": {"optimizer_config": {"adam_betas": [0.9, "x"]}}}},
            r"trainer.policy.optimizer_config.adam_betas\[1\]='x': expected float",
        ),
        (
            {"data": {"train_data": "a.parquet"}},
            r"""data.train_data='a.parquet': expected list\[str\]; write "\['a.parquet'\]\"""",
        ),
        (
            {"trainer": {"algorithm": 3}},
            r"trainer.algorithm=3: expected a mapping of the fields of",
        ),
        (
            {"generator": {"sampling_params": {"logprobs": "one"}}},
            r"generator.sampling_params.logprobs='one': expected int \| None",
        ),
    ],
)
def test_from_dict_config_rejects(cfg, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict_config(cfg)


def test_numbers_that_yaml_reads_as_strings_are_floats():
    cfg = yaml.safe_load("policy: {optimizer_config: {lr: 1e-6, weight_decay: 1}}")
    assert cfg["policy"]["optimizer_config"]["lr"] == "1e-6"
    optimizer = TrainerConfig.from_dict_config(cfg).policy.optimizer_config
    assert (optimizer.lr, optimizer.weight_decay) == (1e-6, 1.0)
    assert isinstance(optimizer.weight_decay, float)


def test_dict_and_yaml_round_trips():
    config = TrainConfig.from_cli_overrides({"trainer.algorithm.policy_loss_kwargs": {"b": [1]}})
    values = get_config_as_dict(config)
    assert TrainConfig.from_dict_config(values) == config
    values["trainer"]["algorithm"]["policy_loss_kwargs"]["b"].append(2)
    assert config.trainer.algorithm.policy_loss_kwargs == {"b": [1]}
    text = get_config_as_yaml_str(config)
    assert text.startswith("data:\n  train_data:\n")
    assert TrainConfig.from_dict_config(yaml.safe_load(text)) == config
    assert get_config_as_dict({"a": SamplingParams(top_k=2)})["a"]["top_k"] == 2
