"""Weight names and layouts of Hugging Face checkpoints, and ours.

Everything that differs between our stacked parameters and a Hugging Face checkpoint is in
`WEIGHTS`; both directions read that one table. Shape legend: see `transformer.py`.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.models.architecture import by_kind, joined, layer_stacks
from jaxrl.models.transformer import Params, ParamSpec, TransformerConfig, param_specs
from jaxrl.parallel.processes import fetch

DimGroups = tuple[tuple[int, ...], ...]


class HFWeight(NamedTuple):
    """Describe where one parameter lies in a Hugging Face checkpoint.

    `name` holds "{i}" for the number of the layer if the leaf is stacked, and "{e}" for that of the
    expert if experts are stacked in it, too. `dims[j]` lists the dims of our (unstacked) array that
    are flattened, in this order, into dim j of theirs.
    """

    name: str
    dims: DimGroups
    layers: tuple[int, ...] = ()  # numbers of the stack's
    experts: int = 0

    @property
    def stack(self) -> tuple[int, ...]:
        """Return the leading dims of our leaf along which their tensors lie apart."""
        return tuple(n for n in (len(self.layers), self.experts) if n)


# A Hugging Face Linear is [out, in]; ours lead with the input.
VECTOR: DimGroups = ((0,),)
TABLE: DimGroups = ((0,), (1,))
LINEAR: DimGroups = ((1,), (0,))
TO_HEADS: DimGroups = ((1, 2), (0,))  # [D, H, h] -> [H * h, D]
FROM_HEADS: DimGroups = ((2,), (0, 1))  # [H, h, D] -> [D, H * h]
HEAD_BIAS: DimGroups = ((0, 1),)  # [H, h] -> [H * h]
KERNEL: DimGroups = ((0,), (), (1,))  # [C, W] -> [C, 1, W]

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
    "bo": HFWeight("model.layers.{i}.self_attn.o_proj.bias", VECTOR),
    "router": HFWeight("model.layers.{i}.mlp.gate.weight", LINEAR),
    "experts_gate": HFWeight("model.layers.{i}.mlp.experts.{e}.gate_proj.weight", LINEAR),
    "experts_up": HFWeight("model.layers.{i}.mlp.experts.{e}.up_proj.weight", LINEAR),
    "experts_down": HFWeight("model.layers.{i}.mlp.experts.{e}.down_proj.weight", LINEAR),
    "shared_gate": HFWeight("model.layers.{i}.mlp.shared_expert.gate_proj.weight", LINEAR),
    "shared_up": HFWeight("model.layers.{i}.mlp.shared_expert.up_proj.weight", LINEAR),
    "shared_down": HFWeight("model.layers.{i}.mlp.shared_expert.down_proj.weight", LINEAR),
    "shared_router": HFWeight("model.layers.{i}.mlp.shared_expert_gate.weight", LINEAR),
    "final_norm": HFWeight("model.norm.weight", VECTOR),
    "unembed": HFWeight("lm_head.weight", LINEAR),
    "delta_qkvz": HFWeight("model.layers.{i}.linear_attn.in_proj_qkvz.weight", TO_HEADS),
    "delta_ba": HFWeight("model.layers.{i}.linear_attn.in_proj_ba.weight", TO_HEADS),
    "delta_qkv": HFWeight("model.layers.{i}.linear_attn.in_proj_qkv.weight", LINEAR),
    "delta_gate": HFWeight("model.layers.{i}.linear_attn.in_proj_z.weight", TO_HEADS),
    "delta_strength": HFWeight("model.layers.{i}.linear_attn.in_proj_b.weight", LINEAR),
    "delta_decay": HFWeight("model.layers.{i}.linear_attn.in_proj_a.weight", LINEAR),
    "delta_kernel": HFWeight("model.layers.{i}.linear_attn.conv1d.weight", KERNEL),
    "delta_rate": HFWeight("model.layers.{i}.linear_attn.A_log", VECTOR),
    "delta_bias": HFWeight("model.layers.{i}.linear_attn.dt_bias", VECTOR),
    "delta_norm": HFWeight("model.layers.{i}.linear_attn.norm.weight", VECTOR),
    "delta_out": HFWeight("model.layers.{i}.linear_attn.out_proj.weight", FROM_HEADS),
}
LFM2_WEIGHTS = WEIGHTS | {
    "attn_norm": HFWeight("model.layers.{i}.operator_norm.weight", VECTOR),
    "q_norm": HFWeight("model.layers.{i}.self_attn.q_layernorm.weight", VECTOR),
    "k_norm": HFWeight("model.layers.{i}.self_attn.k_layernorm.weight", VECTOR),
    "wo": HFWeight("model.layers.{i}.self_attn.out_proj.weight", FROM_HEADS),
    "mlp_norm": HFWeight("model.layers.{i}.ffn_norm.weight", VECTOR),
    "w_gate": HFWeight("model.layers.{i}.feed_forward.w1.weight", LINEAR),
    "w_up": HFWeight("model.layers.{i}.feed_forward.w3.weight", LINEAR),
    "w_down": HFWeight("model.layers.{i}.feed_forward.w2.weight", LINEAR),
    "conv_in": HFWeight("model.layers.{i}.conv.in_proj.weight", LINEAR),
    "conv_in_bias": HFWeight("model.layers.{i}.conv.in_proj.bias", VECTOR),
    "conv_kernel": HFWeight("model.layers.{i}.conv.conv.weight", KERNEL),
    "conv_kernel_bias": HFWeight("model.layers.{i}.conv.conv.bias", VECTOR),
    "conv_out": HFWeight("model.layers.{i}.conv.out_proj.weight", LINEAR),
    "conv_out_bias": HFWeight("model.layers.{i}.conv.out_proj.bias", VECTOR),
    "final_norm": HFWeight("model.embedding_norm.weight", VECTOR),
}
# With norms on both sides the name of Llama's norm before the MLP means the one after attention.
POST_NORM_WEIGHTS = WEIGHTS | {
    "attn_post_norm": HFWeight("model.layers.{i}.post_attention_layernorm.weight", VECTOR),
    "mlp_norm": HFWeight("model.layers.{i}.pre_feedforward_layernorm.weight", VECTOR),
    "mlp_post_norm": HFWeight("model.layers.{i}.post_feedforward_layernorm.weight", VECTOR),
}


_MIXTRAL = "model.layers.{i}.block_sparse_moe"
EXPERT_WEIGHTS = {  # by `Experts.names`
    "qwen": {},
    "mixtral": {
        "router": HFWeight(f"{_MIXTRAL}.gate.weight", LINEAR),
        "experts_gate": HFWeight(f"{_MIXTRAL}.experts.{{e}}.w1.weight", LINEAR),
        "experts_up": HFWeight(f"{_MIXTRAL}.experts.{{e}}.w3.weight", LINEAR),
        "experts_down": HFWeight(f"{_MIXTRAL}.experts.{{e}}.w2.weight", LINEAR),
    },
}


def weight_map(config: TransformerConfig) -> Params:
    """Return a tree of `HFWeight`, parallel to the parameters."""
    table = POST_NORM_WEIGHTS if config.post_norms else WEIGHTS
    if config.convolution is not None:
        table = LFM2_WEIGHTS
    if config.qk_norm == "whole":
        table = table | {
            name: table[name]._replace(dims=HEAD_BIAS) for name in ("q_norm", "k_norm")
        }
    if config.experts is not None:
        table = {
            name: weight._replace(experts=config.experts.count) if "{e}" in weight.name else weight
            for name, weight in (table | EXPERT_WEIGHTS[config.experts.names]).items()
        }
    table = table | {"value_head": HFWeight(f"{config.value_head}.weight", LINEAR)}
    specs = param_specs(config)
    of_kind = by_kind(config, specs["layers"])
    stacks = {
        kind: {name: table[name]._replace(layers=numbers) for name in of_kind[kind]}
        for kind, numbers in layer_stacks(config)
    }
    return {name: table[name] for name in specs if name != "layers"} | {"layers": joined(stacks)}


def tensor_names(weight: HFWeight) -> list[str]:
    """Name the tensors behind one leaf: one per layer and expert, in the order of its stack."""
    layers, experts = weight.layers or (0,), range(weight.experts or 1)
    return [weight.name.format(i=i, e=e) for i in layers for e in experts]


def tensor_shape(weight: HFWeight, spec: ParamSpec) -> tuple[int, ...]:
    """Return our shape of the part of a leaf that is one tensor."""
    return spec.shape[len(weight.stack) :]


def hf_shape(weight: HFWeight, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the Hugging Face shape of an array that has shape `shape` on our side."""
    return tuple(math.prod(shape[d] for d in group) for group in weight.dims)


def to_hf(weight: HFWeight, x: np.ndarray) -> np.ndarray:
    """Return one layer's array in the Hugging Face layout, C-contiguous."""
    order = [d for group in weight.dims for d in group]
    return np.ascontiguousarray(x.transpose(order).reshape(hf_shape(weight, x.shape)))


def from_hf(weight: HFWeight, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Undo `to_hf`: return a view of `x` with our shape `shape` of one layer."""
    order = [d for group in weight.dims for d in group]
    return x.reshape([shape[d] for d in order]).transpose(np.argsort(order))


def read_part(
    weight: HFWeight, stored: Any, shape: tuple[int, ...], index: tuple[slice, ...]
) -> np.ndarray:
    """Read `index` of one layer's array in our layout, of their tensor no more than it must.

    Of dims that are flattened together only the first is cut in the file, the others in memory.

    Args:
        stored: their tensor; anything that takes slices, such as safetensors' `get_slice`.
        shape: our shape of the whole array.
    """
    cut = list(shape)
    rows, rest = [], [slice(None)] * len(shape)
    for group in weight.dims:
        if not group:  # a dim of size 1
            rows.append(slice(None))
            continue
        first, *others = group
        start, stop, _ = index[first].indices(shape[first])
        inner = math.prod(shape[d] for d in others)
        rows.append(slice(start * inner, stop * inner))
        cut[first] = stop - start
        for d in others:
            rest[d] = index[d]
    return from_hf(weight, stored[tuple(rows)], tuple(cut))[tuple(rest)]


def hf_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of the Hugging Face checkpoint."""
    weights, treedef = jax.tree.flatten(weight_map(config), is_leaf=is_weight)
    specs = treedef.flatten_up_to(param_specs(config))
    return {
        name: hf_shape(weight, tensor_shape(weight, spec))
        for weight, spec in zip(weights, specs, strict=True)
        for name in tensor_names(weight)
    }


def params_to_hf(config: TransformerConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor under its Hugging Face name, in the dtype of the parameters, leaf by leaf.

    A collective where they span processes; then it goes layer by layer, for what is fetched is
    whole on every device first.
    """
    weights, treedef = jax.tree.flatten(weight_map(config), is_leaf=is_weight)
    for weight, leaf in zip(weights, treedef.flatten_up_to(params), strict=True):
        names = iter(tensor_names(weight))
        for layer in _layers(leaf) if weight.layers else [fetch(leaf)]:
            for x in layer if weight.experts else [layer]:
                yield next(names), to_hf(weight, x)


def _layers(leaf: jax.Array | np.ndarray) -> Iterator[np.ndarray]:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        yield from (fetch(_layer(leaf, i)) for i in range(len(leaf)))
    else:
        yield from fetch(leaf)


@jax.jit
def _layer(leaf: jax.Array, i: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False)


def is_weight(x: object) -> bool:
    """Return whether `x` is a leaf of `weight_map`.

    An `HFWeight` is a tuple, hence itself a pytree.
    """
    return isinstance(x, HFWeight)
