import copy

import pytest

from jaxrl.config import TrainConfig, apply_overrides, parse_command_line
from jaxrl.config.dataclass_config import flatten, parse_literal


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("None", None),
        ("null", None),
        ("~", None),
        ("true", True),
        ("True", True),
        ("false", False),
        ("-3", -3),
        ("1e-6", 1e-6),
        ("['a', 1]", ["a", 1]),
        ("[a.parquet,/b/c.parquet]", ["a.parquet", "/b/c.parquet"]),
        ("{'a': None}", {"a": None}),
        ("{enable_thinking:true}", {"enable_thinking": True}),
        ("{url:http://x/y}", {"url": "http://x/y"}),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("'quoted'", "quoted"),
        ("", ""),
    ],
)
def test_literals(text, value):
    assert parse_literal(text) == value


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.seed=1", "trainer.seed", 1),
        ("trainer.run_name=123", "trainer.run_name", "123"),
        ("trainer.run_name='null'", "trainer.run_name", "null"),
        ("trainer.ckpt_path=null", "trainer.ckpt_path", ""),
        ("trainer.export_path=~", "trainer.export_path", ""),
        ("trainer.run_name=a=b", "trainer.run_name", "a=b"),
        ("trainer.bf16=true", "trainer.bf16", True),
        ("trainer.resume_mode=None", "trainer.resume_mode", None),
        ("trainer.max_training_steps=5", "trainer.max_training_steps", 5),
        ("trainer.policy.optimizer_config.lr=1e-5", "trainer.policy.optimizer_config.lr", 1e-5),
        ("trainer.policy.optimizer_config.lr=1", "trainer.policy.optimizer_config.lr", 1.0),
        ("data.train_data=['a', 'b']", "data.train_data", ["a", "b"]),
        ("trainer.logger=tensorboard", "trainer.logger", "tensorboard"),
        (
            "trainer.logger=['console','tensorboard']",
            "trainer.logger",
            ["console", "tensorboard"],
        ),
        (
            "trainer.algorithm.policy_loss_kwargs={'beta': 0.1}",
            "trainer.algorithm.policy_loss_kwargs",
            {"beta": 0.1},
        ),
        (
            "trainer.algorithm.policy_loss_kwargs.beta=0.1",
            "trainer.algorithm.policy_loss_kwargs",
            {"beta": 0.1},
        ),
        (
            "trainer.rope_scaling.rope_type=yarn",
            "trainer.rope_scaling",
            {"rope_type": "yarn"},
        ),
        (
            "generator.eval_sampling_params.top_p=0.9",
            "generator.eval_sampling_params.top_p",
            0.9,
        ),
        (
            "trainer.policy.fsdp_config.reshard_after_forward=2",
            "trainer.policy.fsdp_config.reshard_after_forward",
            2,
        ),
    ],
)
def test_override_sets_one_field_by_its_type(override, key, value):
    config = TrainConfig.from_cli_overrides([override])
    values, defaults = flatten(config), flatten(TrainConfig())
    assert values[key] == value
    assert type(values[key]) is type(value)
    changed = {k for k in values if k not in defaults or values[k] != defaults[k]}
    assert all(k.startswith(key.rpartition(".")[0]) for k in changed)


def test_overrides_may_be_a_dict_of_values_or_texts():
    config = TrainConfig.from_cli_overrides({"trainer.seed": 5, "trainer.epochs": "6"})
    assert (config.trainer.seed, config.trainer.epochs) == (5, 6)


def test_apply_overrides_leaves_its_argument_alone():
    config = TrainConfig()
    before = copy.deepcopy(config)
    changed = apply_overrides(
        config, {"trainer.seed": "1", "generator.chat_template_kwargs.a": "2"}
    )
    assert config == before
    assert changed.trainer.seed == 1
    assert changed.generator.chat_template_kwargs == {"a": 2}


def test_a_dict_for_a_group_is_merged_and_for_a_dict_field_replaces():
    config = apply_overrides(
        TrainConfig(),
        {
            "generator.sampling_params.top_k": "4",
            "generator.sampling_params": "{'top_p': 0.9}",
            "trainer.policy": {"model": {"random_init": True}},
            "trainer.algorithm.policy_loss_kwargs": "{'a': 1, 'b': 2}",
            "trainer.algorithm.policy_loss_kwargs.b": "3",
        },
    )
    assert (config.generator.sampling_params.top_k, config.generator.sampling_params.top_p) == (
        4,
        0.9,
    )
    assert config.trainer.policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.trainer.policy.model.random_init is True
    assert config.trainer.algorithm.policy_loss_kwargs == {"a": 1, "b": 3}
    replaced = apply_overrides(config, {"trainer.algorithm.policy_loss_kwargs": "{'c': 4}"})
    assert replaced.trainer.algorithm.policy_loss_kwargs == {"c": 4}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "trainer.sed=1",
            r"unknown config field 'trainer.sed'. Did you mean 'trainer.seed'\?",
        ),
        ("trainer.seed=abc", r"trainer.seed='abc': expected int"),
        ("trainer.seed=1.5", r"trainer.seed='1.5': expected int"),
        ("trainer.bf16=1", r"trainer.bf16='1': expected bool"),
        ("trainer.seed.x=1", r"trainer.seed.x: trainer.seed is a value, it has no fields"),
        (
            "+trainer.x=1",
            r"'\+trainer.x': a leading '\+' cannot add config fields. Set 'trainer.x'",
        ),
        ("trainer.seed", r"'trainer.seed': expected key.path=value, e.g. trainer.seed=1"),
        ("trainer.algorithm=3", r"trainer.algorithm=3: expected a mapping of the fields of Algo"),
        (
            "trainer.algorithm={'gama': 1}",
            r"unknown config field 'trainer.algorithm.gama'. Did you mean "
            r"'trainer.algorithm.gamma'\?",
        ),
    ],
)
def test_override_errors(override, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_cli_overrides([override])


def test_a_key_below_a_value_of_a_dict_field_is_an_error():
    key = "trainer.algorithm.policy_loss_kwargs"
    with pytest.raises(ValueError, match=rf"{key}.a=1: it is a value, it has no key 'b'"):
        TrainConfig.from_cli_overrides([f"{key}.a=1", f"{key}.a.b=2"])


@pytest.mark.parametrize("name", ["backend=native", "max_num_seqs=7", "engine_init_kwargs.a=1"])
def test_older_generator_paths_are_translated_with_a_warning(name):
    key = name.partition("=")[0]
    new = f"generator.inference_engine.{key}"
    with pytest.warns(UserWarning, match=f"config field 'generator.{key}' is now '{new}'"):
        config = TrainConfig.from_cli_overrides([f"generator.{name}"])
    assert config == TrainConfig.from_cli_overrides([f"generator.inference_engine.{name}"])


def test_command_line():
    assert parse_command_line(
        [
            "--config=configs/x.py",
            "--config.trainer.seed=1",
            "--config.trainer.eval_interval",
            "-1",
            "--config.data.train_data=['a=b']",
            "--config.trainer.seed=2",
        ]
    ) == (
        "configs/x.py",
        {"trainer.seed": "2", "trainer.eval_interval": "-1", "data.train_data": "['a=b']"},
    )
    assert parse_command_line(["--config", "x.py"]) == ("x.py", {})
    alone = ["--config.trainer.seed", "1", "quickstart"]
    assert parse_command_line(alone) == ("quickstart", {"trainer.seed": "1"})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--trainer.seed=1"],
            r"unknown argument '--trainer.seed=1': write --config.trainer.seed=1",
        ),
        (["trainer.seed=1"], r"write --config.trainer.seed=1"),
        (
            ["x.py", "--run_name=a"],
            r"unknown argument '--run_name=a': did you mean --config.trainer.run_name=a\?",
        ),
        (
            ["x.py", "--optimizer_config.lr=1"],
            r"mean --config.trainer.policy.optimizer_config.lr=1 or --config.trainer.critic.opt",
        ),
        (["x.py", "y.py"], r"unknown argument 'y.py': the recipe is x.py already"),
        (["x.py", "--config=y.py"], r"--config=y.py: the recipe is x.py already; leave one out"),
        (["x.py", "trainer.seed=1"], r"unknown argument 'trainer.seed=1': write --config.trainer"),
        (["--verbose"], r"unknown argument '--verbose': usage: quickstart --config.trainer.seed=1"),
        (
            ["--config.trainer.seed"],
            r"--config.trainer.seed has no value: write --config.trainer.se",
        ),
        (["--config.trainer.seed", "--config=x.py"], r"--config.trainer.seed has no value"),
        (
            ["--config.trainer.seed=1"],
            r"no recipe given: usage: quickstart --config.trainer.seed=1",
        ),
    ],
)
def test_command_line_errors(argv, message):
    with pytest.raises(ValueError, match=message):
        parse_command_line(argv, flatten(TrainConfig()))
