"""Families of models: their Hugging Face config.json, and our `TransformerConfig`.

A family is a row of `FAMILIES`. Writing chooses the first family whose config.json, read back,
gives the same architecture, so an export never describes another model.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl.models.architecture import (
    CONVOLUTION,
    DELTA,
    SOFTMAX,
    DeltaNet,
    Experts,
    Latent,
    ShortConvolution,
    layer_mixers,
)
from jaxrl.models.rope import QueryGrowth, RopeScaling, parse_scaling
from jaxrl.models.transformer import ACTIVATIONS, TransformerConfig

SIZES = {  # ours -> Hugging Face; a config.json must have those without a default
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
PLAIN = {  # ours -> Hugging Face; the value is the same
    "rms_norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "initializer_range": "initializer_range",
}
GEMMA_PLAIN = {
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attention_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping",
}
# Fields that change the forward, and the only value of each that `transformer.py` computes.
SUPPORTED_VALUES = {
    "mlp_bias": False,
    "clip_qkv": None,
    "quantization_config": None,
    "use_bidirectional_attention": False,
}
FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR, CONV = "linear_attention", "conv"


class Family(NamedTuple):
    """Describe one model type of transformers.

    `defaults` are those of its config class for absent fields (None = derived from the sizes), with
    every field that the family reads. `features` hold for all its models. `slides(config, i)` is
    whether layer i slides where config.json has no layer_types; None: the family has no windows.
    `experts` are the fields of `Experts` in config.json, ours -> theirs; `expert_features` hold for
    all models. `plain` are fields of this family alone, ours -> theirs, with the same values.
    `turns(config, i, slides)` is whether layer i, which slides or not, has rotary positions; None:
    all have. `other` is what layer_types calls the layers that have no attention, `LINEAR` or
    `CONV`; None: all have.
    """

    architecture: str
    defaults: dict[str, Any]
    features: dict[str, Any]
    slides: Callable[[Mapping[str, Any], int], bool] | None = None
    experts: dict[str, str] | None = None
    expert_features: Mapping[str, Any] = {}
    plain: Mapping[str, str] = {}
    turns: Callable[[Mapping[str, Any], int, bool], bool] | None = None
    other: str | None = None


DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "initializer_range": 0.02,
    "max_position_embeddings": None,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "layer_types": None,
    **SUPPORTED_VALUES,
}
TIED = "tie_word_embeddings"
ALIASES = {
    "num_local_experts": "num_experts",  # in a config.json that transformers 5 wrote
    "block_ff_dim": "intermediate_size",  # LFM2
    "tie_embedding": "tie_word_embeddings",
}
_QWEN = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_GEMMA_FEATURES = {"post_norms": True, "unit_offset_norm": True, "scale_embeddings": True}
_GEMMA3 = {  # text_config of the published multimodal models relies on these
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}


_EXPERTS = {  # ours -> Hugging Face
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "normalise": "norm_topk_prob",
}
_DENSE_LAYERS = {"mlp_only_layers": None, "decoder_sparse_step": 1}
_QWEN3_MOE = _DENSE_LAYERS | {
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}
_QWEN2_MOE = _QWEN3_MOE | {
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "max_window_layers": 28,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
_MIXTRAL = {
    "num_key_value_heads": 8,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
_OLMOE = {
    "rms_norm_eps": 1e-5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


_POST_ONLY = {"post_norms": True, "pre_norms": False}
_NO_BIAS = {"attention_bias": False, "attention_output_bias": False}
_OLMO3 = {
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "rope_theta": 500_000.0,
    "rope_local_base_freq": 500_000.0,
}
_SMOLLM3 = {
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "rope_theta": 2_000_000.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}
_GRANITE = {  # ours -> theirs
    "attention_scale": "attention_multiplier",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logits_scaling",
}
_GRANITE4 = {
    "intermediate_size": 11_008,  # of experts alone
    "shared_intermediate_size": 1024,
    "position_embedding_type": None,
    "num_experts": 8,
}
_PHI3 = {
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 4096,
}
_GLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_MINISTRAL3 = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "llama_4_scaling_beta": None,  # its place is in rope_parameters
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_EXAONE4 = {
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
_NEMOTRON = {
    "hidden_act": "relu2",
    "norm_eps": 1e-5,
    "initializer_range": 0.0134,
    "partial_rotary_factor": 0.5,
}
_SEED_OSS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "attention_out_bias": False,
}
_GLM4_MOE = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": False,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_GLM4_MOE_EXPERTS = _EXPERTS | {
    "count": "n_routed_experts",
    "scaling": "routed_scaling_factor",
    "groups": "n_group",
    "groups_per_token": "topk_group",
}
_LATENT = {  # ours -> Hugging Face
    "rank": "kv_lora_rank",
    "plain": "qk_nope_head_dim",
    "turned": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "query_rank": "q_lora_rank",
}
_YOUTU = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
    "rope_interleave": True,
    "tie_word_embeddings": True,
}
_DEEPSEEK_V3 = _YOUTU | {
    "tie_word_embeddings": False,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}
_DEEPSEEK_V2 = {
    **{k: x for k, x in _DEEPSEEK_V3.items() if k not in ("rope_interleave", "norm_topk_prob")},
    "n_routed_experts": 64,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "n_group": None,
    "topk_group": None,
    "first_k_dense_replace": 0,
    "topk_method": "greedy",
}
_GLM4_MOE_LITE = {
    **{k: x for k, x in _DEEPSEEK_V3.items() if k != "first_k_dense_replace"},
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "mlp_layer_types": None,
}
_GPT_OSS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "sliding_window": 128,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
_HELIUM = {
    "num_key_value_heads": 20,
    "head_dim": 128,
    "rms_norm_eps": 1e-8,
    "rope_theta": 100_000.0,
}


def _has_window(c: Mapping[str, Any], layer: int) -> bool:
    return c["sliding_window"] is not None


def _smollm3_turns(c: Mapping[str, Any], layer: int, slides: bool = False) -> bool:
    given = c["no_rope_layers"]  # 1 where a layer has rotary positions
    return bool(given[layer]) if given else (layer + 1) % c["no_rope_layer_interval"] != 0


def _exaone4_slides(c: Mapping[str, Any], layer: int) -> bool:
    pattern, last = c["sliding_window_pattern"], c["num_hidden_layers"] - 1
    if c["sliding_window"] is None or not pattern:
        return False
    if isinstance(pattern, str):  # such as "LLLG"
        return pattern[layer % len(pattern)] == "L" and layer != last
    return (layer + 1) % pattern != 0


_DELTA_NET = {  # ours -> Hugging Face
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "window": "linear_conv_kernel_dim",
}
_QWEN3_5 = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_QWEN3_5_FEATURES = {"qk_norm": True, "unit_offset_norm": True, "output_gate": True}
_QWEN3_5_MOE = _QWEN3_5 | {
    "num_key_value_heads": 2,
    "intermediate_size": 0,  # no layer has an MLP
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_QWEN3_NEXT = (
    _QWEN3_5_MOE
    | _DENSE_LAYERS
    | {
        "intermediate_size": 5632,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    }
)
_LFM2 = {
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": None,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
}


def _qwen_slides(c: Mapping[str, Any], layer: int) -> bool:
    return c["use_sliding_window"] and c["sliding_window"] and layer >= c["max_window_layers"]


FAMILIES = {
    "llama": Family("LlamaForCausalLM", {}, {}),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _QWEN,
        {"attention_bias": True, "attention_output_bias": False},  # whatever the file says
        _qwen_slides,
    ),
    "qwen3": Family("Qwen3ForCausalLM", _QWEN | {"head_dim": 128}, {"qk_norm": True}, _qwen_slides),
    "mistral": Family(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "sliding_window": 4096},
        _NO_BIAS,
        _has_window,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _GEMMA_FEATURES,
        lambda _, layer: layer % 2 == 0,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA | _GEMMA3,
        _GEMMA_FEATURES | {"qk_norm": True},
        lambda c, layer: (layer + 1) % c["sliding_window_pattern"] != 0,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _QWEN3_MOE,
        {"qk_norm": True},
        lambda c, _: c["use_sliding_window"] and c["sliding_window"] is not None,
        _EXPERTS,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        _QWEN2_MOE,
        {"attention_output_bias": False},
        lambda c, i: c["use_sliding_window"] and i % 2 == 0 and i < c["max_window_layers"],
        _EXPERTS | {"shared_width": "shared_expert_intermediate_size"},
        {"shared_gate": True},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _MIXTRAL,
        _NO_BIAS,
        _has_window,
        {"count": "num_experts", "per_token": "num_experts_per_tok", "width": "intermediate_size"},
        {"normalise": True, "names": "mixtral"},
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        _OLMOE,
        {"qk_norm": "whole"},
        None,
        _EXPERTS | {"width": "intermediate_size"},
    ),
    "olmo2": Family("Olmo2ForCausalLM", {"rms_norm_eps": 1e-5}, {"qk_norm": "whole", **_POST_ONLY}),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _OLMO3,
        {"qk_norm": "whole", **_POST_ONLY},
        lambda _, layer: (layer + 1) % 4 != 0,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        {"num_key_value_heads": 8, "sliding_window": 4096},
        _NO_BIAS,
        _has_window,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _SMOLLM3,
        {},
        lambda c, i: c["use_sliding_window"] and _has_window(c, i) and not _smollm3_turns(c, i),
        turns=_smollm3_turns,
    ),
    "granite": Family(
        "GraniteForCausalLM", dict.fromkeys(_GRANITE.values(), 1.0), {}, plain=_GRANITE
    ),
    "granitemoehybrid": Family(  # its dense models: Granite 4 micro
        "GraniteMoeHybridForCausalLM",
        dict.fromkeys(_GRANITE.values(), 1.0) | _GRANITE4,
        {"names": "granite4"},
        plain=_GRANITE | {"intermediate_size": "shared_intermediate_size"},
        turns=lambda c, *_: c["position_embedding_type"] == "rope",
    ),
    "phi3": Family("Phi3ForCausalLM", _PHI3, {"names": "phi3", **_NO_BIAS}, _has_window),
    "glm": Family(
        "GlmForCausalLM",
        _GLM,
        {"names": "glm", "rope_pairs": True, "attention_output_bias": False},
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        _GLM,
        {
            "names": "glm4",
            "rope_pairs": True,
            "attention_output_bias": False,
            "post_norms": True,
        },
    ),
    "ministral3": Family("Ministral3ForCausalLM", _MINISTRAL3, _NO_BIAS, _has_window),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        _EXAONE4,
        {"qk_norm": True, **_POST_ONLY, **_NO_BIAS},
        _exaone4_slides,
        turns=lambda c, _, slides: c["sliding_window"] is None or slides,
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        _NEMOTRON,
        {"layer_norm": True, "unit_offset_norm": True, "gated_mlp": False},
        plain={"rms_norm_eps": "norm_eps"},
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        {"hidden_act": "relu2", "rms_norm_eps": 1e-5},
        {"gated_mlp": False},
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        _SEED_OSS,
        {},
        plain={"attention_output_bias": "attention_out_bias"},
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        _GLM4_MOE,
        {"names": "glm4_moe", "attention_output_bias": False},
        experts=_GLM4_MOE_EXPERTS,
        expert_features={"scoring": "sigmoid", "bias": True},
        plain={"qk_norm": "use_qk_norm"},
    ),
    "youtu": Family(
        "YoutuForCausalLM", _YOUTU, {"names": "latent"}, plain={"rope_pairs": "rope_interleave"}
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _DEEPSEEK_V3,
        {"names": "latent"},
        experts=_GLM4_MOE_EXPERTS,
        expert_features={"scoring": "sigmoid", "bias": True},
        plain={"rope_pairs": "rope_interleave"},
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        _DEEPSEEK_V2,
        {"names": "latent", "rope_pairs": True},
        experts={
            ours: theirs
            for ours, theirs in _GLM4_MOE_EXPERTS.items()
            if ours in ("count", "per_token", "width", "scaling")
        },
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        _GLM4_MOE_LITE,
        {"names": "latent"},
        experts=_GLM4_MOE_EXPERTS,
        expert_features={"scoring": "sigmoid", "bias": True},
        plain={"rope_pairs": "rope_interleave"},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _GPT_OSS,
        {"names": "gpt_oss", "attention_sinks": True},
        lambda _, layer: layer % 2 == 0,
        {
            "count": "num_experts",
            "per_token": "num_experts_per_tok",
            "width": "intermediate_size",
            "swiglu_limit": "swiglu_limit",
            "swiglu_alpha": "swiglu_alpha",
        },
        {"normalise": True, "linear_bias": True},
    ),
    "helium": Family(
        "HeliumForCausalLM", _HELIUM, {"rope_pairs": True, "attention_output_bias": False}
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _QWEN3_NEXT,
        _QWEN3_5_FEATURES,
        None,
        _EXPERTS | {"shared_width": "shared_expert_intermediate_size"},
        {"shared_gate": True},
        other=LINEAR,
    ),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", _QWEN3_5, _QWEN3_5_FEATURES, None, other=LINEAR),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        _QWEN3_5_MOE,
        _QWEN3_5_FEATURES,
        None,
        {k: x for k, x in _EXPERTS.items() if k != "normalise"}
        | {"shared_width": "shared_expert_intermediate_size"},
        {"normalise": True, "shared_gate": True},
        other=LINEAR,
    ),
    "lfm2": Family("Lfm2ForCausalLM", _LFM2, {"qk_norm": True}, None, other=CONV),
}
# all layers slide or none, whatever layer_types say
ONE_KIND = ("mistral", "mixtral", "qwen3_moe", "phi3", "ministral3")
OWN_WINDOW = (*ONE_KIND, "exaone4", "smollm3")  # where sliding_window null means something
# Models of text and pictures, whose text part is read -> its model type if config.json has none.
MULTIMODAL = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# transformers wants hidden_size % heads == 0
WHOLE_HEADS = ("llama", "gemma2", "gemma3_text", "qwen2_moe", "olmoe", "lfm2")


def config_from_hf(
    hf_config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> TransformerConfig:
    """Return the architecture that a Hugging Face config.json describes.

    Absent fields get the default of the family's config class in transformers. Rotary settings may
    be in the form of transformers 5 (`rope_parameters`) or 4 (`rope_scaling`, `rope_theta`).

    Args:
        hf_config: of a text model, or of one of `MULTIMODAL`, whose text part is read.
        overrides: entries of config.json that replace its own; `rope_scaling` and `rope_theta` win
            over whatever form the file has.

    Raises:
        ValueError: a model type or feature that the forward does not compute, a missing size or an
            unknown override; names the field, its value and what is supported.
    """
    hf_config, overrides = (
        {ALIASES.get(name, name): x for name, x in (given or {}).items()}
        for given in (hf_config, overrides)
    )
    hf_config = text_config(hf_config)
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise _unknown(hf_config)
    changes = dict(overrides or {})
    _check_overrides(changes, hf_config, model_type)
    rope_changes = {k: changes.pop(k) for k in ("rope_theta", "rope_scaling") if k in changes}
    defaults = DEFAULTS | FAMILIES[model_type].defaults
    values = defaults | dict(hf_config) | changes
    _check_numbers(values, defaults)
    config = _parse(model_type, values)
    return dataclasses.replace(config, **_rope_overrides(config, values, rope_changes))


def _check_numbers(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse text where a number is, or true and false, which would fail somewhere else."""
    sizes = (*SIZES.values(), "num_key_value_heads", "head_dim")
    for name, value in values.items():
        quoted = isinstance(value, str) and re.fullmatch(r"[-+.\deE]+|(?i:true|false)", value)
        if name in sizes and not isinstance(value, int | None):
            raise ValueError(f"config.json: {name}={value!r} is no whole number; write it as one")
        if quoted and isinstance(defaults.get(name), int | float):
            raise ValueError(f"config.json: {name}={value!r} is text; write it without quotes")


def text_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model's text part, which may be all of it."""
    if (outer := hf_config.get("model_type")) not in MULTIMODAL:
        return dict(hf_config)
    tied = {k: x for k, x in hf_config.items() if k == TIED}
    text = hf_config.get("text_config") or {}
    return {"model_type": MULTIMODAL[outer], **tied, **text}


def text_alone(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model's text part as a model of its own."""
    text = text_config(hf_config)
    if hf_config.get("model_type") not in MULTIMODAL:
        return text
    outside = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
    named = {k: hf_config[k] for k in outside if k in hf_config}
    return {"architectures": [FAMILIES[text["model_type"]].architecture], **named, **text}


def with_entries(hf_config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with other entries of the text model.

    Where it has an older name of one, that is left out. What ties the head stands outside of the
    text part, too.
    """
    old = {alias for alias, name in ALIASES.items() if name in changes} - {*changes}
    if hf_config.get("model_type") not in MULTIMODAL:
        return {k: x for k, x in hf_config.items() if k not in old} | dict(changes)
    text = hf_config.get("text_config") or {}
    outside = {k: x for k, x in changes.items() if k == TIED}
    inside = {k: x for k, x in text.items() if k not in old} | dict(changes)
    return {**hf_config, **outside, "text_config": inside}


def changed_config(config: TransformerConfig, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base`, the config.json of another model, with what `config` has otherwise.

    What says nothing of the architecture stays as it is: token ids, context length, the text part's
    place beside pictures, the form of either version of transformers.

    Raises:
        ValueError: the family of `base` does not have such a model; says what it would be.
    """
    before, model_type = config_from_hf(base), text_config(base)["model_type"]
    old, new = _write(model_type, before), _write(model_type, config)
    changes = {k: x for k, x in new.items() if k not in old or x != old[k]}
    written = with_entries(base, changes)
    if different := _differences(config, config_from_hf(written)):
        raise ValueError(f"{model_type} has {different}")
    return written


def _differences(config: TransformerConfig, found: TransformerConfig) -> str:
    """Say in which fields a config that was read is not the one that was written."""
    wanted = config.described()
    return ", ".join(
        f"{k}={v!r}, not {wanted[k]!r}" for k, v in found.described().items() if v != wanted[k]
    )


def with_dtype(hf_config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config.json of weights in `dtype`, which it names where it named one.

    They are not quantised any more, and no code of the folder comes with them.
    """
    changed = {
        k: dtype if k in ("dtype", "torch_dtype") else x
        for k, x in hf_config.items()
        if k not in ("quantization_config", "auto_map")
    }
    if hf_config.get("model_type") in MULTIMODAL:
        changed["text_config"] = with_dtype(hf_config.get("text_config") or {}, dtype)
    return changed


def _unknown(hf_config: Mapping[str, Any]) -> ValueError:
    model_type, known = hf_config.get("model_type"), [*FAMILIES, *MULTIMODAL]
    near = difflib.get_close_matches(str(model_type), known, n=3, cutoff=0.5)
    nearest = f"the nearest are {', '.join(map(repr, near))}; " if near else ""
    if "text_config" in hf_config:
        nearest = f"the text parts of {', '.join(map(repr, MULTIMODAL))} are read; {nearest}"
    others = " or ".join(repr(name) for name in known)
    return ValueError(
        f"config.json: model_type={model_type!r} is not supported; {nearest}supported: {others}"
    )


def config_to_hf(
    config: TransformerConfig, *, max_position_embeddings: int = 32_768
) -> dict[str, Any]:
    """Return a config.json for transformers, of the first family that has this architecture.

    Token ids are null here: the config classes' own defaults belong to other tokenizers.

    Args:
        max_position_embeddings: context length that serving engines read; the forward has no limit.

    Raises:
        ValueError: no family has this combination of features or sizes; says why not, by family.
    """
    reasons = []
    for model_type in FAMILIES:
        hf_config = _write(model_type, config) | {
            "max_position_embeddings": max_position_embeddings
        }
        try:
            different = _differences(config, config_from_hf(hf_config))
        except ValueError as error:
            reasons.append(f"{model_type}: {error}")
            continue
        if not different:
            return hf_config
        reasons.append(f"{model_type} has {different}")
    raise ValueError(f"no Hugging Face family has this architecture: {'; '.join(reasons)}")


def _parse(model_type: str, values: dict[str, Any]) -> TransformerConfig:
    """Parse `values`, config.json over the family's defaults."""
    family = FAMILIES[model_type]
    _check_supported(model_type, values)
    heads, kv_heads, head_dim = (
        values[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    width = values["hidden_size"] // heads if head_dim is None else head_dim
    latent = _latent(family, values)
    if latent is not None:
        kv_heads, width = heads, latent.plain + latent.turned
    windows = _sliding(model_type, values)
    slides = windows["sliding_layers"] or (False,) * values["num_hidden_layers"]
    turns = tuple(family.turns is None or family.turns(values, i, x) for i, x in enumerate(slides))
    fields = {
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": width,
        "activation": values[_activation_field(family)],
        "attention_bias": values[_bias_field(family)],
        "attention_output_bias": values["attention_bias"],
        "experts": _experts(family, values),
        "rope_layers": () if all(turns) else turns,
        **{ours: values[theirs] for ours, theirs in (SIZES | _plain(family)).items()},
        **windows,
        **_mixers(family, values),
        **family.features,
        **_rope(family, values, width, any(slides)),
    }
    if latent is not None:
        scale = _latent_scale(width, fields["rope_scaling"])
        fields |= {"latent": latent, "rotary_dim": latent.turned, "attention_scale": scale}
    return TransformerConfig(**fields)


def _write(model_type: str, config: TransformerConfig) -> dict[str, Any]:
    """Return the family's config.json as far as it can say what the architecture is."""
    c, family = config, FAMILIES[model_type]
    no_rope = {"no_rope_layers": [int(x) for x in c.rope_layers or (True,) * c.num_layers]}
    return {
        "model_type": model_type,
        "architectures": [family.architecture],
        **{theirs: getattr(c, ours) for ours, theirs in (SIZES | _plain(family)).items()},
        **(no_rope if "no_rope_layers" in family.defaults else {}),
        **(_written_granite4(c) if "position_embedding_type" in family.defaults else {}),
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        _activation_field(family): c.activation,
        _bias_field(family): c.attention_bias,
        **_written_experts(family, c),
        **_written_windows(model_type, c),
        **_written_rope(family, c),
        **_written_mixers(family, c),
        **_written_latent(family, c),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
    }


def _written_granite4(config: TransformerConfig) -> dict[str, Any]:
    return {
        "position_embedding_type": "nope" if config.rope_layers else "rope",
        "num_local_experts": 0,
        "layer_types": [FULL] * config.num_layers,
        "mamba_n_heads": 1,  # there are none, but transformers wants a number that divides
    }


def _plain(family: Family) -> dict[str, str]:
    gemma = {ours: theirs for ours, theirs in GEMMA_PLAIN.items() if theirs in family.defaults}
    return {**PLAIN, **gemma, **family.plain}


def _activation_field(family: Family) -> str:
    return "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"


def _bias_field(family: Family) -> str:
    return "qkv_bias" if "qkv_bias" in family.defaults else "attention_bias"


def _experts(family: Family, values: Mapping[str, Any]) -> Experts | None:
    if family.experts is None:
        return None
    dense: tuple[int, ...] = ()
    if "decoder_sparse_step" in family.defaults:
        step, alone = values["decoder_sparse_step"], values["mlp_only_layers"] or ()
        if step < 1:
            raise _unsupported("decoder_sparse_step", step, "1 or more")
        layers = range(values["num_hidden_layers"])
        dense = tuple(i for i in layers if i in alone or (i + 1) % step)
    if "mlp_layer_types" in family.defaults:
        count = values["num_hidden_layers"]
        kinds = values["mlp_layer_types"] or ["dense"] + ["sparse"] * (count - 1)
        if len(kinds) != count or set(kinds) - {"dense", "sparse"}:
            raise _unsupported("mlp_layer_types", kinds, f"'dense' or 'sparse' for {count} layers")
        dense = tuple(i for i, kind in enumerate(kinds) if kind == "dense")
    if values.get("topk_method", "greedy") not in ("greedy", "noaux_tc"):
        raise _unsupported("topk_method", values["topk_method"], "'greedy', 'noaux_tc'")
    if "first_k_dense_replace" in family.defaults:
        dense = tuple(range(min(values["first_k_dense_replace"], values["num_hidden_layers"])))
    fields = {ours: values[theirs] for ours, theirs in family.experts.items()}
    if "n_shared_experts" in family.defaults:  # they are one, of their widths together
        fields["shared_width"] = values["n_shared_experts"] * fields["width"] or None
    count, chosen = fields["count"], fields["per_token"]
    if chosen is None or not 1 <= chosen <= count:
        names = family.experts["per_token"], family.experts["count"]
        raise _unsupported(names[0], chosen, f"1 to {names[1]}={count}")
    return Experts(**fields, **family.expert_features, dense_layers=dense)


def _written_experts(family: Family, config: TransformerConfig) -> dict[str, Any]:
    if family.experts is None or config.experts is None:
        return {}
    written = {theirs: getattr(config.experts, ours) for ours, theirs in family.experts.items()}
    # Mixtral's files have one name of it, the others' the other
    written["num_local_experts"] = config.experts.count
    if "decoder_sparse_step" in family.defaults:
        dense = {"decoder_sparse_step": 1, "mlp_only_layers": [*config.experts.dense_layers]}
        written |= dense
    if "first_k_dense_replace" in family.defaults:
        written["first_k_dense_replace"] = len(config.experts.dense_layers)
    if "mlp_layer_types" in family.defaults:
        alone, layers = config.experts.dense_layers, range(config.num_layers)
        written["mlp_layer_types"] = ["dense" if i in alone else "sparse" for i in layers]
    if "n_shared_experts" in family.defaults:
        written["n_shared_experts"] = (config.experts.shared_width or 0) // config.experts.width
    return written


def _latent(family: Family, values: Mapping[str, Any]) -> Latent | None:
    if "kv_lora_rank" not in family.defaults:
        return None
    latent = Latent(**{ours: values[theirs] for ours, theirs in _LATENT.items()})
    if latent.value_dim > latent.plain + latent.turned:
        widest = f"at most {latent.plain + latent.turned}, the width of a query"
        raise _unsupported("v_head_dim", latent.value_dim, widest)
    if values["attention_bias"]:
        raise _unsupported("attention_bias", True, "false, beside latent attention")
    return latent


def _latent_scale(width: int, scaling: RopeScaling | None) -> float | None:
    """Return the factor of latent attention's scores; YaRN's amplitude lies in it, squared."""
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return None
    return width**-0.5 * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2


def _written_latent(family: Family, config: TransformerConfig) -> dict[str, Any]:
    if "kv_lora_rank" not in family.defaults or (latent := config.latent) is None:
        return {}
    written = {theirs: getattr(latent, ours) for ours, theirs in _LATENT.items()}
    return written | {"head_dim": latent.turned}  # of which transformers makes its frequencies


def _mixers(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a family has beside attention."""
    if family.other is None:
        return {}
    kinds = values["layer_types"] or _other_layers(family, values)
    mixer = {LINEAR: DELTA, CONV: CONVOLUTION}[family.other]
    found: dict[str, Any] = {
        "mixers": tuple(mixer if kind == family.other else SOFTMAX for kind in kinds)
    }
    if family.other == CONV:
        found["rms_norm_eps"] = values["norm_eps"]
        found["convolution"] = ShortConvolution(values["conv_L_cache"], values["conv_bias"])
        if values["block_auto_adjust_ff_dim"]:
            multiple, factor = values["block_multiple_of"], values["block_ffn_dim_multiplier"] or 1
            width = int(factor * int(2 * values["intermediate_size"] / 3))
            found["intermediate_size"] = -(-width // multiple) * multiple
        return found
    net = {ours: values[theirs] for ours, theirs in _DELTA_NET.items()}
    if net["value_heads"] % net["key_heads"]:
        name = _DELTA_NET["value_heads"]
        raise _unsupported(name, net["value_heads"], f"a multiple of {net['key_heads']} key heads")
    return found | {"delta_net": DeltaNet(**net, grouped="norm_topk_prob" in family.defaults)}


def _other_layers(family: Family, values: Mapping[str, Any]) -> list[str]:
    """Return the layer_types of a config.json that has none."""
    layers = range(values["num_hidden_layers"])
    if family.other == CONV:
        alone = values["full_attn_idxs"]
        return [FULL if alone is None or i in alone else CONV for i in layers]
    interval = values["full_attention_interval"]
    return [LINEAR if (i + 1) % interval else FULL for i in layers]


def _written_mixers(family: Family, config: TransformerConfig) -> dict[str, Any]:
    if family.other is None:
        return {}
    written: dict[str, Any] = {
        "layer_types": [
            FULL if mixer == SOFTMAX else family.other for mixer in layer_mixers(config)
        ]
    }
    if (convolution := config.convolution) is not None and family.other == CONV:
        written |= {"conv_L_cache": convolution.window, "conv_bias": convolution.bias}
        return written | {"block_auto_adjust_ff_dim": False, "norm_eps": config.rms_norm_eps}
    if (net := config.delta_net) is not None and family.other == LINEAR:
        written |= {theirs: getattr(net, ours) for ours, theirs in _DELTA_NET.items()}
    return written


def _sliding(model_type: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return sliding_window and sliding_layers of a config.json."""
    slides, layers = FAMILIES[model_type].slides, range(values["num_hidden_layers"])
    kinds = None if model_type in ONE_KIND else values["layer_types"]
    if model_type == "granitemoehybrid":
        if values["num_experts"]:
            raise _unsupported("num_local_experts", values["num_experts"], "0, a dense Granite 4")
        if kinds is None:
            raise _unsupported("layer_types", None, f"{FULL!r} for every layer")
        kinds = [FULL if kind == "attention" else kind for kind in kinds]
    if kinds is None:
        kinds = [SLIDING if slides and slides(values, i) else FULL for i in layers]
    allowed = {FULL, SLIDING} if slides else {FULL}
    if (other := FAMILIES[model_type].other) is not None:
        allowed.add(other)
    if len(kinds) != len(layers) or set(kinds) - allowed:
        needed = f"{' or '.join(map(repr, sorted(allowed)))} for each of {len(layers)} layers"
        raise _unsupported("layer_types", kinds, needed)
    if SLIDING not in kinds:
        return {"sliding_window": None, "sliding_layers": ()}
    window = values["sliding_window"] if values.get("use_sliding_window", True) else None
    if window is None:
        raise ValueError(
            "config.json: layer_types has sliding layers, but sliding_window is null or "
            "use_sliding_window is false; set the window, in tokens"
        )
    return {"sliding_window": window, "sliding_layers": tuple(kind == SLIDING for kind in kinds)}


def _written_windows(model_type: str, config: TransformerConfig) -> dict[str, Any]:
    family = FAMILIES[model_type]
    if family.slides is None:
        return {}
    if model_type in ONE_KIND:  # with layer_types transformers takes a Mistral for a Ministral
        used = {"use_sliding_window": config.sliding_window is not None}
        named = {k: x for k, x in used.items() if k in family.defaults}
        return named | {"sliding_window": config.sliding_window}
    flags = config.sliding_layers or (False,) * config.num_layers
    absent = None if model_type in OWN_WINDOW else family.defaults["sliding_window"]
    windows: dict[str, Any] = {
        "sliding_window": config.sliding_window or absent,
        "layer_types": [SLIDING if flag else FULL for flag in flags],
    }
    if "use_sliding_window" in family.defaults:  # transformers 4 reads these
        windows["use_sliding_window"] = any(flags)
        windows["max_window_layers"] = [*flags, True].index(True)
    return windows


def _rope(family: Family, values: Mapping[str, Any], head_dim: int, slides: bool) -> dict[str, Any]:
    """Return the architecture's fields of rotary positions, from either version's fields."""
    limit, theta = values["max_position_embeddings"], values["rope_theta"]
    parameters, scaling = values["rope_parameters"] or {}, values["rope_scaling"] or {}
    if "rope_local_base_freq" not in family.defaults:
        rope, where = dict(scaling or parameters), "rope_scaling" if scaling else "rope_parameters"
        theta = rope.get("rope_theta", theta if theta is not None else DEFAULTS["rope_theta"])
        fields = _apart_from_rope(family, values, rope, head_dim)
        parsed = parse_scaling(rope, f"config.json: {where}", limit)
        return {"rope_theta": float(theta), "rope_scaling": parsed, **fields}
    if parameters and not {FULL, SLIDING} & set(parameters):
        raise _unsupported("rope_parameters", parameters, f"one entry each for {FULL}, {SLIDING}")
    rope = {**(parameters.get(FULL) or {}), **scaling}
    local = parameters.get(SLIDING) or {}
    if parse_scaling(local, "config.json: rope_parameters", limit) is not None:
        raise _unsupported("rope_parameters", parameters, f"no scaling of {SLIDING}")
    local_theta = float(local.get("rope_theta", values["rope_local_base_freq"]))
    return {
        "rope_theta": float(rope.get("rope_theta", theta)),
        "rope_scaling": parse_scaling(rope, "config.json: rope_parameters", limit),
        "local_rope_theta": local_theta if slides else None,
    }


def _apart_from_rope(
    family: Family, values: Mapping[str, Any], rope: dict[str, Any], head_dim: int
) -> dict[str, Any]:
    """Take out of `rope` what only some families have there; return our fields of it."""
    fields: dict[str, Any] = {}
    if "partial_rotary_factor" in family.defaults:
        share = rope.pop("partial_rotary_factor", values["partial_rotary_factor"])
        turned = int(head_dim * share)
        fields["rotary_dim"] = None if turned == head_dim else turned
    if family.other == LINEAR:
        for of_images in ("mrope_section", "mrope_interleaved"):
            rope.pop(of_images, None)
    if "original_max_position_embeddings" in family.defaults:  # Phi-3, which had other names first
        if rope.get("rope_type", rope.get("type")) in ("su", "yarn", "longrope"):
            original = values["original_max_position_embeddings"]
            original = rope.setdefault("original_max_position_embeddings", original)
            if values["max_position_embeddings"] is not None:
                rope.setdefault("factor", values["max_position_embeddings"] / original)
            rope["rope_type"] = "longrope"
        else:
            rope.pop("original_max_position_embeddings", None)
    if "llama_4_scaling_beta" in family.defaults:
        beta = rope.pop("llama_4_scaling_beta", None)
        rope.pop("max_position_embeddings", None)
        length = rope.get("original_max_position_embeddings")
        if beta is None or length is None:
            needed = "llama_4_scaling_beta and original_max_position_embeddings"
            raise _unsupported("rope_parameters", rope, f"a dict with {needed}")
        fields["query_growth"] = QueryGrowth(beta, length)
    return fields


def _written_rope(family: Family, config: TransformerConfig) -> dict[str, Any]:
    """Return both forms: rope_parameters for transformers 5, the others for 4."""
    scaling = config.rope_scaling.to_hf() if config.rope_scaling else None
    full = {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta}
    written = {"rope_theta": config.rope_theta, "rope_scaling": scaling, "rope_parameters": full}
    if "rope_local_base_freq" in family.defaults:
        theta = config.local_rope_theta or family.defaults["rope_local_base_freq"]
        local = {"rope_type": "default", "rope_theta": theta}
        written["rope_parameters"] = {FULL: full, SLIDING: local}
        written["rope_local_base_freq"] = theta
    if "partial_rotary_factor" in family.defaults:
        share = (config.rotary_dim or config.head_dim) / config.head_dim
        written["partial_rotary_factor"] = full["partial_rotary_factor"] = share
    if "original_max_position_embeddings" in family.defaults and scaling:
        written["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    if "llama_4_scaling_beta" in family.defaults and config.query_growth is not None:
        full |= {
            "llama_4_scaling_beta": config.query_growth.beta,
            "original_max_position_embeddings": config.query_growth.length,
        }
        written["rope_scaling"] = full
    return written


def _rope_overrides(
    config: TransformerConfig, values: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the architecture's fields that the overrides `rope_scaling`, `rope_theta` replace."""
    scaling: RopeScaling | None = config.rope_scaling
    rope = changes.get("rope_scaling") or {}
    if "rope_scaling" in changes:
        scaling = parse_scaling(rope, "rope_scaling", values["max_position_embeddings"])
    theta = changes.get("rope_theta", rope.get("rope_theta", config.rope_theta))
    fields = {"rope_theta": float(theta), "rope_scaling": scaling}
    if config.latent is not None:
        fields["attention_scale"] = _latent_scale(config.head_dim, scaling)
    return fields


def _unsupported(field: str, value: object, supported: str) -> ValueError:
    return ValueError(f"config.json: {field}={value!r} is not supported; supported: {supported}")


def _check_overrides(
    changes: Mapping[str, Any], hf_config: Mapping[str, Any], model_type: str
) -> None:
    known = {*hf_config, *DEFAULTS, *FAMILIES[model_type].defaults, *SIZES.values()}
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see the model's config.json"
            raise ValueError(f"model_config_kwargs: {model_type} has no field {name!r}; {hint}")


def _check_supported(model_type: str, values: Mapping[str, Any]) -> None:
    """Reject whatever would silently give other logits than transformers'."""
    plain = FAMILIES[model_type].plain.values()
    needed = [*SIZES.values(), *plain, *(n for n in ("query_pre_attn_scalar",) if n in values)]
    missing = [name for name in needed if values.get(name) is None]
    if missing:
        raise ValueError(f"config.json of model_type {model_type!r} lacks {', '.join(missing)}")
    quantised = (values["quantization_config"] or {}).get("quant_method")
    for field, supported in SUPPORTED_VALUES.items():
        if field == "quantization_config" and (model_type, quantised) == ("gpt_oss", "mxfp4"):
            continue  # such experts are read
        if values[field] != supported and values[field] is not None:
            raise _unsupported(field, values[field], repr(supported))
    field = _activation_field(FAMILIES[model_type])
    if values[field] not in ACTIVATIONS:
        raise _unsupported(field, values[field], " or ".join(map(repr, ACTIVATIONS)))
    if model_type == "gemma3_text" and values["attn_logit_softcapping"] is not None:
        # transformers has the field and does not use it.
        raise _unsupported("attn_logit_softcapping", values["attn_logit_softcapping"], "null")
    heads = values["head_dim"], values["num_attention_heads"]
    if model_type == "helium" and heads[0] * heads[1] != values["hidden_size"]:
        found = f"{heads[0]} with num_attention_heads={heads[1]}"
        raise _unsupported("head_dim", found, "hidden_size / num_attention_heads, as in Helium")
    if model_type in WHOLE_HEADS and values["hidden_size"] % values["num_attention_heads"]:
        sizes = f"{values['hidden_size']} with num_attention_heads={values['num_attention_heads']}"
        raise _unsupported("hidden_size", sizes, f"a multiple, as {model_type} in transformers has")
