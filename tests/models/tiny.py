"""Tiny models of transformers of every family, and how far ours are from them."""

import copy
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from jaxrl.models import (
    forward,
    init_params,
    save_pretrained,
    unembed,
)
from jaxrl.models.hf import SINGLE_FILE
from jaxrl.models.linear import merge
from jaxrl.models.lora import LoraConfig, attach, select_modules
from jaxrl.models.peft_format import load_adapter, save_adapter
from jaxrl.models.weights import params_to_hf
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
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
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0],  # 8 * 0.75 dims turn, two together
    "long_factor": [1.0, 3.0, 9.0],
}
MINISTRAL3 = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
MINISTRAL3["original_max_position_embeddings"] = 12
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
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}
GRANITE4 = {
    "num_local_experts": 0,
    "shared_intermediate_size": 40,
    "layer_types": ["full_attention"] * 3,
    "mamba_n_heads": 1,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.25,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "head_dim": 6,
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
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": WINDOW,
            "layer_types": KINDS,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": LOCAL},
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.25,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "granite4": ("granitemoehybrid", GRANITE4 | {"position_embedding_type": "rope"}),
    "granite4-nope": ("granitemoehybrid", GRANITE4),
    "phi3": ("phi3", {"tie_word_embeddings": True, "sliding_window": WINDOW}),
    "phi3-longrope": (
        "phi3",
        {
            "head_dim": 8,
            "rope_parameters": LONGROPE,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 512,
        },
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {"partial_rotary_factor": 0.25}),
    "ministral": ("ministral", {"sliding_window": WINDOW, "layer_types": KINDS}),
    "ministral3": ("ministral3", {"rope_parameters": MINISTRAL3}),
    "exaone4": ("exaone4", {"sliding_window": WINDOW, "layer_types": KINDS}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "nemotron": ("nemotron", {"norm_eps": 1e-4}),
    "nemotron-bias": ("nemotron", {"attention_bias": True, "partial_rotary_factor": 0.75}),
    "arcee": ("arcee", {}),
    "seed_oss": ("seed_oss", {}),
    "helium": ("helium", {"head_dim": 8}),
    "glm4-moe": (
        "glm4_moe",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "youtu": ("youtu", LATENT),
    "youtu-plain": ("youtu", LATENT | {"q_lora_rank": None, "rope_interleave": False}),
    "deepseek-v3": (
        "deepseek_v3",
        LATENT
        | {
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "deepseek-v2": (
        "deepseek_v2",
        LATENT
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        LATENT
        | {
            "v_head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "swiglu_limit": 2.0,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
}


def random_hf_model(model_type, **fields):
    """A transformers model whose every weight matters: wide matrices, random norms and biases."""
    config = AutoConfig.for_model(model_type, **copy.deepcopy(SIZES | fields))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    by_one_more = ("gemma", "nemotron", "qwen3_next", "qwen3_5")  # they multiply by 1 + scale
    centered = any(part in model_type for part in by_one_more)
    # the delta rule makes more of the last bits of its parameters
    width = 0.18 if "linear_num_key_heads" in fields else 0.25
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                center = 0.0 if centered and "linear_attn" not in name else 1.0
                p.uniform_(center - 0.5, center + 0.5)
            elif name.endswith("A_log"):
                p.uniform_(-3.0, 1.0)
            else:
                p.normal_(0.0, 0.5 if name.endswith(("bias", "sinks")) else width)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
    return model


# ---------------------------------------------------------------- models that see pictures

PICTURES = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
PICTURES |= {"num_hidden_layers": 1, "num_attention_heads": 2}
MULTIMODAL = {
    "gemma3": {
        "text_config": SIZES | MODELS["gemma3"][1] | {"model_type": "gemma3_text"},
        "vision_config": PICTURES | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        **{f"{name}_token_index": 57 + i for i, name in enumerate(("boi", "eoi", "image"))},
    },
    "mistral3": {
        "text_config": SIZES | {"model_type": "mistral", "sliding_window": None},
        "vision_config": PICTURES | {"model_type": "pixtral", "head_dim": 8},
        "image_token_index": 60,
        "tie_word_embeddings": False,
    },
    "qwen3_5": {
        "text_config": SIZES | HYBRID | {"model_type": "qwen3_5_text"},
        "vision_config": {
            **{"model_type": "qwen3_5_vision", "depth": 1, "hidden_size": 16, "num_heads": 2},
            **{"intermediate_size": 16, "out_hidden_size": 32, "num_position_embeddings": 16},
        },
        **{f"{name}_token_id": 57 + i for i, name in enumerate(("image", "video"))},
        **{f"vision_{name}_token_id": 59 + i for i, name in enumerate(("start", "end"))},
    },
}


def multimodal_folder(model_type, folder):
    """A model of transformers that sees pictures, and its folder; every weight matters."""
    made = AutoConfig.for_model(model_type, **copy.deepcopy(MULTIMODAL[model_type]))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(made).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-3.0, 1.0)
            elif "norm" in name and model_type == "mistral3":  # others multiply by 1 + it
                p.uniform_(0.5, 1.5)
            else:
                p.normal_(0.0, 0.18)
    model.save_pretrained(folder)
    return model


def random_tokens():
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, LENGTH))


def hf_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(random_tokens())).logits.numpy()


@functools.partial(jax.jit, static_argnums=0)
def our_logits(config, params):
    tokens = jnp.asarray(random_tokens())
    positions = jnp.tile(jnp.arange(LENGTH), (2, 1))
    hidden = forward(config, params, tokens, positions, jnp.ones_like(tokens))
    return unembed(config, params, hidden)


# ---------------------------------------------------------------- how far apart we are


def logits_apart(model, config, params):
    """The greatest difference of logits."""
    return float(np.abs(our_logits(config, params) - hf_logits(model)).max())


def gradients_apart(model, config, params, folder):
    """The greatest difference of a gradient of the mean log-prob, over the greatest of its tensor.

    What transformers saves under the names of a checkpoint are its parameters, so gradients take
    their place. Experts that no token chose have none.
    """
    tokens = random_tokens()
    model(torch.from_numpy(tokens), labels=torch.from_numpy(tokens)).loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # it is not trained
                buffer.zero_()
    model.save_pretrained(folder)
    theirs = load_file(Path(folder, SINGLE_FILE))

    def loss(params):
        log_probs = jax.nn.log_softmax(our_logits(config, params)[:, :-1])
        return -jnp.take_along_axis(log_probs, jnp.asarray(tokens)[:, 1:, None], axis=-1).mean()

    ours = dict(params_to_hf(config, jax.grad(loss)(params)))
    assert ours.keys() <= theirs.keys() | {"lm_head.weight"}
    return max(
        float(np.abs(x - theirs[name]).max() / (np.abs(theirs[name]).max() + 1e-12))
        for name, x in ours.items()
    )


def packing_apart(config, params):
    """The greatest difference of logits of rows alone and of the same rows one behind the other."""
    tokens = jnp.asarray(random_tokens()).reshape(1, -1)
    places = jnp.arange(LENGTH)
    positions, ids = jnp.tile(places, 2)[None], jnp.repeat(jnp.arange(1, 3), LENGTH)[None]
    hidden = jax.jit(forward, static_argnums=0)(config, params, tokens, positions, ids)
    together = unembed(config, params, hidden).reshape(2, LENGTH, -1)
    return float(np.abs(together - our_logits(config, params)).max())


def decoding_apart(config, params, prompt=20):
    """The greatest difference of log-probs of the engine, from those of the forward."""
    engine = NativeEngine(config, make_mesh(devices=jax.devices()[:1]))
    engine.update_weights(params, 1)
    sampling = Sampling(max_tokens=LENGTH - prompt, temperature=1.0, stop_token_ids=(1000,))
    prompts = random_tokens()[:, :prompt].tolist()
    requests = [Request(tuple(p), ((7, i),), sampling) for i, p in enumerate(prompts)]
    found = [group[0] for group in engine.generate(requests)]
    tokens = jnp.asarray([[*p, *c.tokens] for p, c in zip(prompts, found, strict=True)])
    positions = jnp.tile(jnp.arange(LENGTH), (2, 1))
    hidden = jax.jit(forward, static_argnums=0)(
        config, params, tokens, positions, jnp.ones_like(tokens)
    )
    log_probs = jax.nn.log_softmax(unembed(config, params, hidden)[:, :-1])
    forwards = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    return float(np.abs(forwards[:, prompt - 1 :] - np.array([c.log_probs for c in found])).max())


def export_apart(config, params, model, folder):
    """The greatest difference of the logits of an export that transformers loads."""
    save_pretrained(folder, config, params, overwrite=True)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return float(np.abs(hf_logits(again) - hf_logits(model)).max())


def lora_apart(config, params, folder):
    """The greatest difference of what an adapter's folder adds to a checkpoint, from ours.

    Theirs is W + alpha / r B A of each tensor, with its own r and alpha.
    """
    lora = LoraConfig(config, select_modules(config, "all-linear"), rank=4, alpha=8)
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(
        lambda x: np.asarray(x) + np.float32(0.1) * rng.standard_normal(x.shape, np.float32),
        init_params(lora, 0),
    )
    save_adapter(folder, lora, adapters, base="base", overwrite=True)
    again, loaded = load_adapter(folder, config)
    assert again == LoraConfig(config, lora.modules, rank=4, alpha=8)
    jax.tree.map(np.testing.assert_array_equal, loaded, adapters)
    merged = dict(params_to_hf(config, merge(attach(lora, params, adapters))))
    tensors = load_file(Path(folder, "adapter_model.safetensors"))
    apart, changed = 0.0, set()
    for name, x in params_to_hf(config, params):
        key = f"base_model.model.{name.removesuffix('.weight')}.lora"
        wanted = x
        if f"{key}_A.weight" in tensors:
            wanted = x + 2 * tensors[f"{key}_B.weight"] @ tensors[f"{key}_A.weight"]
            changed |= {f"{key}_A.weight", f"{key}_B.weight"}
        apart = max(apart, float(np.abs(merged[name] - wanted).max()))
    assert changed == tensors.keys()
    return apart
