"""Llama, Qwen2 and Qwen3: their Hugging Face configs and weight names, and ours.

Everything that differs between our stacked parameters and a Hugging Face checkpoint is in
`WEIGHTS`; both directions read that one table. Shape legend: see `transformer.py`.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.models.transformer import Params, ParamSpec, TransformerConfig, is_spec, param_specs

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SIZES = {  # ours -> Hugging Face; a config.json must have them all
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
# Fields that change the forward, and the only value of each that `transformer.py` computes.
SUPPORTED_VALUES = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
}
# Defaults of transformers' config classes for absent fields; None = derived from the other sizes.
DEFAULT_KV_HEADS = {"llama": None, "qwen2": 32, "qwen3": 32}
DEFAULT_HEAD_DIM = {"llama": None, "qwen2": None, "qwen3": 128}
DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_RMS_NORM_EPS = 1e-6

DimGroups = tuple[tuple[int, ...], ...]


class HFWeight(NamedTuple):
    """Where one parameter lies in a Hugging Face checkpoint.

    `name` holds "{i}" for the layer number if the leaf is stacked. `dims[j]` lists the dims of our
    (unstacked) array that are flattened, in this order, into dim j of theirs.
    """

    name: str
    dims: DimGroups


# A Hugging Face Linear is [out, in]; ours lead with the input.
VECTOR: DimGroups = ((0,),)
TABLE: DimGroups = ((0,), (1,))
LINEAR: DimGroups = ((1,), (0,))
TO_HEADS: DimGroups = ((1, 2), (0,))  # [D, H, h] -> [H * h, D]
FROM_HEADS: DimGroups = ((2,), (0, 1))  # [H, h, D] -> [D, H * h]
HEAD_BIAS: DimGroups = ((0, 1),)  # [H, h] -> [H * h]

WEIGHTS = {
    "embed": HFWeight("model.embed_tokens.weight", TABLE),
    "attn_norm": HFWeight("model.layers.{i}.input_layernorm.weight", VECTOR),
    "wq": HFWeight("model.layers.{i}.self_attn.q_proj.weight", TO_HEADS),
    "wk": HFWeight("model.layers.{i}.self_attn.k_proj.weight", TO_HEADS),
    "wv": HFWeight("model.layers.{i}.self_attn.v_proj.weight", TO_HEADS),
    "bq": HFWeight("model.layers.{i}.self_attn.q_proj.bias", HEAD_BIAS),
    "bk": HFWeight("model.layers.{i}.self_attn.k_proj.bias", HEAD_BIAS),
    "bv": HFWeight("model.layers.{i}.self_attn.v_proj.bias", HEAD_BIAS),
    "q_norm": HFWeight("model.layers.{i}.self_attn.q_norm.weight", VECTOR),
    "k_norm": HFWeight("model.layers.{i}.self_attn.k_norm.weight", VECTOR),
    "wo": HFWeight("model.layers.{i}.self_attn.o_proj.weight", FROM_HEADS),
    "mlp_norm": HFWeight("model.layers.{i}.post_attention_layernorm.weight", VECTOR),
    "w_gate": HFWeight("model.layers.{i}.mlp.gate_proj.weight", LINEAR),
    "w_up": HFWeight("model.layers.{i}.mlp.up_proj.weight", LINEAR),
    "w_down": HFWeight("model.layers.{i}.mlp.down_proj.weight", LINEAR),
    "final_norm": HFWeight("model.norm.weight", VECTOR),
    "unembed": HFWeight("lm_head.weight", LINEAR),
}


def config_from_hf(hf_config: dict[str, Any]) -> TransformerConfig:
    """The architecture that a Hugging Face config.json describes.

    Absent fields get the default of the family's config class in transformers; the five sizes of
    `SIZES` must be there.

    Raises:
        ValueError: a model type or feature that the forward does not compute, or a missing size;
            names the field, its value and what is supported.
    """
    model_type = hf_config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise _unsupported("model_type", model_type, " or ".join(map(repr, MODEL_TYPES)))
    _check_supported(hf_config)
    missing = [name for name in SIZES.values() if hf_config.get(name) is None]
    if missing:
        raise ValueError(f"config.json of model_type {model_type!r} lacks {', '.join(missing)}")
    sizes = {ours: hf_config[theirs] for ours, theirs in SIZES.items()}
    kv_heads = hf_config.get("num_key_value_heads", DEFAULT_KV_HEADS[model_type])
    head_dim = hf_config.get("head_dim", DEFAULT_HEAD_DIM[model_type])
    return TransformerConfig(
        **sizes,
        num_kv_heads=sizes["num_heads"] if kv_heads is None else kv_heads,
        head_dim=sizes["hidden_size"] // sizes["num_heads"] if head_dim is None else head_dim,
        rope_theta=_rope_theta(hf_config),
        rms_norm_eps=hf_config.get("rms_norm_eps", DEFAULT_RMS_NORM_EPS),
        tie_embeddings=hf_config.get("tie_word_embeddings", False),
        attention_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        initializer_range=hf_config.get("initializer_range", 0.02),
    )


def config_to_hf(
    config: TransformerConfig, *, max_position_embeddings: int = 32_768
) -> dict[str, Any]:
    """A config.json for transformers.

    The family is qwen3 with `qk_norm`, qwen2 with `attention_bias`, else llama. Token ids are
    null here: the config classes' own defaults belong to other tokenizers.

    Args:
        max_position_embeddings: context length that serving engines read; the forward has no limit.

    Raises:
        ValueError: no family has this combination of features or sizes.
    """
    c = config
    if c.qk_norm and c.attention_bias:
        raise ValueError("qk_norm=True with attention_bias=True: no Hugging Face family has both")
    model_type = "qwen3" if c.qk_norm else "qwen2" if c.attention_bias else "llama"
    if model_type == "llama" and c.hidden_size % c.num_heads:
        raise ValueError(
            f"hidden_size={c.hidden_size} is not a multiple of num_heads={c.num_heads}, which "
            "transformers' LlamaConfig requires; change one of them or set qk_norm=True (qwen3)"
        )
    return {
        "model_type": model_type,
        "architectures": [MODEL_TYPES[model_type]],
        **{theirs: getattr(c, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "rope_theta": c.rope_theta,  # read by transformers 4
        "tie_word_embeddings": c.tie_embeddings,
        "attention_bias": c.attention_bias,
        "initializer_range": c.initializer_range,
        "max_position_embeddings": max_position_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
    }


def weight_map(config: TransformerConfig) -> Params:
    """Tree of `HFWeight`, parallel to the parameters."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: WEIGHTS[path[-1].key], param_specs(config), is_leaf=is_spec
    )


def layer_names(weight: HFWeight, num_layers: int) -> list[str]:
    """The tensors behind one leaf: one per layer, or a single one for an unstacked leaf."""
    if "{i}" not in weight.name:
        return [weight.name]
    return [weight.name.format(i=i) for i in range(num_layers)]


def layer_shape(weight: HFWeight, spec: ParamSpec) -> tuple[int, ...]:
    """Our shape of one layer's part of a leaf."""
    return spec.shape[1:] if "{i}" in weight.name else spec.shape


def hf_shape(weight: HFWeight, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Their shape of an array that has shape `shape` on our side."""
    return tuple(math.prod(shape[d] for d in group) for group in weight.dims)


def to_hf(weight: HFWeight, x: np.ndarray) -> np.ndarray:
    """One layer's array in the Hugging Face layout, C-contiguous."""
    order = [d for group in weight.dims for d in group]
    return np.ascontiguousarray(x.transpose(order).reshape(hf_shape(weight, x.shape)))


def from_hf(weight: HFWeight, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Inverse of `to_hf`: a view of `x` with our shape `shape` of one layer."""
    order = [d for group in weight.dims for d in group]
    return x.reshape([shape[d] for d in order]).transpose(np.argsort(order))


def hf_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the Hugging Face checkpoint."""
    weights, treedef = jax.tree.flatten(weight_map(config), is_leaf=_is_weight)
    specs = treedef.flatten_up_to(param_specs(config))
    return {
        name: hf_shape(weight, layer_shape(weight, spec))
        for weight, spec in zip(weights, specs, strict=True)
        for name in layer_names(weight, config.num_layers)
    }


def params_to_hf(config: TransformerConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor under its Hugging Face name, in the dtype of the parameters, leaf by leaf."""
    weights, treedef = jax.tree.flatten(weight_map(config), is_leaf=_is_weight)
    for weight, leaf in zip(weights, treedef.flatten_up_to(params), strict=True):
        host = np.asarray(leaf)
        names = layer_names(weight, config.num_layers)
        layers = host if "{i}" in weight.name else host[None]
        for name, x in zip(names, layers, strict=True):
            yield name, to_hf(weight, x)


def _is_weight(x: object) -> bool:
    return isinstance(x, HFWeight)


def _unsupported(field: str, value: object, supported: str) -> ValueError:
    return ValueError(f"config.json: {field}={value!r} is not supported; supported: {supported}")


def _check_supported(hf_config: dict[str, Any]) -> None:
    """Reject whatever would silently give other logits than transformers'."""
    for field, supported in SUPPORTED_VALUES.items():
        value = hf_config.get(field, supported)
        if value != supported:
            raise _unsupported(field, value, repr(supported))
    if hf_config["model_type"] != "qwen2" and hf_config.get("attention_bias"):
        # It adds a bias to o_proj too; Qwen2 has none there and ignores the field.
        raise _unsupported("attention_bias", True, "False (or model_type 'qwen2')")
    layer_types = hf_config.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise _unsupported("layer_types", layer_types, "'full_attention' in every layer")


def _rope_theta(hf_config: dict[str, Any]) -> float:
    """rope_theta of transformers 5 (inside rope_parameters) or 4 (at top level)."""
    field = "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
    rope = hf_config.get(field) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0))
    if kind != "default" or partial != 1.0:
        raise _unsupported(field, rope, "null or rope_type 'default' on the whole head")
    return float(rope.get("rope_theta", hf_config.get("rope_theta", DEFAULT_ROPE_THETA)))
