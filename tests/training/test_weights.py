"""Adapters through the real update and whole runs."""

import dataclasses
import math
import shutil

import jax
import numpy as np
import pytest

from jaxrl import config as cfg
from jaxrl.models import init_params, load_config, load_params, save_pretrained
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.linear import merge
from jaxrl.models.lora import LoraConfig, lora_config, select_modules
from jaxrl.models.peft_format import load_adapter
from jaxrl.records.checkpoint import CheckpointError
from jaxrl.train import BasePPOExp, train
from jaxrl.training.reference import Reference
from jaxrl.training.weights import Weights
from tests.test_train import assert_bitwise_equal, metric_lines, small
from tests.training import test_update
from tests.training.test_update import ROWS, algorithm_with, gradient, make_batch

MODEL = dataclasses.replace(test_update.MODEL, num_layers=1)
LORA = LoraConfig(
    MODEL, select_modules(MODEL, ["q_proj", "down_proj"]), rank=2, alpha=4, dropout=0.3
)


def adapter_gradient(*, loss="regular", microbatch_rows=ROWS, packed=False, **sizes):
    """Gradient of adapters that have moved, with dropout, on a mesh of these sizes."""
    flat, _ = gradient(
        algorithm_with(policy_loss_type=loss),
        make_batch(),
        model=MODEL,
        microbatch_rows=microbatch_rows,
        devices=math.prod(sizes.values()),
        sizes=tuple(sizes.items()),
        packed=packed,
        lora=LORA,
    )
    return flat


@pytest.mark.slow  # with dropout; without it, tests/parallel/test_meshes.py
def test_the_gradient_depends_neither_on_microbatches_nor_on_packing_nor_on_devices():
    whole = adapter_gradient()
    assert np.abs(whole).max() > 1e-3
    tolerance = 2e-5 * np.abs(whole).max()
    cut = adapter_gradient(microbatch_rows=2, packed=True)
    np.testing.assert_allclose(cut, whole, atol=tolerance)
    np.testing.assert_allclose(adapter_gradient(fsdp=4, tensor=2), whole, atol=tolerance)


@pytest.mark.slow
def test_a_loss_that_sees_the_whole_minibatch_pulls_back_through_the_same_dropout():
    whole = adapter_gradient(loss="clip_cov")
    tolerance = 2e-5 * np.abs(whole).max()
    cut = adapter_gradient(loss="clip_cov", microbatch_rows=2)
    np.testing.assert_allclose(cut, whole, atol=tolerance)


def lora_run(folder, **overrides):
    settings = {
        "trainer.policy.model.lora.rank": 4,
        "trainer.policy.optimizer_config.lr": 1e-2,
        "trainer.policy_mini_batch_size": 4,
        "trainer.max_training_steps": 2,
        "trainer.ckpt_interval": 1,
        "trainer.hf_save_interval": 2,
        "trainer.eval_interval": -1,
        "generator.sampling_params.max_generate_length": 2,  # one bucket: fewer compilations
        "data.val_data": [],
    }
    return small(folder, **{**settings, **overrides})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    return folder, train(lora_run(folder))


def test_only_adapters_are_trained_kept_and_exported(run):
    folder, trainer = run
    rank, layers, inputs, width = 4, 2, 64, 256  # of the quickstart's model
    adapters, base = trainer.state.params, trainer.policy.base
    assert "of rank 4 for 14 matrices" in trainer.policy.size()  # 7 x 2 layers
    assert adapters["w_up"]["a"].shape == (layers, inputs, rank)
    assert adapters["w_up"]["b"].shape == (layers, rank, width)
    assert all(np.any(pair["b"]) for pair in adapters.values())  # trained
    moments = sum(x.size for x in jax.tree.leaves(trainer.state.opt_state) if x.ndim)
    assert moments == 2 * sum(x.size for x in jax.tree.leaves(adapters))
    assert_bitwise_equal(base, init_params(trainer.model, trainer.config.trainer.seed))
    assert trainer.ref_params is base
    assert trainer.watch.recompiles == 0
    lines = metric_lines(folder)
    assert lines[-1]["policy/policy_kl"] > 0
    for line in lines:  # merged in the sampler, applied in the trainer
        assert line["policy/rollout_train_logprobs_abs_diff_max"] <= 1e-4
    lora, exported = load_adapter(folder / "exports" / "global_step_2" / "policy", trainer.model)
    assert lora == trainer.policy.lora
    assert_bitwise_equal(exported, adapters)


def test_an_export_may_have_the_adapters_merged(run, tmp_path, monkeypatch):
    _, trainer = run
    monkeypatch.setattr(trainer.policy.settings.model.lora, "merge_exports", True)
    trainer.export(tmp_path / "whole")
    loaded = load_params(tmp_path / "whole", load_config(tmp_path / "whole"))
    assert_bitwise_equal(loaded, merge(trainer.policy.whole(trainer.state.params)))


def test_adapters_that_peft_would_not_read_are_refused_before_the_first_step(tmp_path):
    """Of one matrix of experts: PEFT joins gates with ups."""
    settings = {
        "trainer.policy.model.path": "configs/tiny_mixture_model",
        "trainer.policy.model.lora.target_modules": ".*experts.*down_proj",
    }
    message = r"experts.0.down_proj' and not .*gate_proj': PEFT .*lora.merge_exports=true"
    with pytest.raises(ValueError, match=message):
        BasePPOExp(lora_run(tmp_path, **settings)).build()


def test_what_a_checkpoint_must_agree_with_is_told_of_a_base_that_is_loaded(run):
    _, trainer = run
    placement = trainer.policy.placement
    weights = Weights(trainer.config.trainer, "policy", trainer.model, placement)
    with pytest.raises(RuntimeError, match="base of the policy's adapters .* call load_base"):
        weights.describe()
    weights.load_base()
    assert weights.describe() == trainer.checkpoint_meta["model"]
    assert_bitwise_equal(weights.base, trainer.policy.base)


def test_a_resumed_run_is_the_same_bit_for_bit(run, tmp_path):
    folder, whole = run
    step_1 = {
        "trainer.resume_mode": "from_path",
        "trainer.resume_path": str(folder / "checkpoints" / "global_step_1"),
    }
    resumed = train(lora_run(tmp_path, **step_1))
    assert_bitwise_equal(resumed.state, whole.state)

    other_rank = lora_run(tmp_path / "rank", **step_1, **{"trainer.policy.model.lora.rank": 8})
    with pytest.raises(CheckpointError, match=r"of another model.*'lora.rank': \(4, 8\)"):
        BasePPOExp(other_rank).build().restore_or_init()

    other_base = tmp_path / "other_base"
    shutil.copytree(whole.config.trainer.policy.model.path, other_base)
    save_pretrained(tmp_path / "saved", whole.model, init_params(whole.model, 99))
    shutil.copy(tmp_path / "saved" / "model.safetensors", other_base)
    settings = {"policy.model.path": str(other_base), "policy.model.random_init": False}
    settings = {f"trainer.{name}": value for name, value in settings.items()} | step_1
    with pytest.raises(CheckpointError, match=r"of another model.*base\.\['embed'\]"):
        BasePPOExp(lora_run(tmp_path / "base", **settings)).build().restore_or_init()


def test_a_flax_module_takes_no_adapters():
    model = AdaptedModel("Tiny", lambda params, *_: params, lambda seed: {})
    with pytest.raises(ValueError, match=r"lora.rank=8: Tiny is a flax module"):
        lora_config(cfg.SkyRLLoraConfig(rank=8), model, "policy")
    assert lora_config(cfg.SkyRLLoraConfig(), model, "policy") is None


def test_a_reference_has_adapters_of_its_own(run, tmp_path):
    """Those that the run exported: the reference then is the trained policy."""
    folder, trainer = run
    path = folder / "exports" / "global_step_2" / "policy"

    def reference(path, rank):
        settings = {"model.path": str(path), "model.random_init": True, "model.lora.rank": rank}
        settings = {f"trainer.ref.{name}": value for name, value in settings.items()}
        config = cfg.resolve(lora_run(tmp_path, **settings)).trainer
        policy = Weights(config, "policy", trainer.model, trainer.policy.placement)
        placement = trainer.reference.weights.placement
        return Reference(policy, trainer.model, placement).params()

    expected = merge(trainer.params)
    for ours, theirs in zip(*map(jax.tree.leaves, (reference(path, 4), expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"lora.rank=2: the adapters in .* have rank 4; set that"):
        reference(path, 2)
    with pytest.raises(ValueError, match=r"ref.model.path=.*; set a PEFT folder, or .*rank=0"):
        reference(tmp_path, 4)
