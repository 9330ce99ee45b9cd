"""What "auto" becomes on each platform, and where a checkpoint has recorded something else."""

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.shapes import write_model_folder
from jaxrl import config as cfg
from jaxrl.config.platform_defaults import settle, settle_evaluation, settle_ids
from jaxrl.records.checkpoint import recorded_settings
from jaxrl.records.resume_identity import changed_fields
from jaxrl.train import BasePPOExp
from tests.test_train import small

STAGE1 = Path(__file__).parents[1] / "data" / "stage1"
ENGINE = "generator.inference_engine.model_dtype"
TODAY = {  # the defaults of a CPU
    "trainer.bf16": False,
    "trainer.flash_attn": False,
    "trainer.use_sample_packing": False,
    "trainer.few_shapes": False,
    ENGINE: "float32",
}
FAST = {
    "trainer.bf16": True,
    "trainer.flash_attn": True,
    "trainer.use_sample_packing": True,
    "trainer.few_shapes": True,
    ENGINE: "bfloat16",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of Qwen2.5-0.5B's shape: heads of 64, which both kernels take."""
    folder = tmp_path_factory.mktemp("model") / "qwen"
    write_model_folder(folder, "qwen2.5-0.5b")
    return folder


def config_of(model, folder, **changes):
    paths = {"trainer.policy.model.path": str(model), "trainer.ckpt_path": str(folder / "none")}
    return cfg.resolve(cfg.apply_overrides(cfg.TrainConfig(), {**paths, **changes}))


def values(config):
    trainer = config.trainer
    return {
        "trainer.bf16": trainer.bf16,
        "trainer.flash_attn": trainer.flash_attn,
        "trainer.use_sample_packing": trainer.use_sample_packing,
        "trainer.few_shapes": trainer.few_shapes,
        ENGINE: config.generator.inference_engine.model_dtype,
    }


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("cpu", TODAY), ("tpu", FAST), ("gpu", FAST), ("a platform of tomorrow", TODAY)],
)
def test_each_platform(model, tmp_path, platform, expected):
    settled, lines = settle(config_of(model, tmp_path), platform)
    assert values(settled) == expected
    assert cfg.auto_fields(settled) == []
    (line,) = lines
    assert line.endswith(f"automatic, on a {platform}")
    assert f"bf16={expected['trainer.bf16']}, " in line
    assert f"platform     {line[:40]}" in cfg.objective_card(settled, platform=lines)
    assert settle(settled, "tpu") == (settled, [])  # nothing is left to choose


def test_what_nobody_settled_counts_as_on_a_cpu(model, tmp_path):
    config = config_of(model, tmp_path)
    assert cfg.compute_dtype(config.trainer, "policy") == "float32"
    assert cfg.engine_dtype(config.generator.inference_engine) == "float32"
    assert "packed" not in cfg.objective_card(config)


def test_on_a_cpu_no_model_is_read(tmp_path):
    assert values(settle(config_of("no/such/folder", tmp_path), "cpu").config) == TODAY


def test_what_the_user_set_stays_and_the_sampler_follows_the_trainer(model, tmp_path):
    given = config_of(
        model, tmp_path, **{"trainer.bf16": False, "trainer.use_sample_packing": False}
    )
    settled, (line,) = settle(given, "tpu")
    expected = FAST | {
        "trainer.bf16": False,
        "trainer.use_sample_packing": False,
        ENGINE: "float32",
    }
    assert values(settled) == expected
    assert "bf16" not in line


@pytest.mark.parametrize(
    ("changes", "sizes", "expected"),
    [
        ({}, (48, 64), 48),
        ({}, (64, 64), None),
        ({}, (65, 64), None),  # special tokens that nothing uses
        ({"trainer.policy.known_ids": 40}, (48, 64), 40),
        ({"generator.inference_engine.backend": "vllm"}, (48, 64), None),
        ({"generator.inference_engine.backend": "jetstream"}, (48, 64), 48),
        (
            {
                "generator.inference_engine.backend": "jetstream",
                "generator.inference_engine.run_engines_locally": False,
            },
            (48, 64),
            None,
        ),
        (
            {
                "generator.inference_engine.backend": "jetstream",
                "generator.inference_engine.engine_init_kwargs": {"engine": "my:engine"},
            },
            (48, 64),
            None,
        ),
    ],
)
def test_the_ids_of_a_new_run(model, tmp_path, changes, sizes, expected):
    config = cfg.apply_overrides(config_of(model, tmp_path), changes)
    settled, lines = settle_ids(config, *sizes)
    assert settled.trainer.policy.known_ids == expected
    assert len(lines) == (expected == 48)


def test_ids_are_not_left_out_where_another_engine_samples(model, tmp_path):
    vllm = {"generator.inference_engine.backend": "vllm"}
    config = cfg.apply_overrides(config_of(model, tmp_path), vllm)
    recorded = {"trainer.policy.known_ids": 48}, "a checkpoint"  # of jaxrl's own engine
    asked = cfg.apply_overrides(config, {"trainer.policy.known_ids": 48})
    for given in ((config, 48, 64, recorded), (asked, 48, 64)):
        with pytest.raises(ValueError, match=r"known_ids=48: an engine of .*='vllm' draws of all"):
            settle_ids(*given)


def test_a_flax_module_is_left_alone(tmp_path):
    settled, lines = settle(config_of("tokenizer/only", tmp_path), "tpu", own_model=True)
    off = {"trainer.flash_attn": False, "trainer.use_sample_packing": False}
    assert values(settled) == FAST | off
    off = "flash_attn=False, use_sample_packing=False: automatic, the model is your own"
    assert lines[1] == off


def record(folder, step, settings, text=None):
    """What a checkpoint says of its config."""
    path = folder / f"global_step_{step}" / "meta" / "metadata"
    path.parent.mkdir(parents=True)
    path.write_text(text or json.dumps({"config": settings}))
    return path.parents[1]


def resumed(config):
    """What a run on a TPU settles that goes on from the checkpoint of its config."""
    return settle(config, "tpu", recorded=recorded_settings(config.trainer))


def test_a_recorded_value_outranks_auto(model, tmp_path):
    folder = tmp_path / "checkpoints"
    recorded = cfg.get_config_as_dict(settle(config_of(model, tmp_path), "cpu").config)
    del recorded["trainer"]["few_shapes"]  # newer than the checkpoint
    last = record(folder, 2, recorded)
    record(folder, 4, {}, text="cut off")
    there = config_of(model, tmp_path, **{"trainer.ckpt_path": str(folder)})
    settled, lines = resumed(there)
    assert values(settled) == TODAY | {"trainer.few_shapes": True}
    assert changed_fields(recorded, cfg.get_config_as_dict(settled)) == {}
    assert lines == [
        "bf16=False, flash_attn=False, use_sample_packing=False, model_dtype=float32: as in "
        f"{last}",
        "few_shapes=True: automatic, on a tpu",
    ]
    # the user's word outranks both; then the checkpoint is of another run, as before
    given = cfg.apply_overrides(there, {"trainer.bf16": True})
    assert values(resumed(given).config)["trainer.bf16"] is True
    path = {"trainer.resume_mode": "from_path", "trainer.resume_path": str(last)}
    elsewhere = config_of(model, tmp_path, **path)
    assert values(resumed(elsewhere).config)["trainer.bf16"] is False
    afresh = cfg.apply_overrides(there, {"trainer.resume_mode": "none"})
    assert values(resumed(afresh).config) == FAST
    assert values(settle(there, "tpu").config) == FAST


class OnATpu(BasePPOExp):
    """As if the devices were TPUs, as far as defaults go."""

    @classmethod
    def settled(cls, config):
        return resumed(config)


@pytest.mark.slow
def test_a_run_that_began_on_a_cpu_goes_on_as_it_began_where_auto_says_otherwise(tmp_path, capsys):
    begun = BasePPOExp(small(tmp_path, **{"trainer.max_training_steps": 2})).run()
    assert values(begun.config) == TODAY
    assert "model_dtype=float32: automatic, on a cpu" in " ".join(capsys.readouterr().out.split())
    trainer = OnATpu(small(tmp_path, **{"trainer.max_training_steps": 3})).run()
    assert values(trainer.config) == TODAY
    assert int(trainer.state.step) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "resuming after step 2" in printed
    assert "model_dtype=float32: as in" in printed


@pytest.mark.parametrize("kind", ["full", "lora", "critic", "lockstep", "free"])
def test_a_checkpoint_of_the_first_stage_outranks_auto(kind):
    run = STAGE1 / "runs" / kind
    given = yaml.safe_load((run / "config.yaml").read_text())
    for name in ("bf16", "flash_attn", "use_sample_packing"):  # as its recipe left them
        assert given["trainer"].pop(name) is False
    assert given["generator"]["inference_engine"].pop("model_dtype") == "float32"
    given["trainer"]["ckpt_path"] = str(run / "checkpoints")
    given["trainer"]["policy"]["model"]["path"] = str(STAGE1 / "model")
    settled = resumed(cfg.resolve(cfg.to_train_config(given))).config
    assert values(settled) == TODAY | {"trainer.few_shapes": True}
    (meta,) = (run / "checkpoints").glob("*/meta/metadata")
    recorded = json.loads(meta.read_text())["config"]
    assert changed_fields(recorded, cfg.get_config_as_dict(settled)) == {}


ROOM = "generator.inference_engine.eval_prompts_at_once"


@pytest.mark.parametrize(
    ("prompts", "recorded", "room"),
    [
        (80, {}, 80),
        (5000, {}, 1024),
        (0, {}, 0),
        (80, {ROOM: 30}, 30),  # whatever is evaluated now
        (80, {ROOM: 0}, 0),
        # a version without the field had rows for a batch of 1024, also where nothing was evaluated
        (80, {ROOM: "auto"}, 1024),
        (0, {ROOM: None}, 1024),
        (0, {ROOM: None, "trainer.eval_batch_size": "auto"}, 1024),  # of a config with few fields
    ],
)
def test_a_run_keeps_the_room_for_evaluation_that_it_began_with(
    model, tmp_path, prompts, recorded, room
):
    config = config_of(model, tmp_path)
    source = "a checkpoint" if recorded else ""
    fields = {"trainer.eval_batch_size": 1024, **recorded}
    config = cfg.apply_overrides(config, {"trainer.eval_batch_size": 1024})
    settled = settle_evaluation(config, prompts, (fields, source)).config
    assert settled.generator.inference_engine.eval_prompts_at_once == room
    assert settle_evaluation(settled, 7).config == settled  # what is set stays


@pytest.mark.parametrize("kind", ["full", "lora", "critic", "lockstep", "free"])
def test_a_run_of_the_first_stage_keeps_its_rows(kind):
    run = STAGE1 / "runs" / kind
    given = yaml.safe_load((run / "config.yaml").read_text())
    given["trainer"]["ckpt_path"] = str(run / "checkpoints")
    config = cfg.resolve(cfg.to_train_config(given))
    settled = settle_evaluation(config, 0, recorded_settings(config.trainer)).config
    batch = given["trainer"]["eval_batch_size"]
    assert settled.generator.inference_engine.eval_prompts_at_once == batch
