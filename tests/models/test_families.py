"""Hugging Face configs and the weight table."""

import dataclasses

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from jaxrl.models import TransformerConfig, config_from_hf, config_to_hf, params_to_hf
from jaxrl.models.families import WEIGHTS, from_hf, hf_shape, hf_shapes, to_hf
from jaxrl.models.transformer import init_params

MINIMAL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
OURS = TransformerConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=1e6,
    rms_norm_eps=1e-5,
)
FEATURES = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
}


@pytest.mark.parametrize("model_type", FEATURES)
@pytest.mark.parametrize("tied", [True, False])
def test_config_survives_the_trip_through_transformers(model_type, tied, tmp_path):
    config = dataclasses.replace(OURS, tie_embeddings=tied, **FEATURES[model_type])
    hf = AutoConfig.for_model(**config_to_hf(config, max_position_embeddings=512))
    assert hf.model_type == model_type
    assert hf.max_position_embeddings == 512
    assert hf.eos_token_id is None
    assert config_from_hf(config_to_hf(config)) == config
    assert config_from_hf(hf.to_dict()) == config


@pytest.mark.parametrize(
    "hf_class, kv_heads, head_dim",
    [(LlamaConfig, 4, 8), (Qwen2Config, 32, 8), (Qwen3Config, 32, 128)],
)
def test_absent_fields_get_the_defaults_of_transformers(hf_class, kv_heads, head_dim):
    config = config_from_hf(MINIMAL | {"model_type": hf_class.model_type})
    hf = hf_class(**MINIMAL)
    assert (config.num_kv_heads, config.head_dim) == (kv_heads, head_dim)
    assert config.num_kv_heads == hf.num_key_value_heads
    assert config.rms_norm_eps == hf.rms_norm_eps
    assert config.rope_theta == hf.rope_parameters["rope_theta"]
    assert config.tie_embeddings == hf.tie_word_embeddings
    assert config == config_from_hf(hf.to_dict())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5}},
    ],
)
def test_rope_theta_of_old_and_new_configs(rope):
    assert config_from_hf(MINIMAL | {"model_type": "llama"} | rope).rope_theta == 5e5


def test_qwen2_ignores_attention_bias_as_transformers_does():
    for value in (True, False):
        hf_config = MINIMAL | {"model_type": "qwen2", "attention_bias": value}
        assert config_from_hf(hf_config).attention_bias


@pytest.mark.parametrize(
    "change, field, value, supported",
    [
        ({"model_type": "gemma3"}, "model_type", "'gemma3'", "'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu'", "'silu'"),
        ({"mlp_bias": True}, "mlp_bias", "True", "False"),
        ({"attention_bias": True}, "attention_bias", "True", "False"),
        ({"use_sliding_window": True}, "use_sliding_window", "True", "False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "'bits': 4", "None"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling", "'linear'", "null"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters", "'yarn'", "'default'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters", "0.5", "whole"),
        ({"layer_types": ["sliding_attention"]}, "layer_types", "'sliding_attention'", "full"),
    ],
)
def test_unsupported_fields_are_named_with_value_and_support(change, field, value, supported):
    for model_type in ("llama", "qwen3"):
        with pytest.raises(ValueError, match=field) as caught:
            config_from_hf(MINIMAL | {"model_type": model_type} | change)
        assert value in str(caught.value)
        assert supported in str(caught.value)


def test_missing_sizes_are_named():
    with pytest.raises(ValueError, match="lacks vocab_size, num_hidden_layers"):
        config_from_hf(
            {
                "model_type": "llama",
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_attention_heads": 2,
            }
        )


def test_configs_without_a_family_are_rejected():
    with pytest.raises(ValueError, match="qk_norm=True with attention_bias=True"):
        config_to_hf(dataclasses.replace(OURS, qk_norm=True, attention_bias=True))
    with pytest.raises(ValueError, match="hidden_size=32 .* num_heads=3"):
        config_to_hf(dataclasses.replace(OURS, num_heads=3, num_kv_heads=3))


@pytest.mark.parametrize(
    "leaf, shape, theirs",
    [
        ("embed", (5, 3), (5, 3)),
        ("wq", (6, 2, 4), (8, 6)),
        ("wo", (2, 4, 6), (6, 8)),
        ("bq", (2, 4), (8,)),
        ("w_down", (7, 3), (3, 7)),
        ("q_norm", (4,), (4,)),
    ],
)
def test_layouts_are_inverse_of_each_other(leaf, shape, theirs):
    weight = WEIGHTS[leaf]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert hf_shape(weight, shape) == theirs == to_hf(weight, x).shape
    assert to_hf(weight, x).flags.c_contiguous
    np.testing.assert_array_equal(from_hf(weight, to_hf(weight, x), shape), x)


def test_head_layout_literal():
    # D=1, H=2, h=2: row n * h + j of q_proj is head n, component j.
    np.testing.assert_array_equal(
        to_hf(WEIGHTS["wq"], np.array([[[1, 2], [3, 4]]])), [[1], [2], [3], [4]]
    )
    np.testing.assert_array_equal(
        to_hf(WEIGHTS["wo"], np.array([[[1], [2]], [[3], [4]]])), [[1, 2, 3, 4]]
    )


@pytest.mark.parametrize("model_type", FEATURES)
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_those_of_transformers(model_type, tied):
    config = dataclasses.replace(OURS, tie_embeddings=tied, **FEATURES[model_type])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_to_hf(config)))
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert hf_shapes(config) == theirs
    ours = dict(params_to_hf(config, init_params(config, 0)))
    assert {name: x.shape for name, x in ours.items()} == theirs
