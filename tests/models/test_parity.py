"""The same logits as transformers both ways, for every family and rope type."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from jaxrl.models import config_from_hf, init_params, load_config, load_params, save_pretrained
from jaxrl.models.hf import SINGLE_FILE
from tests.models import tiny
from tests.models.tiny import LENGTH, MODELS, WINDOW, hf_logits, our_logits, random_hf_model

# More of a family than one model, and experts' variants: covered by the slow run.
FIRST = {model_type: name for name, (model_type, _) in reversed(MODELS.items())}


def assert_same_logits(ours, theirs):
    assert np.std(theirs) > 1  # else the tolerance would mean little
    assert np.max(np.abs(np.asarray(ours) - theirs)) < 1e-4


def first_of_family(name):
    """A case of the default run where it is the first model of its family."""
    quick = FIRST[MODELS[name][0]] == name
    return name if quick else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.some(8)
@pytest.mark.parametrize("name", map(first_of_family, MODELS))
def test_logits_agree_in_both_directions_and_the_round_trip_is_exact(name, tmp_path):
    model_type, fields = MODELS[name]
    model = random_hf_model(model_type, **fields)
    theirs = hf_logits(model)
    model.save_pretrained(tmp_path / "theirs")
    config = load_config(tmp_path / "theirs")
    params = load_params(tmp_path / "theirs", config)
    assert_same_logits(our_logits(config, params), theirs)

    save_pretrained(tmp_path / "ours", config, params)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    assert again.config.model_type == model_type
    # of a checkpoint in float32; one in bfloat16 is rounded to that again, see test_export.py
    np.testing.assert_array_equal(hf_logits(again), theirs)
    assert load_config(tmp_path / "ours") == config
    files = [load_file(tmp_path / who / SINGLE_FILE) for who in ("theirs", "ours")]
    assert files[0].keys() == files[1].keys()
    assert all(x.tobytes() == files[1][k].tobytes() for k, x in files[0].items())


@pytest.mark.parametrize(
    "name, without",
    [
        ("llama-linear", {"rope_scaling": None}),
        ("llama-llama3", {"rope_scaling": None}),
        ("llama-yarn", {"rope_scaling": None}),
        ("qwen2-window", {"sliding_window": LENGTH}),
        ("mistral-window", {"sliding_window": WINDOW + 1}),
        ("gemma2", {"attention_softcap": None}),
        ("gemma2", {"final_softcap": None}),
        ("gemma2", {"query_pre_attn_scalar": 16}),
        ("gemma3", {"local_rope_theta": None}),
    ],
)
def test_every_feature_matters_in_these_models(name, without):
    model_type, fields = MODELS[name]
    config = config_from_hf(random_hf_model(model_type, **fields).config.to_dict())
    config = dataclasses.replace(config, initializer_range=0.25)
    params = init_params(config, 0)
    other = dataclasses.replace(config, **without)
    assert np.max(np.abs(our_logits(config, params) - our_logits(other, params))) > 0.01


@pytest.mark.some(2)
@pytest.mark.parametrize("name", map(first_of_family, MODELS))
def test_gradients_are_those_of_transformers(name, tmp_path):
    model_type, fields = MODELS[name]
    model = random_hf_model(model_type, **fields)
    model.save_pretrained(tmp_path / "theirs")
    config = load_config(tmp_path / "theirs")
    params = load_params(tmp_path / "theirs", config)
    assert tiny.gradients_apart(model, config, params, tmp_path / "gradients") < 1e-4


@pytest.mark.some(1)
@pytest.mark.parametrize("name", sorted(FIRST.values()))
def test_packing_decoding_and_adapters_of_a_family(name, tmp_path):
    model_type, fields = MODELS[name]
    random_hf_model(model_type, **fields).save_pretrained(tmp_path / "theirs")
    config = load_config(tmp_path / "theirs")
    params = load_params(tmp_path / "theirs", config)
    assert tiny.packing_apart(config, params) < 2e-5
    assert tiny.decoding_apart(config, params) < 2e-5
    assert tiny.lora_apart(config, params, tmp_path / "adapter") < 1e-6
