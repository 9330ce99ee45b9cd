"""config.json of every family, in and out; parity of the logits is in test_parity.py."""

import copy
import dataclasses

import pytest
from transformers import (
    AutoConfig,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    Mistral3Config,
    MistralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from jaxrl.models import (
    RopeScaling,
    TransformerConfig,
    config_from_hf,
    config_to_hf,
)
from jaxrl.models.rope import QueryGrowth

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
POST_ONLY = {"post_norms": True, "pre_norms": False}
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
    "olmo2": {**POST_ONLY, "qk_norm": "whole"},
    "olmo3": {
        **POST_ONLY,
        **SLIDES,
        "qk_norm": "whole",
        "rope_scaling": RopeScaling("yarn", 8.0, 64),
        "local_rope_theta": 1e6,
    },
    "smollm3": {"rope_layers": (True, False)},
    "granite": {
        "attention_scale": 0.4,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 8.0,
    },
    "phi3": {
        "names": "phi3",
        "head_dim": 8,
        "rotary_dim": 4,
        "rope_scaling": RopeScaling(
            "longrope", 8.0, 64, short_factor=(1.0, 2.0), long_factor=(1.0, 4.0)
        ),
    },
    "glm": {"names": "glm", "rope_pairs": True, "rotary_dim": 8, "attention_bias": True},
    "glm4": {
        "names": "glm4",
        "rope_pairs": True,
        "rotary_dim": 4,
        "attention_bias": True,
        "post_norms": True,
    },
    "ministral": SLIDES,
    "ministral3": {
        "rope_scaling": RopeScaling("yarn", 8.0, 64),
        "query_growth": QueryGrowth(0.1, 64),
    },
    "exaone4": {**POST_ONLY, **SLIDES, "qk_norm": True, "rope_layers": (False, True)},
    "nemotron": {
        "activation": "relu2",
        "layer_norm": True,
        "unit_offset_norm": True,
        "gated_mlp": False,
        "rotary_dim": 8,
    },
    "arcee": {"activation": "relu2", "gated_mlp": False},
    "helium": {"rope_pairs": True, "head_dim": 8},
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("tied", [True, False])
def test_config_survives_the_trip_through_transformers(name, tied):
    config = dataclasses.replace(OURS, tie_embeddings=tied, **FEATURES[name])
    hf = AutoConfig.for_model(**config_to_hf(config, max_position_embeddings=512))
    assert hf.model_type == name.split("-")[0]
    assert hf.max_position_embeddings == 512
    assert hf.eos_token_id is None or "glm" in name  # whose class fills it in
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
        (Olmo2Config, 4, 8),
        (Olmo3Config, 4, 8),
        (SmolLM3Config, 4, 8),
        (GraniteConfig, 4, 8),
        (Phi3Config, 4, 8),
        (Glm4Config, 2, 128),
        (MinistralConfig, 8, 8),
        (Ministral3Config, 8, 128),
        (Exaone4Config, 32, 8),
        (NemotronConfig, 4, 8),
        (SeedOssConfig, 8, 128),
    ],
)
def test_absent_fields_get_the_defaults_of_transformers(hf_class, kv_heads, head_dim):
    given = MINIMAL | {"model_type": hf_class.model_type}
    config = config_from_hf(given)
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


def test_a_published_phi4_mini_is_read():
    # config.json of microsoft/Phi-4-mini-instruct, its factors shortened to one per pair of dims
    published = MINIMAL | {
        "model_type": "phi3",
        "num_key_value_heads": 2,
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2},
        "rope_theta": 10_000.0,
        "sliding_window": 262_144,
        "tie_word_embeddings": True,
    }
    config = config_from_hf(published)
    assert config.rotary_dim == 4  # of 32 / 4 = 8
    assert config.sliding_window == 262_144
    ones, twos = (1.0, 1.0), (2.0, 2.0)
    assert config.rope_scaling == RopeScaling(
        "longrope", 32.0, 4096, short_factor=ones, long_factor=twos
    )
    assert config == config_from_hf(Phi3Config(**copy.deepcopy(published)).to_dict())


def test_a_published_olmo3_is_read():
    # config.json of allenai/Olmo-3-7B-Think: sliding layers have the same theta, unscaled
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    rope |= {"attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0}
    published = {"model_type": "olmo3", "rope_theta": 500_000, "rope_scaling": rope}
    published |= MINIMAL | {"num_hidden_layers": 4, "sliding_window": 16}
    config = config_from_hf(published)
    assert config.sliding_layers == (True, True, True, False)
    assert (config.rope_theta, config.local_rope_theta) == (500_000.0, 500_000.0)
    assert config.rope_scaling.factor == 8.0
    assert config == config_from_hf(Olmo3Config(**copy.deepcopy(published)).to_dict())


@pytest.mark.parametrize("pattern", ["LLLG", 4])
def test_the_window_pattern_of_exaone4(pattern):
    given = MINIMAL | {"model_type": "exaone4", "num_hidden_layers": 6, "sliding_window": 16}
    config = config_from_hf(given | {"sliding_window_pattern": pattern})
    last = isinstance(pattern, int)  # that of a string is always full
    assert config.sliding_layers == (True, True, True, False, True, last)
    assert config.rope_layers == config.sliding_layers


def test_a_multimodal_mistral3_is_read_as_its_text_model():
    text = MINIMAL | {"model_type": "ministral3", "head_dim": 8}
    outer = Mistral3Config(text_config=copy.deepcopy(text)).to_dict()
    config = config_from_hf(outer)
    assert config == config_from_hf(text)
    assert config.query_growth == QueryGrowth(0.1, 16_384)


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
        ({"model_type": "gpt2"}, "model_type", "'gpt2'", "'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu'", "'silu'"),
        ({"mlp_bias": True}, "mlp_bias", "True", "False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "'bits': 4", "None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling", "'dynamic'", "null"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_parameters",
            "'longrope'",
            "lacks factor",
        ),
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
        ("helium", {"head_dim": 16}, "head_dim='16 with num_attention_heads=4' .* as in Helium"),
        ("granite", {"logits_scaling": None}, "lacks logits_scaling"),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters=.* llama_4_scaling_beta and original_max_position",
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
        config_to_hf(dataclasses.replace(OURS, num_heads=3, num_kv_heads=3, **GEMMA_FEATURES))


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


def test_an_unknown_family_is_refused_with_its_neighbours():
    message = "model_type='qwen3_vl' is not supported; the text parts of 'gemma3', .* are read; the"
    with pytest.raises(
        ValueError,
        match=f"{message} nearest are 'qwen3_5', 'qwen3', 'qwen3_moe'; supported: 'llama'",
    ):
        config_from_hf({"model_type": "qwen3_vl", "text_config": MINIMAL})
    with pytest.raises(ValueError, match="'xyz' is not supported; supported: 'llama' or 'qwen2'"):
        config_from_hf(MINIMAL | {"model_type": "xyz"})
