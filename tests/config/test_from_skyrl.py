"""The converter: what it reads, what it says of each setting, and that its recipes run."""

import json
import os
import re
from pathlib import Path

import pytest

from jaxrl.config import TrainConfig, load_config_file, resolve, validate
from jaxrl.config.field_status import SAME_DEFAULT, status_of
from jaxrl.config.from_skyrl import from_command, from_script, from_yaml, main
from jaxrl.config.skyrl.conversion import skyrl_defaults
from jaxrl.config.skyrl.recipe_file import recipe_text
from jaxrl.config_error import ConfigError, UnknownField
from tests.config.test_schema import CHANGED_DEFAULTS, SEED
from tests.config.test_skyrl_script import SCRIPT

pytestmark = pytest.mark.check


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run_sums.sh"
    path.write_text(SCRIPT)
    return path


def test_a_script_that_calls_another_one(script, tmp_path):
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text('bash run_sums.sh trainer.algorithm.policy_loss_type=gspo "$@"\n')
    config = from_script(wrapper, ["trainer.epochs=3"]).config
    assert (config.trainer.algorithm.policy_loss_type, config.trainer.epochs) == ("gspo", 3)
    assert config.trainer.seed == 7
    wrapper.write_text("bash run_sums.sh trainer.epochs=$(cat n) trainer.seed=8\n")
    result = from_script(wrapper, [])
    assert result.config.trainer.seed == 8
    assert [line.partition(":")[0] for line in result.refused] == ["trainer.epochs"]
    assert main([str(wrapper)]) == 1
    wrapper.write_text("bash run_sums.sh $(cat more) trainer.seed=8\n")
    with pytest.raises(ValueError, match="an argument of run_sums.sh is no key=value"):
        from_script(wrapper, [])
    wrapper.write_text("bash run_sums.sh trainer.seed=8\n")
    script.unlink()
    with pytest.raises(ValueError, match="calls run_sums.sh, which is not there"):
        from_script(wrapper, [])


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("deepseek-ai/DeepSeek-V3", "a mixture of experts of another family"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", ""),
        ("openai/gpt-oss-20b", ""),
        ("Qwen/Qwen3-30B-A3B", ""),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", ""),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "a model of images"),
        ("Qwen/Qwen3-8B", ""),
        ("meta-llama/Llama-3.1-8B-Instruct", ""),
    ],
)
def test_a_model_that_is_not_loaded_is_named(model, kind):
    problem = from_command([f"trainer.policy.model.path={model}"]).problem
    assert bool(problem) == bool(kind)
    assert not kind or f"='{model}' is by its name {kind}" in problem
    assert not kind or "which jaxrl does not load" in problem


def test_a_script_of_supervised_fine_tuning_is_sent_to_its_page(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text("uv run -m skyrl.train.main_sft strategy=megatron max_length=512\n")
    assert main([str(path)]) == 2
    assert "main_sft, supervised fine-tuning: write a recipe for it, docs/sft.md" in (
        capsys.readouterr().err
    )


def test_a_setting_that_a_script_computes_is_left_out_and_may_be_given(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text(
        "source secrets.env\nGPUS=$(nvidia-smi -L | wc -l)\n"
        "uv run -m skyrl.train.entrypoints.main_base trainer.seed=3 \\\n"
        "  trainer.placement.policy_num_gpus_per_node=$GPUS\n"
    )
    result = from_script(path, [])
    (refused,) = result.refused
    assert refused.startswith("trainer.placement.policy_num_gpus_per_node: not known without run")
    assert "$(nvidia-smi -L | wc -l); give key=value after the script" in refused
    assert f"{path}: not run, in case it sets something: `source secrets.env`" in result.changed
    assert result.config.trainer.seed == 3
    number = "trainer.placement.policy_num_gpus_per_node=2"  # the script passes no "$@" on
    assert from_script(path, [number]).refused == []
    assert from_script(path, [number]).config.trainer.placement.policy_num_gpus_per_node == 2
    assert main([str(path)]) == 1
    assert "left out: the run is another one (1)" in capsys.readouterr().err


def test_settings_are_taken_changed_without_effect_or_refused():
    result = from_command(
        [
            "trainer.train_batch_size=256",
            "+trainer.seed=3",
            "++trainer.epochs=2",
            "trainer.remove_microbatch_padding=false",
            "trainer.strategy=megatron",
            "trainer.policy.megatron_config.tensor_model_parallel_size=2",
            "trainer.policy.megatron_config.context_parallel_size=2",
            "trainer.policy.megatron_config.pipeline_model_parallel_size=1",
            "trainer.placement.policy_num_gpus_per_node=8",
            "trainer.hf_save_interval=0",
            "trainer.my_own=1",
            "generator.backend=vllm",
            "generator.inference_engine.num_engines=3",
            "generator.inference_engine.engine_init_kwargs.max_model_len=4096",
            "generator.inference_engine.weight_sync_backend=nccl",
            "generator.sampling_params.stop=['</a>']",
            "trainer.mtp.enabled=false",
            "trainer.mtp.num_speculative_tokens=3",
        ]
    )
    config, trainer = result.config, result.config.trainer
    assert (trainer.seed, trainer.epochs, trainer.train_batch_size) == (3, 2, 256)
    assert trainer.use_sample_packing is False
    assert trainer.policy.megatron_config.tensor_model_parallel_size == 2
    assert trainer.policy.megatron_config.context_parallel_size == 2
    assert trainer.hf_save_interval == -1  # 0 is off in SkyRL
    assert config.generator.sampling_params.stop == ["</a>"]
    assert config.generator.inference_engine.backend == "native"
    assert config.generator.inference_engine.engine_init_kwargs == {}
    assert (result.problem, result.num_devices) == ("", 8)

    def heads(lines):
        return {re.split(r"=|: ", line)[0].rpartition(".")[2] for line in lines}

    assert heads(result.refused) == {"my_own", "num_speculative_tokens"}
    assert heads(result.inert) == {
        "strategy",
        "max_model_len",
        "weight_sync_backend",
        "enabled",
    }
    assert heads(result.changed) == {
        "remove_microbatch_padding",
        "tensor_model_parallel_size",
        "context_parallel_size",
        "pipeline_model_parallel_size",
        "policy_num_gpus_per_node",
        "backend",
        "num_engines",  # 3 does not divide 8 devices
    }
    assert heads(result.taken) == {
        "train_batch_size",
        "seed",
        "epochs",
        "hf_save_interval",
        "stop",
    }


def test_skyrls_defaults_are_written_out_where_the_run_would_be_another_one():
    written = skyrl_defaults()
    assert written == {
        "trainer.policy.optimizer_config.offload_after_step": True,
        "trainer.critic.optimizer_config.offload_after_step": True,
        "trainer.bf16": True,
        "trainer.use_sample_packing": True,
        "trainer.flash_attn": True,
        "trainer.logger": "wandb",
        "generator.inference_engine.model_dtype": "bfloat16",
    }
    assert all(CHANGED_DEFAULTS[key][0] == value for key, value in written.items())
    result = from_command(["trainer.bf16=false"])
    assert result.config.trainer.bf16 is False
    assert result.config.trainer.flash_attn is True
    assert "trainer.flash_attn=True" in result.written_out
    assert not any(line.startswith("trainer.bf16") for line in result.written_out)


def test_folders_that_skyrls_runs_share_get_the_name_of_the_run():
    """A second converted run is not refused for the first one's checkpoints."""
    first = from_command(["trainer.run_name=a", "trainer.export_path=/e"]).config.trainer
    assert (first.ckpt_path, first.export_path) == (os.path.expanduser("~/ckpts/a"), "/e")
    second = from_command([]).config.trainer
    assert second.ckpt_path == os.path.expanduser(f"~/ckpts/{second.run_name}") != first.ckpt_path


@pytest.mark.parametrize(
    ("module", "sizes", "expected"),
    [
        ("examples.train.async.main_async", "64", (True, "lockstep", 1, None)),
        ("examples.train.fully_async.main_fully_async", "64", (True, "free", 4, None)),
        ("examples.train.async.main_async", "32", (False, "free", 4, None)),
        ("examples.train.algorithms.dapo.main_dapo", "32", (False, "free", 4, 512)),
        ("skyrl_train.entrypoints.main_base", "32", (False, "free", 4, None)),
    ],
)
def test_entry_points_that_are_settings_here(module, sizes, expected):
    words = ["uv", "run", "-m", module, "trainer.train_batch_size=64", "generator.batched=true"]
    result = from_command([*words, f"trainer.policy_mini_batch_size={sizes}"])
    trainer = result.config.trainer
    buffer = trainer.algorithm.overlong_buffer
    found = trainer.fully_async.enabled, trainer.fully_async.schedule
    assert (*found, trainer.fully_async.max_staleness_steps, buffer and buffer.len) == expected
    assert result.problem == ""
    # One update a batch, and a correction for the older weights that sampled: both are asked for.
    assert len(result.refused) == ("async" in module)
    corrected = trainer.algorithm.off_policy_correction.tis_ratio_type
    assert corrected == ("token" if trainer.fully_async.enabled else None)


def test_no_word_of_an_error_decides_what_is_converted(monkeypatch):
    """A free asynchronous run gets weights; an unknown field and a wrong value are left out."""
    words = ["uv", "run", "-m", "examples.train.fully_async.main_fully_async"]
    words += ["trainer.train_batch_size=64", "trainer.policy_mini_batch_size=64"]
    words += [
        "trainer.my_own=1",
        "trainer.algorithm.policy_loss_type=none_such",
        "trainer.epochs=3",
    ]
    config = from_command(words).config
    assert config.trainer.algorithm.off_policy_correction.tis_ratio_type == "token"
    assert (config.trainer.algorithm.policy_loss_type, config.trainer.epochs) == ("regular", 3)
    monkeypatch.setattr(ConfigError, "__str__", lambda error: "no")
    monkeypatch.setattr(UnknownField, "__str__", lambda error: "no")
    assert from_command(words).config == config


def test_an_entry_point_of_the_users_own_is_left_out_with_a_reason():
    result = from_command(["python", "-m", "my.main_multiply", "environment.env_class=my_game"])
    assert [line.partition(":")[0] for line in result.refused] == [
        "my.main_multiply",
        "environment.env_class=my_game",
    ]
    for module in ("skyrl.train.main_sft", "skyrl.tinker.api", "x.verl.main_ppo"):
        with pytest.raises(ValueError, match=module):
            from_command(["python", "-m", module, "trainer.seed=1"])


def test_walk_over_skyrls_documented_keys():
    """At their defaults all convert."""
    rows = {key: status_of(key) for key in SEED}
    defaults = {
        key: SEED[key] if row.skyrl_default is SAME_DEFAULT else row.skyrl_default
        for key, row in rows.items()
    }
    result = from_command([f"{key}={value}" for key, value in defaults.items()])
    assert (result.refused, result.problem) == ([], "")


def test_a_yaml_config_and_arguments_over_it(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "trainer:\n  seed: 4\n  policy:\n    optimizer_config: {lr: 1e-5}\n"
        "  algorithm: {eps_clip_high: 0.28}\ngenerator:\n  eval_sampling_params: {top_p: 0.7}\n"
        "  chat_template_kwargs: {enable_thinking: false}\n"
    )
    config = from_yaml(path, ["trainer.seed=5"]).config
    assert (config.trainer.seed, config.trainer.policy.optimizer_config.lr) == (5, 1e-5)
    assert config.trainer.algorithm.eps_clip_high == 0.28
    assert config.generator.eval_sampling_params.top_p == 0.7
    assert config.generator.chat_template_kwargs == {"enable_thinking": False}
    path.write_text("trainer: {ckpt_path: '${trainer.run_name}'}")
    with pytest.raises(ValueError, match="trainer.ckpt_path=.*: write the value out"):
        from_yaml(path, [])
    path.write_text("- 1")
    assert main([str(path)]) == 2


def test_the_recipe_loads_as_what_was_converted(script, tmp_path, capsys):
    output = tmp_path / "recipe.py"
    words = ["generator.eval_sampling_params.top_p=0.7", "trainer.ckpt_path=/home/me/c"]
    words += ["generator.chat_template_kwargs.enable_thinking=false", "environment.env_class=x"]
    assert main(["--output", str(output), str(script), *words]) == 1  # no environment x
    report = capsys.readouterr().out
    behind = tmp_path / "behind.py"  # where other commands have their options
    assert main([str(script), *words, "--output", str(behind)]) == 1
    assert capsys.readouterr().out == report
    assert behind.read_text() == output.read_text().replace(str(output), str(behind))
    assert "left out: the run is another one (1)\n  environment.env_class=x: known are" in report
    assert report.endswith("\nvalid on 4 devices\n")
    assert max(map(len, report.partition("\nchanged (")[0].splitlines())) <= 100
    text = output.read_text()
    assert 15 <= len(text.splitlines()) <= 50
    assert "\nValid on 4 devices.\n" in text
    assert 'trainer.ckpt_path = "~/c"' in text
    assert "explains: environment.env_class=x" in text
    loaded = load_config_file(str(output))
    assert resolve(loaded) == resolve(from_script(script, words).config)
    validate(loaded, num_devices=4)
    assert main(["--output", str(output), str(script)]) == 0
    assert main([str(tmp_path / "absent.sh")]) == 2
    assert main(["trainer.seed"]) == 2
    capsys.readouterr()
    assert main([str(script), "DATA_DIR=/x"]) == 2
    fix = "a variable of the script stands before the command: DATA_DIR=/x jaxrl from-skyrl ..."
    assert fix in capsys.readouterr().err


def test_the_recipe_has_every_setting_of_the_script_also_where_the_default_is_the_same(capsys):
    words = [
        "trainer.train_batch_size=1024",
        "+trainer.epochs=1",
        "generator.num_inference_engines=1",
    ]
    main([*words, "trainer.placement.policy_num_gpus_per_node=1"])
    text = capsys.readouterr().out
    assert "    trainer.train_batch_size = 1024\n" in text
    assert "    trainer.epochs = 1\n" in text
    assert "    generator.inference_engine.num_engines = 1\n" in text
    assert "\nValid on 1 device.\n" in text


def test_a_setting_with_the_defaults_value_is_a_problem_and_not_left_out(capsys):
    words = ["trainer.train_batch_size=1024", "trainer.policy_mini_batch_size=24"]
    assert main([*words, "trainer.placement.policy_num_gpus_per_node=1"]) == 1
    out, err = capsys.readouterr()
    problem = "on 1 device: trainer.train_batch_size=1024: not a multiple of"
    assert f"\nInvalid {problem}" in out
    assert "Left out" not in out
    assert "left out: the run is another one (0)\n" in err
    assert f"\ninvalid {problem}" in err


@pytest.mark.parametrize("null", ["null", "~", "None"])
def test_null_unsets_a_folder(null, tmp_path):
    (tmp_path / "config.yaml").write_text("trainer: {ckpt_path: ~}")
    for result in (
        from_command([f"trainer.ckpt_path={null}"]),
        from_yaml(tmp_path / "config.yaml", []),
    ):
        assert result.config.trainer.ckpt_path == ""
        assert resolve(result.config).trainer.ckpt_path.endswith("test_run/checkpoints")
    (refused,) = from_command([f"trainer.run_name={null}"]).refused
    assert refused.endswith(f"trainer.run_name='{null}': expected str; leave it out")


def test_a_name_of_ours_that_the_scripts_own_code_may_register_is_noted():
    words = ["python", "-m", "my.main_multiply", "trainer.algorithm.advantage_estimator=grpo"]
    words += ["environment.env_class=multiply", "trainer.algorithm.policy_loss_type=gmpo"]
    assert from_command(words).changed[:2] == [
        "environment.env_class='multiply': jaxrl's own; if my.main_multiply registers another, "
        "write 'my_pkg.my_module:MyEnv'",
        "trainer.algorithm.policy_loss_type='gmpo': jaxrl's own; if my.main_multiply registers "
        "another, write 'my_pkg.my_module:my_loss'",
    ]
    words[2] = "skyrl_train.entrypoints.main_base"
    assert not any("jaxrl's own" in line for line in from_command(words).changed)


def test_a_recipe_of_the_defaults_is_empty():
    text = recipe_text(TrainConfig(), "arguments", "r.py", [])
    assert text.endswith("    config = default_config()\n    return config\n")


@pytest.mark.slow
def test_a_converted_run_trains(tmp_path):
    from jaxrl.train import BasePPOExp  # slow to import

    root = Path(__file__).parents[2]
    output = tmp_path / "recipe.py"
    words = [
        "data.train_data="
        "[\"jaxrl.envs.toys.sort_digits:prompts(size=8, length=2, split='train')\"]",
        "data.val_data=[]",
        f"trainer.policy.model.path={root}/configs/tiny_char_model",
        "trainer.placement.policy_num_gpus_per_node=8",
        "generator.inference_engine.num_engines=8",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "generator.n_samples_per_prompt=2",
        "generator.sampling_params.max_generate_length=4",
        "trainer.max_prompt_length=16",
        "environment.env_class=sort_digits",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=0",
        "trainer.logger=console",
        "trainer.resume_mode=null",
        *(f"trainer.{name}={tmp_path}" for name in ("log_path", "ckpt_path", "export_path")),
    ]
    assert main(["--output", str(output), *words]) == 0
    config = load_config_file(str(output))
    config.trainer.policy.model.random_init = True  # the folder holds no weights
    config.trainer.compilation_cache_path = None
    experiment = BasePPOExp(config)
    experiment.run()
    lines = (tmp_path / "test_run/metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2  # 8 prompts, 4 a step
    names = {name for line in lines for name in json.loads(line)}
    page = (root / "docs/migrating_from_skyrl.md").read_text().partition("## Metrics")[2]
    listed = set(re.findall(r"`((?:reward|loss|policy|generate|trainer|timing)/\w+)`", page))
    elsewhere = {  # with filters or rewards that this run has not, and SkyRL's own names
        *("reward/num_zero_variance_filtered", "loss/kl_loss_coef", "loss/avg_kl"),
        *("loss/avg_kl_max", "policy/response_length", "generate/batch_padded_seq_len"),
    }
    assert listed - elsewhere <= names
