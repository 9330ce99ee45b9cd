"""Weight names and layouts of Hugging Face checkpoints, and ours.

Everything that differs between our stacked parameters and a Hugging Face checkpoint is in
`WEIGHTS`; both directions read that one table. Shape legend: see `transformer.py`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.models.architecture import by_kind, joined, layer_stacks
from jaxrl.models.transformer import Params, ParamSpec, TransformerConfig, param_specs
from jaxrl.parallel.processes import fetch

DimGroups = tuple[tuple[int, ...], ...]


class Part(NamedTuple):
    """Say what a leaf of ours is of a dim of their tensor, which several leaves share.

    Those of `size` places that begin at `start` and are `step` apart.
    """

    dim: int
    start: int
    size: int
    step: int = 1


class HFWeight(NamedTuple):
    """Describe where one parameter lies in a Hugging Face checkpoint.

    `name` holds "{i}" for the number of the layer if the leaf is stacked, "{e}" for that of the
    expert if experts are stacked in it, too, and "{end}" for one of `ends` if these are. `dims[j]`
    lists the dims of our (unstacked) array that are flattened, in this order, into dim j of theirs.
    """

    name: str
    dims: DimGroups
    layers: tuple[int, ...] = ()  # numbers of the stack's
    experts: int = 0
    ends: tuple[str, ...] = ()
    part: Part | None = None  # None: the tensor is this leaf's alone

    @property
    def stack(self) -> tuple[int, ...]:
        """Return the leading dims of our leaf along which their tensors lie apart."""
        return tuple(n for n in (len(self.layers), self.experts, len(self.ends)) if n)


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


def _joined_rows(name: str, **rows: int) -> dict[str, HFWeight]:
    """Return leaves whose matrices lie one below the other in one tensor, by their rows there."""
    starts, size = np.cumsum([0, *rows.values()]), sum(rows.values())
    return {
        leaf: WEIGHTS[leaf]._replace(name=name, part=Part(0, int(start), size))
        for leaf, start in zip(rows, starts, strict=False)
    }


def _gate_up(c: TransformerConfig) -> dict[str, HFWeight]:
    name = "model.layers.{i}.mlp.gate_up_proj.weight"
    return _joined_rows(name, w_gate=c.intermediate_size, w_up=c.intermediate_size)


def _granite4(c: TransformerConfig) -> dict[str, HFWeight]:
    mlp, width = "model.layers.{i}.shared_mlp", c.intermediate_size
    both = _joined_rows(f"{mlp}.input_linear.weight", w_gate=width, w_up=width)
    return both | {"w_down": HFWeight(f"{mlp}.output_linear.weight", LINEAR)}


def _phi3(c: TransformerConfig) -> dict[str, HFWeight]:
    name, key = "model.layers.{i}.self_attn.qkv_proj.weight", c.num_kv_heads * c.head_dim
    return _gate_up(c) | _joined_rows(name, wq=c.num_heads * c.head_dim, wk=key, wv=key)


def _glm4(c: TransformerConfig) -> dict[str, HFWeight]:
    names = {
        "attn_post_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    }
    norms = {k: HFWeight(f"model.layers.{{i}}.{v}.weight", VECTOR) for k, v in names.items()}
    return _gate_up(c) | norms


def _glm4_moe(_: TransformerConfig) -> dict[str, HFWeight]:
    mlp = "model.layers.{i}.mlp"
    bias = HFWeight(f"{mlp}.gate.e_score_correction_bias", VECTOR)
    return {"router_bias": bias} | {
        f"shared_{part}": HFWeight(f"{mlp}.shared_experts.{part}_proj.weight", LINEAR)
        for part in ("gate", "up", "down")
    }


def _latent(c: TransformerConfig) -> dict[str, HFWeight]:
    attention = "model.layers.{i}.self_attn"
    return _glm4_moe(c) | {
        "wq_down": HFWeight(f"{attention}.q_a_proj.weight", LINEAR),
        "q_norm": HFWeight(f"{attention}.q_a_layernorm.weight", VECTOR),
        "wq_up": HFWeight(f"{attention}.q_b_proj.weight", TO_HEADS),
        "wkv_down": HFWeight(f"{attention}.kv_a_proj_with_mqa.weight", LINEAR),
        "kv_norm": HFWeight(f"{attention}.kv_a_layernorm.weight", VECTOR),
        "wkv_up": HFWeight(f"{attention}.kv_b_proj.weight", TO_HEADS),
    }


def _gpt_oss(c: TransformerConfig) -> dict[str, HFWeight]:
    """Return the experts of all numbers in one tensor, gate and up in turns."""
    assert c.experts is not None
    mlp, both = "model.layers.{i}.mlp", 2 * c.experts.width
    stacked: DimGroups = ((0,), (1,), (2,))
    table = {
        "sinks": HFWeight("model.layers.{i}.self_attn.sinks", VECTOR),
        "router": HFWeight(f"{mlp}.router.weight", LINEAR),
        "router_offset": HFWeight(f"{mlp}.router.bias", VECTOR),
        "experts_down": HFWeight(f"{mlp}.experts.down_proj", stacked),
        "experts_down_bias": HFWeight(f"{mlp}.experts.down_proj_bias", TABLE),
    }
    for start, leaf in enumerate(("experts_gate", "experts_up")):
        name, part = f"{mlp}.experts.gate_up_proj", Part(2, start, both, step=2)
        table[leaf] = HFWeight(name, stacked, part=part)
        table[f"{leaf}_bias"] = HFWeight(f"{name}_bias", TABLE, part=part._replace(dim=1))
    return table


def _stacked_experts(c: TransformerConfig) -> dict[str, HFWeight]:
    """Return the experts of all numbers in one tensor, as transformers 5 has them in memory."""
    assert c.experts is not None
    mlp, width = "model.layers.{i}.mlp.experts", c.experts.width
    stacked: DimGroups = ((0,), (2,), (1,))  # [E, in, out] -> [E, out, in]
    table = {"experts_down": HFWeight(f"{mlp}.down_proj", stacked)}
    for number, leaf in enumerate(("experts_gate", "experts_up")):
        part = Part(1, number * width, 2 * width)
        table[leaf] = HFWeight(f"{mlp}.gate_up_proj", stacked, part=part)
    return table


# By `TransformerConfig.names`: what lies elsewhere than in a Llama.
NAMES: dict[str, Callable[[TransformerConfig], dict[str, HFWeight]]] = {
    "llama": lambda _: {},
    "granite4": _granite4,
    "phi3": _phi3,
    "glm": _gate_up,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "latent": _latent,
}


def weight_map(config: TransformerConfig, stacked_experts: bool = False) -> Params:
    """Return a tree of `HFWeight`, parallel to the parameters.

    Args:
        stacked_experts: of a checkpoint that holds the experts of a layer in one tensor, although
            most of its family do not.
    """
    table = POST_NORM_WEIGHTS if config.post_norms else WEIGHTS
    if config.convolution is not None:
        table = LFM2_WEIGHTS
    table = table | NAMES[config.names](config)
    if config.layer_norm:
        both = {"ends": ("weight", "bias")}
        table = table | {
            name: weight._replace(name=weight.name.removesuffix("weight") + "{end}", **both)
            for name, weight in table.items()
            if name.endswith("_norm") and name not in ("q_norm", "k_norm")
        }
    if config.qk_norm == "whole":
        table = table | {
            name: table[name]._replace(dims=HEAD_BIAS) for name in ("q_norm", "k_norm")
        }
    if config.experts is not None:
        table = {
            name: weight._replace(experts=config.experts.count) if "{e}" in weight.name else weight
            for name, weight in (table | EXPERT_WEIGHTS[config.experts.names]).items()
        }
    if stacked_experts:
        table = table | _stacked_experts(config)
    table = table | {"value_head": HFWeight(f"{config.value_head}.weight", LINEAR)}
    specs = param_specs(config)
    of_kind = by_kind(config, specs["layers"])
    stacks = {
        kind: {name: table[name]._replace(layers=numbers) for name in of_kind[kind]}
        for kind, numbers in layer_stacks(config)
    }
    return {name: table[name] for name in specs if name != "layers"} | {"layers": joined(stacks)}


def tensor_names(weight: HFWeight) -> list[str]:
    """Name the tensors behind one leaf, in the order of its stack."""
    layers, experts, ends = weight.layers or (0,), range(weight.experts or 1), weight.ends or ("",)
    return [weight.name.format(i=i, e=e, end=end) for i in layers for e in experts for end in ends]


def tensor_shape(weight: HFWeight, spec: ParamSpec) -> tuple[int, ...]:
    """Return our shape of the part of a leaf that is one tensor."""
    return spec.shape[len(weight.stack) :]


def hf_shape(weight: HFWeight, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the Hugging Face shape of an array that has shape `shape` on our side.

    Of a part, it is the part's.
    """
    return tuple(math.prod(shape[d] for d in group) for group in weight.dims)


def whole_shape(weight: HFWeight, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of their tensor, of which an array of shape `shape` may be a part."""
    whole = list(hf_shape(weight, shape))
    if weight.part is not None:
        whole[weight.part.dim] = weight.part.size
    return tuple(whole)


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
    if (part := weight.part) is None:
        found = stored[tuple(rows)]
    else:
        of_part = rows[part.dim]
        first, last = (part.start + part.step * x for x in (of_part.start, of_part.stop - 1))
        rows[part.dim] = slice(first, last + 1)
        found = stored[tuple(rows)][(slice(None),) * part.dim + (slice(None, None, part.step),)]
    return from_hf(weight, found, tuple(cut))[tuple(rest)]


def hf_shapes(
    config: TransformerConfig, stacked_experts: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of the Hugging Face checkpoint."""
    weights, treedef = jax.tree.flatten(weight_map(config, stacked_experts), is_leaf=is_weight)
    specs = treedef.flatten_up_to(param_specs(config))
    return {
        name: whole_shape(weight, tensor_shape(weight, spec))
        for weight, spec in zip(weights, specs, strict=True)
        for name in tensor_names(weight)
    }


def params_to_hf(
    config: TransformerConfig, params: Params, stacked_experts: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor under its Hugging Face name, in the dtype of the parameters, leaf by leaf.

    A collective where they span processes; then it goes layer by layer, for what is fetched is
    whole on every device first.
    """
    weights, treedef = jax.tree.flatten(weight_map(config, stacked_experts), is_leaf=is_weight)
    sharing: dict[tuple, list[tuple[HFWeight, Any]]] = {}
    for weight, leaf in zip(weights, treedef.flatten_up_to(params), strict=True):
        sharing.setdefault((weight.name, weight.layers), []).append((weight, leaf))
    for pairs in sharing.values():
        names, parts = tensor_names(pairs[0][0]), [weight for weight, _ in pairs]
        leaves = zip(*(_unstacked(*pair) for pair in pairs), strict=True)
        for name, arrays in zip(names, leaves, strict=True):
            yield name, _put_together(parts, arrays)


def _put_together(weights: list[HFWeight], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return their tensor of the arrays of ours that it holds."""
    if weights[0].part is None:
        return to_hf(weights[0], arrays[0])
    whole = np.empty(whole_shape(weights[0], arrays[0].shape), arrays[0].dtype)
    for weight, x in zip(weights, arrays, strict=True):
        assert weight.part is not None
        dim, start, _, step = weight.part
        found = to_hf(weight, x)
        end = start + step * (found.shape[dim] - 1) + 1
        whole[(slice(None),) * dim + (slice(start, end, step),)] = found
    return whole


def _unstacked(weight: HFWeight, leaf: jax.Array | np.ndarray) -> Iterator[np.ndarray]:
    """Yield our arrays of the tensors behind a leaf, in the order of `tensor_names`."""
    within = len(weight.stack) - bool(weight.layers)
    for layer in _layers(leaf) if weight.layers else [fetch(leaf)]:
        yield from layer.reshape(-1, *layer.shape[within:])


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
