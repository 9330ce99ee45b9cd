"""The same logits as transformers both ways, for every family and rope type."""

import copy
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from jaxrl.models import (
    config_from_hf,
    forward,
    init_params,
    load_config,
    load_params,
    save_pretrained,
    unembed,
)
from jaxrl.models.hf import SINGLE_FILE

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
}
LENGTH, WINDOW = 48, 16
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
YARN["original_max_position_embeddings"] = 64
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
GLOBAL = {"rope_type": "default", "rope_theta": 1e4}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
GEMMA = {"query_pre_attn_scalar": 24, "sliding_window": WINDOW}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 40}
HYBRID = {
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}
CONVOLUTIONS = {
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 16,
    "head_dim": 8,
    "norm_eps": 1e-5,
}
MODELS = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", WINDOWS),
    "qwen2-yarn": (
        "qwen2",
        {"rope_parameters": {**YARN, "beta_fast": 8, "beta_slow": 2, "attention_factor": 1.3}},
    ),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-window": ("qwen3", {**WINDOWS, "layer_types": KINDS, "rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None, "rope_parameters": LLAMA3}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": ("gemma2", {**GEMMA, **CAPS}),
    "gemma2-linear": ("gemma2", {**GEMMA, "rope_parameters": LINEAR}),
    "gemma3": (
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": KINDS,
            "rope_parameters": {"full_attention": GLOBAL, "sliding_attention": LOCAL},
        },
    ),
    "gemma3-linear": (
        "gemma3_text",
        {
            **GEMMA,
            "final_logit_softcapping": 6.0,
            "layer_types": KINDS,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL},
        },
    ),
    "gemma3-full": ("gemma3_text", {**GEMMA, "layer_types": ["full_attention"] * 3}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-dense-first": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0]}),
    "qwen3-moe-every-other": ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2}),
    "qwen3-moe-window": (
        "qwen3_moe",
        {**EXPERTS, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "qwen2-moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}),
    "qwen3-next": ("qwen3_next", HYBRID | EXPERTS | SHARED),
    "qwen3-next-dense-first": ("qwen3_next", HYBRID | EXPERTS | SHARED | {"mlp_only_layers": [0]}),
    "qwen3.5": ("qwen3_5_text", HYBRID),
    "qwen3.5-moe": ("qwen3_5_moe_text", HYBRID | EXPERTS | SHARED),
    "lfm2": ("lfm2", CONVOLUTIONS),
    "lfm2-bias": ("lfm2", CONVOLUTIONS | {"conv_bias": True, "block_auto_adjust_ff_dim": False}),
}


def random_hf_model(model_type, **fields):
    """A transformers model whose every weight matters: wide matrices, random norms and biases."""
    config = AutoConfig.for_model(model_type, **copy.deepcopy(SIZES | fields))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    # Gemma's multiply by 1 + scale
    centered = any(part in model_type for part in ("gemma", "qwen3_next", "qwen3_5"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                center = 0.0 if centered and "linear_attn" not in name else 1.0
                p.uniform_(center - 0.5, center + 0.5)
            elif name.endswith("A_log"):
                p.uniform_(-3.0, 1.0)
            else:
                p.normal_(0.0, 0.5 if name.endswith("bias") else 0.25)
    return model


def random_tokens():
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, LENGTH))


def hf_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(random_tokens())).logits.numpy()


@partial(jax.jit, static_argnums=0)
def our_logits(config, params):
    tokens = jnp.asarray(random_tokens())
    positions = jnp.tile(jnp.arange(LENGTH), (2, 1))
    hidden = forward(config, params, tokens, positions, jnp.ones_like(tokens))
    return unembed(config, params, hidden)


def assert_same_logits(ours, theirs):
    assert np.std(theirs) > 1  # else the tolerance would mean little
    assert np.max(np.abs(np.asarray(ours) - theirs)) < 1e-4


@pytest.mark.parametrize("name", MODELS)
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
    assert type(again) is type(model) or name == "mistral"  # without a window: a Llama
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
