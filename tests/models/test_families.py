"""config.json of every family, in and out; parity of the logits is in test_parity.py."""

import copy
import dataclasses

import pytest
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from jaxrl.models import (
    RopeScaling,
    TransformerConfig,
    config_from_hf,
    config_to_hf,
)

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
GEMMA_FEATURES = {
    "post_norms": True,
    "unit_offset_norm": True,
    "scale_embeddings": True,
    "query_pre_attn_scalar": 16,
    "activation": "gelu_pytorch_tanh",
}
SLIDES = {"sliding_window": 8, "sliding_layers": (False, True)}
SCALED = {"rope_scaling": RopeScaling("linear", 8.0)}
FEATURES = {
    "llama": {},
    "llama-bias": {"attention_bias": True, "attention_output_bias": True, **SCALED},
    "qwen2": {"attention_bias": True},
    "qwen2-window": {"attention_bias": True, **SLIDES},
    "qwen3": {"qk_norm": True},
    "qwen3-bias": {"qk_norm": True, "attention_bias": True, "attention_output_bias": True},
    "mistral": {"sliding_window": 8, "sliding_layers": (True, True)},
    "gemma2": {**GEMMA_FEATURES, **SLIDES, "attention_softcap": 50.0, "final_softcap": 30.0},
    "gemma3_text": {**GEMMA_FEATURES, **SLIDES, **SCALED, "qk_norm": True, "local_rope_theta": 1e4},
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("tied", [True, False])
def test_config_survives_the_trip_through_transformers(name, tied):
    config = dataclasses.replace(OURS, tie_embeddings=tied, **FEATURES[name])
    hf = AutoConfig.for_model(**config_to_hf(config, max_position_embeddings=512))
    assert hf.model_type == name.split("-")[0]
    assert hf.max_position_embeddings == 512
    assert hf.eos_token_id is None
    assert config_from_hf(config_to_hf(config)) == config
    assert config_from_hf(hf.to_dict()) == config


@pytest.mark.parametrize(
    "hf_class, kv_heads, head_dim",
    [
        (LlamaConfig, 4, 8),
        (Qwen2Config, 32, 8),
        (Qwen3Config, 32, 128),
        (MistralConfig, 8, 8),
        (Gemma2Config, 4, 256),
        (Gemma3TextConfig, 4, 256),
    ],
)
def test_absent_fields_get_the_defaults_of_transformers(hf_class, kv_heads, head_dim):
    config = config_from_hf(MINIMAL | {"model_type": hf_class.model_type})
    assert (config.num_kv_heads, config.head_dim) == (kv_heads, head_dim)
    assert config == config_from_hf(hf_class(**MINIMAL).to_dict())


@pytest.mark.parametrize(
    "model_type, fields, sliding",
    [
        # Qwen: layers from max_window_layers on, if use_sliding_window.
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "..ss"),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 2}, "...."),
        ("mistral", {"sliding_window": 4096}, "ssss"),
        ("mistral", {"sliding_window": None}, "...."),
        ("gemma2", {}, "s.s."),
        ("gemma3_text", {"sliding_window_pattern": 3}, "ss.s"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "...s"),
    ],
)
def test_which_layers_slide(model_type, fields, sliding):
    config = config_from_hf(MINIMAL | {"model_type": model_type, "num_hidden_layers": 4} | fields)
    flags = tuple(kind == "s" for kind in sliding)
    assert config.sliding_layers == (flags if any(flags) else ())
    assert config.sliding_window == (4096 if any(flags) else None)


LINEAR_4 = {"type": "linear", "factor": 4.0}  # the older name of rope_type
NEWER_LINEAR_4 = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": LINEAR_4},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": LINEAR_4, "rope_parameters": {"rope_theta": 1.0}},
    ],
)
def test_rope_of_old_and_new_configs(rope):
    config = config_from_hf(MINIMAL | {"model_type": "llama"} | rope)
    assert config.rope_theta == 5e5
    assert config == config_from_hf(LlamaConfig(**MINIMAL, **copy.deepcopy(rope)).to_dict())
    scaled = "linear" in str(rope)
    assert config.rope_scaling == (RopeScaling("linear", 4.0) if scaled else None)


@pytest.mark.parametrize(
    "rope, expected",
    [
        ({}, (1e6, 1e4, None)),
        ({"rope_theta": 5e5, "rope_local_base_freq": 5e3}, (5e5, 5e3, None)),
        (
            {"rope_theta": 5e5, "rope_scaling": NEWER_LINEAR_4},
            (5e5, 1e4, RopeScaling("linear", 4.0)),
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": LINEAR_4,
                    "sliding_attention": {"rope_theta": 9.0},
                }
            },
            (1e6, 9.0, RopeScaling("linear", 4.0)),
        ),
    ],
)
def test_rope_of_gemma3_is_one_per_kind_of_layer(rope, expected):
    sizes = MINIMAL | {"num_hidden_layers": 6}  # the last one is full
    config = config_from_hf(sizes | {"model_type": "gemma3_text"} | copy.deepcopy(rope))
    assert (config.rope_theta, config.local_rope_theta, config.rope_scaling) == expected
    assert config == config_from_hf(Gemma3TextConfig(**sizes, **copy.deepcopy(rope)).to_dict())


def test_a_multimodal_gemma3_is_read_as_its_text_model():
    # The text_config of google/gemma-3-4b-it names no more than this; the rest are defaults.
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = config_from_hf({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert config == config_from_hf(Gemma3TextConfig(**text).to_dict())
    assert (config.vocab_size, config.num_heads, config.head_dim) == (262_208, 8, 256)
    assert config.sliding_layers[:7] == (True,) * 5 + (False, True)


def test_qwen2_ignores_attention_bias_as_transformers_does():
    for value in (True, False):
        hf_config = MINIMAL | {"model_type": "qwen2", "attention_bias": value}
        assert config_from_hf(hf_config).attention_bias


@pytest.mark.parametrize(
    "change, field, value, supported",
    [
        ({"model_type": "phi3"}, "model_type", "'phi3'", "'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu'", "'silu'"),
        ({"mlp_bias": True}, "mlp_bias", "True", "False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "'bits': 4", "None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling", "'dynamic'", "null"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters", "'longrope'", "'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters", "0.5", "whole"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters", "full_att", "whole"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types", "'chunked", "'full_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types", "'full_attention'", "each of 2"),
    ],
)
def test_unsupported_fields_are_named_with_value_and_support(change, field, value, supported):
    for model_type in ("llama", "qwen3"):
        with pytest.raises(ValueError, match=field) as caught:
            config_from_hf(MINIMAL | {"model_type": model_type} | change)
        assert value in str(caught.value)
        assert supported in str(caught.value)


@pytest.mark.parametrize(
    "model_type, change, message",
    [
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is null or use_sl"),
        ("gemma2", {"sliding_window": None}, "sliding_window is null"),
        ("gemma2", {"query_pre_attn_scalar": None}, "lacks query_pre_attn_scalar"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation='relu' .* 'gelu_pytorch_tanh"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 .* null"),
        ("gemma3_text", {"rope_parameters": LINEAR_4}, "rope_parameters=.* one entry each for"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": LINEAR_4}},
            "no scaling of sliding_attention",
        ),
        ("llama", {"num_attention_heads": 3}, "hidden_size='32 with num_attention_heads=3'"),
    ],
)
def test_unsupported_features_of_a_family_are_named(model_type, change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(MINIMAL | {"model_type": model_type} | change)


def test_overrides_replace_entries_of_config_json():
    hf_config = MINIMAL | {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5}}
    plain = config_from_hf(hf_config)
    assert config_from_hf(hf_config, {"rms_norm_eps": 1e-5, "rope_theta": 1e6}) == (
        dataclasses.replace(plain, rms_norm_eps=1e-5, rope_theta=1e6)
    )
    scaled = config_from_hf(hf_config, {"rope_scaling": LINEAR_4})
    assert (scaled.rope_theta, scaled.rope_scaling) == (5e5, RopeScaling("linear", 4.0))
    older = MINIMAL | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LINEAR_4}
    assert config_from_hf(older, {"rope_scaling": None}) == plain
    with pytest.raises(ValueError, match="llama has no field 'rms_norm_epz'; did you mean 'rms_no"):
        config_from_hf(hf_config, {"rms_norm_epz": 1e-5})
    with pytest.raises(ValueError, match=r"rope_scaling=.*'linear' lacks factor"):
        config_from_hf(hf_config, {"rope_scaling": {"rope_type": "linear"}})
    with pytest.raises(ValueError, match="unknown field 'facter'; did you mean 'factor'"):
        config_from_hf(hf_config, {"rope_scaling": {**LINEAR_4, "facter": 1}})


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
    with pytest.raises(ValueError, match="qwen3 has attention_output_bias=True, not False"):
        config_to_hf(dataclasses.replace(OURS, qk_norm=True, attention_bias=True))
    with pytest.raises(ValueError, match="hidden_size='32 with num_attention_heads=3'"):
        bias = {"attention_bias": True, "attention_output_bias": True}
        config_to_hf(dataclasses.replace(OURS, num_heads=3, num_kv_heads=3, **bias))


def test_experts_that_cannot_be_are_named():
    published = {"model_type": "qwen3_moe", **EXPERTS_SIZES}
    with pytest.raises(ValueError, match="num_experts_per_tok=9 is not supp.*1 to num_experts=8"):
        config_from_hf(published | {"num_experts": 8, "num_experts_per_tok": 9})
    with pytest.raises(ValueError, match="decoder_sparse_step=0 is not supported; supported: 1 or"):
        config_from_hf(published | {"decoder_sparse_step": 0})
    mixtral = {"model_type": "mixtral", **EXPERTS_SIZES, "num_local_experts": 4}
    assert config_from_hf(mixtral).experts.count == 4
    assert config_from_hf(mixtral, {"num_local_experts": 6}).experts.count == 6


EXPERTS_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
