"""Decoder-only transformer: the one forward that trainer and sampler share.

Shape legend: B rows, T tokens, L layers, D model width, H query heads, K key/value heads,
G = H / K, h head width, F MLP width, V vocabulary, S cache slots.

Parameters are a nested dict; the leaves under "layers" carry a leading L and are scanned over (of a
model with several kinds of layers each has its own dict there, with an L of its own). The sampler
runs the same `decoder_layer` over a key/value cache: what differs is only the `attend` it passes.
The functions that trainer and sampler call dispatch on their first argument: `adapter.py` registers
what they do for a flax module (`forward_of_adapted`, ...), `lora.py` what they do for adapters
(`init_params_of_lora`, ...).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxrl.array_ops import FILTERED
from jaxrl.models.architecture import (
    CONVOLUTION,
    DELTA,
    DENSE,
    EXPERTS,
    KINDS,
    LATER_EXPERTS_FIELDS,
    LATER_FIELDS,
    NOT_OF_WEIGHTS,
    SOFTMAX,
    DeltaNet,
    Experts,
    Latent,
    LayerFlags,
    LayerRun,
    Period,
    ShortConvolution,
    TransformerConfig,
    by_kind,
    joined,
    layer_flags,
    layer_periods,
    layer_runs,
    layer_stacks,
)
from jaxrl.models.attention import Attend, Intervals, Segments, View, layer_views, softcap
from jaxrl.models.exact import Given, Run, Tiles, by_tokens, exact_look_up
from jaxrl.models.expert_exchange import GATHER
from jaxrl.models.experts import Routing, expert_mlp
from jaxrl.models.kernels.choice import REFERENCE
from jaxrl.models.kernels.context_attention import context_attention
from jaxrl.models.kernels.exact_attention import exact_attention
from jaxrl.models.kernels.packed_attention import self_attention, training_mask
from jaxrl.models.kernels.tree_attention import tree_attention
from jaxrl.models.linear import (
    add_bias,
    gather_weight,
    look_up,
    merge,
    project,
    project_float32,
    rounded,
)
from jaxrl.models.recurrence import (
    Recurrence,
    gated_delta_net,
    packed_recurrence,
    short_convolution,
)
from jaxrl.models.remat import ATTENTION, LAYER_INPUT, recompute
from jaxrl.models.rope import rotate
from jaxrl.parallel.processes import put
from jaxrl.parallel.rules import Placement, constrain

# A scan writes every residual of the backward pass into a stacked buffer: for the two layers of the
# quickstart that was a quarter of the gradient's time (170 against 128 ms). Deep models keep the
# scan, whose compilation does not grow with depth.
MAX_UNROLLED_LAYERS = 4

Params = dict
# of weights, y [B, T, D], replayed experts and which tokens are real, see `expert_mlp`
Mix = Callable[..., tuple[jax.Array, Routing]]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class ParamSpec(NamedTuple):
    """Describe one parameter: shape and logical axes, and how it is drawn.

    `init` is "normal", "ones", "zeros", or "rate": the logarithm of uniform(0.01, 16).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"
    deviation: float | None = None  # of "normal"; None = the model's initializer_range


def param_specs(config: TransformerConfig) -> Params:
    """Return the model as a table: a tree of `ParamSpec` with the structure of the parameters."""
    c, d, ff = config, config.hidden_size, config.intermediate_size
    scale = "zeros" if c.unit_offset_norm else "ones"
    norm = ParamSpec((d,), ("norm",), scale)
    if c.layer_norm:  # of scale and bias
        norm = ParamSpec((2, d), (None, "norm"), "zeros")
    norms = {"attn_norm": norm, "mlp_norm": norm} if c.pre_norms else {}
    if c.post_norms:
        norms |= {"attn_post_norm": norm, "mlp_post_norm": norm}
    mixers = {SOFTMAX: _attention(c, scale) if c.latent is None else _latent(c, c.latent)}
    if c.delta_net is not None:
        mixers[DELTA] = _delta_net(c.delta_net, d)
    if c.convolution is not None:
        mixers[CONVOLUTION] = _convolution(c.convolution, d)
    mlps = {DENSE: _mlp("w", d, ff)}
    if not c.gated_mlp:
        del mlps[DENSE]["w_gate"]
    if c.experts is not None:
        mlps[EXPERTS] = _experts(c.experts, d)
    stacks = {
        kind: {
            name: ParamSpec((len(numbers), *spec.shape), ("layers", *spec.axes), spec.init)
            for name, spec in (norms | mixers[KINDS[kind].mixer] | mlps[KINDS[kind].mlp]).items()
        }
        for kind, numbers in layer_stacks(c)
    }
    specs = {
        "embed": ParamSpec((c.vocab_size, d), ("vocab", "embed")),
        "layers": joined(stacks),
        "final_norm": norm,
    }
    if c.value_head is not None:
        specs["value_head"] = ParamSpec((d, 1), ("embed", None), deviation=1 / (d + 1))
    elif not c.tie_embeddings:
        specs["unembed"] = ParamSpec((d, c.vocab_size), ("embed", "vocab"))
    return specs


def _attention(c: TransformerConfig, scale: str) -> Params:
    d, heads, kv, hd = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
    queries = 2 * heads if c.output_gate else heads  # of each head the query, then the gate
    attention = {
        "wq": ParamSpec((d, queries, hd), ("embed", "heads", "head_dim")),
        "wk": ParamSpec((d, kv, hd), ("embed", "kv_heads", "head_dim")),
        "wv": ParamSpec((d, kv, hd), ("embed", "kv_heads", "head_dim")),
        "wo": ParamSpec((heads, hd, d), ("heads", "head_dim", "embed")),
    }
    if c.attention_bias:
        attention["bq"] = ParamSpec((queries, hd), ("heads", "head_dim"), "zeros")
        attention["bk"] = ParamSpec((kv, hd), ("kv_heads", "head_dim"), "zeros")
        attention["bv"] = ParamSpec((kv, hd), ("kv_heads", "head_dim"), "zeros")
    if c.attention_output_bias:
        attention["bo"] = ParamSpec((d,), ("embed",), "zeros")
    if c.qk_norm == "whole":
        attention["q_norm"] = ParamSpec((heads, hd), ("heads", "head_dim"), scale)
        attention["k_norm"] = ParamSpec((kv, hd), ("kv_heads", "head_dim"), scale)
    elif c.qk_norm:
        attention["q_norm"] = ParamSpec((hd,), ("norm",), scale)
        attention["k_norm"] = ParamSpec((hd,), ("norm",), scale)
    if c.attention_sinks:
        attention["sinks"] = ParamSpec((heads,), ("heads",), "zeros")
    return attention


def _latent(c: TransformerConfig, latent: Latent) -> Params:
    d, heads, rank = c.hidden_size, c.num_heads, latent.query_rank
    specs = {
        "wkv_down": ParamSpec((d, latent.rank + latent.turned), ("embed", None)),
        "kv_norm": ParamSpec((latent.rank,), ("norm",), "ones"),
        "wkv_up": ParamSpec(
            (latent.rank, heads, latent.plain + latent.value_dim), (None, "heads", "head_dim")
        ),
        "wo": ParamSpec((heads, latent.value_dim, d), ("heads", "head_dim", "embed")),
    }
    if rank is None:
        return specs | {"wq": ParamSpec((d, heads, c.head_dim), ("embed", "heads", "head_dim"))}
    return specs | {
        "wq_down": ParamSpec((d, rank), ("embed", None)),
        "q_norm": ParamSpec((rank,), ("norm",), "ones"),
        "wq_up": ParamSpec((rank, heads, c.head_dim), (None, "heads", "head_dim")),
    }


def _mlp(name: str, d: int, ff: int) -> Params:
    return {
        f"{name}_gate": ParamSpec((d, ff), ("embed", "mlp")),
        f"{name}_up": ParamSpec((d, ff), ("embed", "mlp")),
        f"{name}_down": ParamSpec((ff, d), ("mlp", "embed")),
    }


def _delta_net(net: DeltaNet, d: int) -> Params:
    keys, values, width = net.key_heads, net.value_heads, net.value_dim
    group = values // keys
    if net.grouped:
        wide = 2 * net.key_dim + 2 * group * width
        inputs = {
            "delta_qkvz": ParamSpec((d, keys, wide), ("embed", "kv_heads", "head_dim")),
            "delta_ba": ParamSpec((d, keys, 2 * group), ("embed", "kv_heads", "head_dim")),
        }
    else:
        inputs = {
            "delta_qkv": ParamSpec((d, net.channels), ("embed", None)),
            "delta_gate": ParamSpec((d, values, width), ("embed", "heads", "head_dim")),
            "delta_strength": ParamSpec((d, values), ("embed", "heads")),
            "delta_decay": ParamSpec((d, values), ("embed", "heads")),
        }
    return inputs | {
        "delta_kernel": ParamSpec((net.channels, net.window), (None, None)),
        "delta_rate": ParamSpec((values,), ("heads",), "rate"),
        "delta_bias": ParamSpec((values,), ("heads",), "ones"),
        "delta_norm": ParamSpec((width,), ("norm",), "ones"),
        "delta_out": ParamSpec((values, width, d), ("heads", "head_dim", "embed")),
    }


def _convolution(convolution: ShortConvolution, d: int) -> Params:
    specs = {
        "conv_in": ParamSpec((d, 3 * d), ("embed", None)),
        "conv_kernel": ParamSpec((d, convolution.window), (None, None)),
        "conv_out": ParamSpec((d, d), (None, "embed")),
    }
    if convolution.bias:
        specs["conv_in_bias"] = ParamSpec((3 * d,), (None,), "zeros")
        specs["conv_kernel_bias"] = ParamSpec((d,), (None,), "zeros")
        specs["conv_out_bias"] = ParamSpec((d,), ("embed",), "zeros")
    return specs


def _experts(experts: Experts, d: int) -> Params:
    specs = {"router": ParamSpec((d, experts.count), ("embed", None))}
    if experts.bias:
        specs["router_bias"] = ParamSpec((experts.count,), (None,), "zeros")
    if experts.linear_bias:
        specs["router_offset"] = ParamSpec((experts.count,), (None,), "zeros")
        for name, width, axis in (
            ("experts_gate_bias", experts.width, "mlp"),
            ("experts_up_bias", experts.width, "mlp"),
            ("experts_down_bias", d, "expert_embed"),
        ):
            specs[name] = ParamSpec((experts.count, width), ("experts", axis), "zeros")
    for name, spec in _mlp("experts", d, experts.width).items():
        axes = tuple("expert_embed" if axis == "embed" else axis for axis in spec.axes)
        specs[name] = ParamSpec((experts.count, *spec.shape), ("experts", *axes))
    if experts.shared_width is not None:
        specs |= _mlp("shared", d, experts.shared_width)
    if experts.shared_gate:
        specs["shared_router"] = ParamSpec((d, 1), ("embed", None))
    return specs


def is_spec(x: object) -> bool:
    """Return whether `x` is a leaf of `param_specs`.

    A `ParamSpec` is a tuple, hence itself a pytree.
    """
    return isinstance(x, ParamSpec)


@functools.singledispatch
def describe(config: TransformerConfig) -> dict[str, Any]:
    """Return the architecture as JSON, which checkpoints keep.

    What it has no part of and older checkpoints do not know is left out.
    """
    absent = {f.name: f.default for f in dataclasses.fields(config) if f.name in LATER_FIELDS}
    known = {k: x for k, x in config.described().items() if k not in NOT_OF_WEIGHTS}
    if config.experts is not None:
        for name in LATER_EXPERTS_FIELDS:
            if not known["experts"][name]:
                del known["experts"][name]
    if config.rope_scaling is not None and config.rope_scaling.short_factor is None:
        del known["rope_scaling"]["short_factor"], known["rope_scaling"]["long_factor"]
    return {k: x for k, x in known.items() if k not in absent or getattr(config, k) != absent[k]}


@functools.singledispatch
def logical_axes(config: TransformerConfig) -> Params:
    """Return a tree of logical axis names, parallel to the parameters."""
    return jax.tree.map(lambda spec: spec.axes, param_specs(config), is_leaf=is_spec)


@functools.singledispatch
def abstract_params(config: TransformerConfig) -> Params:
    """Return the shapes and dtypes of the parameters; nothing is allocated."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32),
        param_specs(config),
        is_leaf=is_spec,
    )


@functools.singledispatch
def init_params(config: TransformerConfig, seed: int, shardings: Params | None = None) -> Params:
    """Draw random float32 parameters: normal(0, initializer_range), norms 1, biases 0.

    Drawn on the host leaf by leaf and placed at once, so the host holds one leaf at a time and
    nothing is compiled: sharded random bits took 24 s of compilation on eight CPU devices.

    Args:
        seed: of numpy's generator; leaf i draws from (seed, i).
        shardings: tree parallel to the parameters; None = the default device.
    """
    specs, treedef = jax.tree.flatten(param_specs(config), is_leaf=is_spec)
    places = jax.tree.leaves(shardings) if shardings is not None else [None] * len(specs)
    leaves = [
        put(draw(spec, (seed, leaf), config.initializer_range), place)
        for leaf, (spec, place) in enumerate(zip(specs, places, strict=True))
    ]
    return jax.tree.unflatten(treedef, leaves)


def draw(spec: ParamSpec, rng_path: tuple[int, int], initializer_range: float) -> np.ndarray:
    """Draw a random parameter; `rng_path` is (seed, leaf)."""
    constant = {"ones": np.ones, "zeros": np.zeros}
    if spec.init in constant:
        return constant[spec.init](spec.shape, np.float32)
    if spec.init == "rate":
        drawn = np.random.default_rng(rng_path).uniform(0.01, 16, spec.shape)
        return np.log(drawn).astype(np.float32)
    normal = np.random.default_rng(rng_path).standard_normal(spec.shape, np.float32)
    deviation = initializer_range if spec.deviation is None else spec.deviation
    return np.float32(deviation) * normal


def normalise(x: jax.Array, scale: jax.Array, config: TransformerConfig) -> jax.Array:
    """Return x / rms(x) * scale over the last dim, in float32.

    With `unit_offset_norm` it is times (1 + scale). Zhang & Sennrich, https://arxiv.org/abs/1910.07467.
    With `layer_norm` x is taken less its mean, and a bias added: scale [2, D] holds both. Ba et
    al., https://arxiv.org/abs/1607.06450.
    """
    x32, bias = x.astype(jnp.float32), None
    if config.layer_norm:
        x32, (scale, bias) = x32 - x32.mean(axis=-1, keepdims=True), scale
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    normed = x32 * jax.lax.rsqrt(mean_square + config.rms_norm_eps)
    if config.unit_offset_norm:
        scale = 1 + scale.astype(jnp.float32)
    scaled = normed * scale
    return (scaled if bias is None else scaled + bias).astype(x.dtype)


# What `fuse_projections` joins, and along which dim.
FUSED = {
    "wqkv": (("wq", "wk", "wv"), 1),
    "bqkv": (("bq", "bk", "bv"), 0),
    "w_gate_up": (("w_gate", "w_up"), 1),
}


class Layers(NamedTuple):
    """Hold the layers of a model, or of a part of it.

    Attributes:
        stacks: parameters of each kind, a leading dim of its layers in each array.
        flags: of each layer, see `layer_flags`.
        replay: [Lx, B, T, k] experts of each token, or None.
    """

    stacks: Mapping[str, Params]
    flags: LayerFlags
    replay: jax.Array | None

    def of_period(self, period: Period) -> "Layers":
        """Return the layers of a period; every array has a leading dim of its times."""

        def cut(x: jax.Array, start: int, size: int) -> jax.Array:
            part = x[start : start + period.times * size]
            return part.reshape(period.times, size, *x.shape[1:])

        first, replay = period.runs[0], self.replay
        stacks = {
            kind: jax.tree.map(functools.partial(cut, start=start, size=period.layers(kind)), stack)
            for kind, start in period.starts.items()
            for stack in [self.stacks[kind]]
        }
        if replay is not None:
            replay = cut(replay, first.in_routes.start, period.routed)
        begin, each = first.in_model.start, period.layers()
        flags = jax.tree.map(functools.partial(cut, start=begin, size=each), self.flags)
        return Layers(stacks, flags, replay)


def fuse_projections(layer: Params, shards: int = 1) -> Params:
    """Fuse q, k, v of a layer into one matrix, and gate and up into one: fewer, wider products.

    For decoding, where a product takes less time than starting it. [D, H + 2K, h] and [D, 2F].

    Args:
        shards: devices over which heads and MLP width are split: the parts of the first come first,
            then those of the second. What they do not divide is left as it is.
    """
    joined, done = {}, set()
    for name, (parts, axis) in FUSED.items():
        if all(part in layer and layer[part].shape[axis] % shards == 0 for part in parts):
            pieces = [jnp.split(layer[part], shards, axis) for part in parts]
            by_shard = [piece for shard in zip(*pieces, strict=True) for piece in shard]
            joined[name] = jnp.concatenate(by_shard, axis)
            done.update(parts)
    return {name: w for name, w in layer.items() if name not in done} | joined


def shards_of(placement: Placement | None) -> int:
    """Return the number of devices over which heads and MLP width are split."""
    return 1 if placement is None else placement.size(placement.rules.heads)


def unfuse(x: jax.Array, widths: Sequence[int], shards: int) -> list[jax.Array]:
    """Split dim 2 of what fused weights gave into parts of these widths: [B, T, sum, ...]."""
    by_shard = x.reshape(*x.shape[:2], shards, -1, *x.shape[3:])
    ends = np.cumsum(widths)[:-1] // shards
    return [
        part.reshape(*x.shape[:2], -1, *x.shape[3:]) for part in jnp.split(by_shard, ends, axis=3)
    ]


class Work(NamedTuple):
    """Say how the products of a layer are split over devices.

    Attributes:
        split: multiplies by a matrix whose outputs are split, see `Tiles.split`.
        join: multiplies by one whose inputs are, see `Tiles.join`.
        by_part: runs a function of heads, see `Tiles.by_part`.
        spread: (array, logical axes behind batch and seq) -> the array, spread over devices.
        shards: devices over which fused weights are split.
    """

    split: Callable[..., jax.Array]
    join: Callable[..., jax.Array]
    by_part: Callable[..., jax.Array]
    spread: Callable[..., jax.Array]
    shards: int = 1


def by_partitioner(placement: Placement | None) -> Work:
    """Leave it to XLA's partitioner which device computes what."""

    def split(x: jax.Array, w: Any, width: int) -> jax.Array:
        return project(x, w)

    def join(x: jax.Array, w: Any, width: int, contract: int = 1) -> jax.Array:
        return project(x, w, contract)

    def by_part(run: Callable[..., Any], x: jax.Array, width: int, *weights: Any) -> jax.Array:
        return run(x, *weights)

    def spread(y: jax.Array, *names: str | None) -> jax.Array:
        return constrain(y, ("batch", "seq", *names), placement)

    return Work(split, join, by_part, spread, shards_of(placement))


def by_parts(tiles: Tiles) -> Work:
    """Split into logical parts, within a tile."""
    return Work(tiles.split, tiles.join, tiles.by_part, lambda y, *names: y)


def project_qkv(
    config: TransformerConfig, weights: Params, y: jax.Array, work: Work | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute queries [B, T, H, h], keys and values [B, T, K, h]; the weights may be fused.

    With `output_gate` a gate follows the query of each head: [B, T, 2 H, h].
    """
    work = work or by_partitioner(None)
    queries = config.num_heads * (2 if config.output_gate else 1)
    if "wqkv" in weights:
        qkv = project(y, weights["wqkv"])
        if config.attention_bias:
            qkv = add_bias(qkv, weights["bqkv"])
        q, k, v = unfuse(qkv, (queries, *(config.num_kv_heads,) * 2), work.shards)
        return q, k, v
    q = work.split(y, weights["wq"], queries)
    k, v = (work.split(y, weights[name], config.num_kv_heads) for name in ("wk", "wv"))
    if config.attention_bias:
        q, k, v = (add_bias(x, weights[name]) for x, name in ((q, "bq"), (k, "bk"), (v, "bv")))
    return q, k, v


def project_gate_up(
    config: TransformerConfig, weights: Params, y: jax.Array, work: Work | None = None
) -> tuple[jax.Array, jax.Array]:
    """Compute gate and up [B, T, F] of the MLP; the weights may be fused."""
    work = work or by_partitioner(None)
    if "w_gate_up" in weights:
        both = project(y, weights["w_gate_up"])
        gate, up = unfuse(both, (both.shape[2] // 2,) * 2, work.shards)
        return gate, up
    gate, up = (work.split(y, weights[n], config.intermediate_size) for n in ("w_gate", "w_up"))
    return gate, up


def mixing(
    config: TransformerConfig,
    *,
    placement: Placement | None,
    kernel: str,
    exchange: str = GATHER,
) -> Mix:
    """Return what `decoder_layer` calls for experts, see `expert_mlp`."""

    def mix(
        weights: Params, y: jax.Array, replay: jax.Array | None, real: jax.Array | None
    ) -> tuple[jax.Array, Routing]:
        assert config.experts is not None
        return expert_mlp(
            config.experts,
            ACTIVATIONS[config.activation],
            weights,
            y,
            placement=placement,
            kernel=kernel,
            exchange=exchange,
            replay=replay,
            real=real,
        )

    return mix


def latent_attention(
    config: TransformerConfig,
    layer: Params,
    y: jax.Array,
    view: View,
    attend: Attend,
    spread: Callable[..., jax.Array],
    *,
    absorbed: bool,
) -> jax.Array:
    """Compute latent attention: [B, T, D] -> [B, T, D]. DeepSeek-V2, arXiv:2405.04434, 2.1.

    Args:
        spread: (array, logical axes behind batch and seq) -> the array, spread over devices.
        absorbed: see `decoder_layer`.
    """
    n = config.latent
    assert n is not None
    of_vectors = dataclasses.replace(config, rms_norm_eps=n.norm_eps)

    def vector(x: jax.Array, name: str) -> jax.Array:
        return normalise(x, rounded(layer[name], x.dtype), of_vectors)

    if n.query_rank is None:
        q = project(y, layer["wq"])
    else:
        q = project(vector(project(y, layer["wq_down"]), "q_norm"), layer["wq_up"])
    plain, turned = jnp.split(spread(q, "heads", None), [n.plain], axis=-1)
    latent, key = jnp.split(project(y, layer["wkv_down"]), [n.rank], axis=-1)
    latent, key = vector(latent, "kv_norm"), key[:, :, None]
    turned, key = (rotate(x, view.cos, view.sin, config.rope_pairs) for x in (turned, key))

    def ask(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), view.mask)

    if absorbed:  # q (W c) = (q W) c, and the sum of p (W c) = W (the sum of p c)
        for_keys, for_values = jnp.split(layer["wkv_up"], [n.plain], axis=-1)
        asks = jnp.einsum("bthn,rhn->bthr", plain, for_keys)
        both = jnp.concatenate([latent[:, :, None], key], axis=-1)
        mean = ask(jnp.concatenate([asks, turned], axis=-1), both, both)[..., : n.rank]
        out = jnp.einsum("bthr,rhv->bthv", mean, for_values)
    else:
        k, v = jnp.split(spread(project(latent, layer["wkv_up"]), "heads", None), [n.plain], -1)
        k = jnp.concatenate([k, jnp.broadcast_to(key, (*k.shape[:-1], n.turned))], axis=-1)
        wide = [(0, 0)] * 3 + [(0, config.head_dim - n.value_dim)]  # as keys: so kernels want it
        out = ask(jnp.concatenate([plain, turned], axis=-1), k, jnp.pad(v, wide))
        out = out[..., : n.value_dim]
    out = checkpoint_name(out, ATTENTION)
    return spread(project(out, layer["wo"], contract=2), None)


def decoder_layer(
    config: TransformerConfig,
    layer: Params,
    x: jax.Array,
    view: View,
    attend: Attend,
    placement: Placement | None = None,
    mix: Mix | None = None,
    recurrence: Recurrence | None = None,
    *,
    replay: jax.Array | None = None,
    real: jax.Array | None = None,
    absorbed: bool = False,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, Routing | None]:
    """Run one block; `attend` decides which keys there are.

    Args:
        x: [B, T, D].
        attend: (q, k, v, mask) -> [B, T, H, h], of q [B, T, H, h], k, v [B, K, T, h], the view's
            mask, and sinks [H] of a model that has them.
        placement: spreads heads and MLP width.
        mix: the MLP of a layer with experts, see `expert_mlp`.
        recurrence: by which a layer goes that keeps a state in the place of keys and values.
        replay, real: see `expert_mlp`; with `tiles` real must be given.
        absorbed: latent attention asks the latents, see `cached_attention`: the matrices that would
            make keys and values of them go into the queries, and into what comes back.
        tiles: all but the attention is computed a tile of tokens at a time, see `exact.py`.

    Returns:
        [B, T, D], and what the router did.
    """
    x, work = checkpoint_name(x, LAYER_INPUT), by_partitioner(placement)
    if "delta_out" in layer or "conv_out" in layer or config.latent is not None:
        with jax.named_scope("attention"):
            y = _before(config, layer, x, "attn_norm")
            if config.latent is not None:
                parts = config, layer, y, view, attend, work.spread
                out = latent_attention(*parts, absorbed=absorbed)
            elif "delta_out" in layer:
                assert recurrence is not None
                out = gated_delta_net(config, layer, y, recurrence, work.spread, work.shards)
            else:
                assert recurrence is not None
                out = short_convolution(config, layer, y, recurrence)
            x = _add(config, layer, x, work.spread(out, None), "attn_post_norm")
        return _feed_forward(config, mix, work, layer, x, replay, real)

    def of_tokens(run: Run, given: tuple, fixed: tuple, widths: tuple, outputs: tuple) -> Any:
        """Run a function of tokens; widths and outputs are of what it takes and makes."""
        if tiles is None:
            return run(work, layer, given, fixed)
        assert real is not None
        return by_tokens(
            lambda tiles, *rest: run(by_parts(tiles), *rest),
            tiles,
            layer,
            Given(given, fixed, real),
            dtype=x.dtype,
            placement=placement,
            specs=None if placement is None else specs_of_layer(config, layer, placement),
            moved=widths,
            outputs=outputs,
        )

    with jax.named_scope("attention"):
        ask, turn = functools.partial(_ask, config), (view.cos, view.sin, view.growth)
        heads, kv_heads = config.num_heads, config.num_kv_heads
        q, k, v, gate = of_tokens(ask, (x,), turn, (0,), (heads, kv_heads, kv_heads, heads))
        sinks = (layer["sinks"],) if config.attention_sinks else ()
        out = attend(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), view.mask, *sinks)
        out = checkpoint_name(out, ATTENTION)
    answer = functools.partial(_answer, config, mix)
    return of_tokens(answer, (x, out, gate), (replay, real), (0, heads, heads), (0, 0))


def _ask(config: TransformerConfig, work: Work, layer: Params, given: tuple, turn: tuple) -> tuple:
    """Return queries, keys and values of x, and the gate of what they find, or None."""
    (x,), (cos, sin, growth), spread, gate = given, turn, work.spread, None
    y = _before(config, layer, x, "attn_norm")
    q, k, v = project_qkv(config, layer, y, work)
    q, k, v = spread(q, "heads", None), spread(k, "kv_heads", None), spread(v, "kv_heads", None)
    if config.output_gate:
        q, gate = jnp.split(q.reshape(*y.shape[:2], -1, 2 * config.head_dim), 2, axis=-1)

    def turned(y: jax.Array, *scales: jax.Array) -> jax.Array:
        for scale in scales:  # one, or none
            y = _normalise_heads(config, y, scale)
        return rotate(y, cos, sin, config.rope_pairs)

    scales = [(layer["q_norm"],), (layer["k_norm"],)] if config.qk_norm else [(), ()]
    q = work.by_part(turned, q, config.num_heads, *scales[0])
    k = work.by_part(turned, k, config.num_kv_heads, *scales[1])
    return q if growth is None else q * growth.astype(q.dtype), k, v, gate


def _answer(
    config: TransformerConfig,
    mix: Mix | None,
    work: Work,
    layer: Params,
    given: tuple,
    fixed: tuple,
) -> tuple[jax.Array, Routing | None]:
    """Return x with what attention found and what the MLP makes of it, see `decoder_layer`."""
    x, out, gate = given
    with jax.named_scope("attention"):
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        out = work.spread(work.join(out, layer["wo"], config.num_heads, contract=2), None)
        out = add_bias(out, layer["bo"]) if config.attention_output_bias else out
        x = _add(config, layer, x, out, "attn_post_norm")
    return _feed_forward(config, mix, work, layer, x, *fixed)


@jax.named_scope("mlp")
def _feed_forward(
    config: TransformerConfig,
    mix: Mix | None,
    work: Work,
    layer: Params,
    x: jax.Array,
    replay: jax.Array | None,
    real: jax.Array | None,
) -> tuple[jax.Array, Routing | None]:
    y, routing = _before(config, layer, x, "mlp_norm"), None
    if "router" in layer:
        assert mix is not None
        out, routing = mix(layer, y, replay, real)
        out = work.spread(out, None)
    else:
        act, width = ACTIVATIONS[config.activation], config.intermediate_size
        if config.gated_mlp:
            gate, up = project_gate_up(config, layer, y, work)
            hidden = work.spread(act(gate) * up, "mlp")
        else:
            hidden = work.spread(act(work.split(y, layer["w_up"], width)), "mlp")
        out = work.spread(work.join(hidden, layer["w_down"], width), None)
    return _add(config, layer, x, out, "mlp_post_norm"), routing


def _before(config: TransformerConfig, layer: Params, x: jax.Array, name: str) -> jax.Array:
    return _normed(config, layer, x, name) if config.pre_norms else x


def _add(
    config: TransformerConfig, layer: Params, x: jax.Array, out: jax.Array, name: str
) -> jax.Array:
    out = _normed(config, layer, out, name) if config.post_norms else out
    return x + (out if config.residual_multiplier == 1 else config.residual_multiplier * out)


def _normed(config: TransformerConfig, layer: Params, y: jax.Array, name: str) -> jax.Array:
    return normalise(y, rounded(layer[name], y.dtype), config)


def _normalise_heads(config: TransformerConfig, y: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalise y [B, T, H, h], each head, or all of them together (a scale [H, h])."""
    scale = rounded(scale, y.dtype)
    if config.qk_norm != "whole":
        return normalise(y, scale, config)
    return normalise(y.reshape(*y.shape[:2], -1), scale.reshape(-1), config).reshape(y.shape)


def specs_of_layer(config: TransformerConfig, layer: Params, placement: Placement) -> Params:
    """Return how the weights of a layer lie on a mesh that computes with them."""
    kinds = by_kind(config, logical_axes(config)["layers"]).values()
    axes = {name: names[1:] for kind in kinds for name, names in kind.items()}
    return {name: placement.whole_over_batch(w.shape, axes[name]) for name, w in layer.items()}


def embed(
    config: TransformerConfig,
    params: Params,
    tokens: jax.Array,
    dtype: jnp.dtype,
    placement: Placement | None = None,
    *,
    tiles: Tiles | None = None,
    real: jax.Array | None = None,
) -> jax.Array:
    """Return the token embeddings [B, T, D] in the compute dtype.

    Args:
        tiles, real: see `decoder_layer`; they only matter to the gradient.
    """
    if tiles is not None and tiles.full and real is not None:
        where = {"placement": placement, "names": ("vocab", "embed")}
        x = exact_look_up(tiles, params["embed"], tokens, real, dtype=dtype, **where)
    else:
        x = look_up(params["embed"], tokens, dtype, placement)
    if config.scale_embeddings:
        # Gemma rounds the factor to the compute dtype before it multiplies.
        return x * jnp.asarray(math.sqrt(config.hidden_size), dtype)
    return x if config.embedding_multiplier == 1 else x * config.embedding_multiplier


@functools.singledispatch
def head_axes(config: TransformerConfig) -> Params:
    """Return the logical axes of the parameters that `unembed` reads, by name."""
    names = ("final_norm", "embed" if config.tie_embeddings else "unembed")
    return {name: logical_axes(config)[name] for name in names}


@functools.singledispatch
def unembed(
    config: TransformerConfig, params: Params, hidden: jax.Array, first: jax.Array | int = 0
) -> jax.Array:
    """Apply the final norm and the vocabulary head: [..., D] -> float32 logits [..., V].

    Those of padding, see `known_ids`, are `FILTERED`, and have no gradient.

    Args:
        first: id of the first column, of a head that is split.
    """
    with jax.named_scope("unembed"):
        y = normalise(hidden, params["final_norm"], config)
        head = params["unembed"] if "unembed" in params else params["embed"].T
        logits = project_float32(y, merge(head))
        logits = softcap(logits / config.logits_scaling, config.final_softcap)
        return only_known(config, logits, first)


def only_known(
    config: TransformerConfig, logits: jax.Array, first: jax.Array | int = 0
) -> jax.Array:
    """Return logits [..., V] with those of padding at `FILTERED`, see `unembed`."""
    if config.known_ids is None:
        return logits
    ids = first + jnp.arange(logits.shape[-1])
    return jnp.where(ids < config.known_ids, logits, FILTERED)


@functools.singledispatch
def forward(
    config: TransformerConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    dtype: jnp.dtype = jnp.float32,
    remat: str = "none",
    kernel: str = REFERENCE,
    experts_kernel: str = REFERENCE,
    rule_kernel: str = REFERENCE,
    exchange: str = "auto",
    context: str = "auto",
    placement: Placement | None = None,
    tiles: Tiles | None = None,
    ends: jax.Array | None = None,
    tree_kernel: str = REFERENCE,
) -> jax.Array:
    """Compute the hidden states [B, T, D] before the final norm.

    Args:
        tokens, positions, segment_ids: [B, T] int; segment 0 is padding.
        dtype: compute dtype; norms, rotary angles, softmax and logits stay float32.
        remat: what each layer keeps for the backward pass, see `remat.py`.
        kernel: of the attention, of `PACKED_ATTENTION`.
        experts_kernel: of `GROUPED_PRODUCT`.
        rule_kernel: of `DELTA_RULE`.
        exchange: how tokens travel to experts on other devices, see `exchange_of`.
        context: how rows that are spread over devices attend, of `context_attention`.
        placement: where rows, places, heads, experts and MLP width are spread, and parameters
            gathered from.
        tiles: of the exact mode, see `exact.py`: one segment in each row, from its first token on.
        ends: [B, T] of rows that hold prefix trees, see `tree_attention`.
        tree_kernel: of `TREE_ATTENTION`.
    """
    settings: dict[str, Any] = {"dtype": dtype, "remat": remat, "kernel": kernel}
    settings |= {"experts_kernel": experts_kernel, "rule_kernel": rule_kernel}
    settings |= {"exchange": exchange, "context": context, "placement": placement, "tiles": tiles}
    settings |= {"ends": ends, "tree_kernel": tree_kernel}
    return routed_forward(config, params, tokens, positions, segment_ids, **settings)[0]


def routed_forward(  # noqa: PLR0915
    config: TransformerConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    dtype: jnp.dtype,
    remat: str,
    kernel: str,
    experts_kernel: str,
    context: str,
    placement: Placement | None,
    rule_kernel: str = REFERENCE,
    exchange: str = "auto",
    tiles: Tiles | None = None,
    ends: jax.Array | None = None,
    tree_kernel: str = REFERENCE,
    replay: jax.Array | None = None,
    observe: Callable[[Routing], Any] = lambda routing: (),
    keep_states: bool = False,
) -> tuple[jax.Array, Any]:
    """Compute what `forward` does, and what is to be known of the routers.

    Args:
        replay: [Lx, B, T, k] ids of the experts of the Lx layers that have some, see `route`; None:
            every token chooses.
        observe: what to keep of the routing of a layer.
        keep_states: keep the hidden states behind every layer, and nothing of routers.

    Returns:
        [B, T, D], and what was kept, stacked to [Lx, ...]; None where no layer has experts.
        Hidden states are [L, B, T, D].
    """
    axes = by_kind(config, logical_axes(config)["layers"])
    real = segment_ids > 0
    if tiles is not None:
        mask = Segments(segment_ids, False)
        ways = {"tiles": tiles, "kernel": kernel, "placement": placement}
        attend: Any = functools.partial(exact_attention, **ways)
        params = params | {"embed": rounded(params["embed"], dtype)}  # as the sampler has it
    elif ends is not None:
        if config.delta_net is not None or config.convolution is not None:
            raise ValueError("layers that keep a state have no prefix trees")
        mask = Intervals(ends, positions, False)
        attend = functools.partial(tree_attention, kernel=tree_kernel, placement=placement)
    elif placement is None or placement.size(placement.rules.seq) == 1:
        mask = training_mask(segment_ids, kernel)
        attend = functools.partial(self_attention, kernel=kernel, placement=placement)
    else:
        assert not config.attention_sinks  # `place_model` refuses it
        mask = Segments(segment_ids, False)
        ways = {"strategy": context, "kernel": kernel, "placement": placement}
        attend = functools.partial(context_attention, **ways)
    view = layer_views(config, mask, positions, positions)
    attend = functools.partial(attend, config)

    recurrence = packed_recurrence(segment_ids, rule_kernel, placement)
    where = placement if tiles is None else None  # within a tile each device is by itself
    mix = mixing(config, placement=where, kernel=experts_kernel, exchange=exchange)

    def body(
        kind: str, x: jax.Array, layer: tuple[Params, LayerFlags, jax.Array | None]
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        names, (weights, flags, chosen) = axes[kind], layer
        whole = {
            name: gather_weight(w, names[name][1:], placement, dtype) for name, w in weights.items()
        }
        how = placement, mix, recurrence
        known = {"replay": chosen, "real": real, "tiles": tiles}
        x, routing = decoder_layer(config, whole, x, view(flags), attend, *how, **known)
        kept = () if routing is None else (observe(routing),)
        return x, (x,) if keep_states else kept

    bodies = {kind: recompute(functools.partial(body, kind), remat) for kind in axes}
    whole_model = config.num_layers <= MAX_UNROLLED_LAYERS

    def go(x: jax.Array, part: Layers, runs: Sequence[LayerRun]) -> tuple[jax.Array, Any]:
        """Go through the layers of some runs; return what was observed, [their Lx, ...] or None."""
        observed: list[Any] = []
        for run in runs:
            layers = jax.tree.map(lambda w, run=run: w[run.in_stack], part.stacks[run.kind])
            replay = part.replay if KINDS[run.kind].mlp == EXPERTS else None
            chosen = None if replay is None else replay[run.in_routes]
            flags = jax.tree.map(lambda flag, run=run: flag[run.in_model], part.flags)
            x, seen = jax.lax.scan(
                bodies[run.kind],
                x,
                (layers, flags, chosen),
                unroll=len(flags.slides) if whole_model else 1,
            )
            observed += seen
        if not observed:
            return x, None
        return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *observed)

    x = embed(config, params, tokens, dtype, placement, tiles=tiles, real=real)
    flags = jax.tree.map(jnp.asarray, layer_flags(config))
    model = Layers(by_kind(config, params["layers"]), flags, replay)
    observed: list[Any] = []
    if whole_model:
        return go(x, model, layer_runs(config))
    for period in layer_periods(config):
        if period.times == 1:
            x, seen = go(x, model, period.runs)
        else:
            each_time = functools.partial(go, runs=period.from_its_start)
            x, seen = jax.lax.scan(each_time, x, model.of_period(period))
            seen = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), seen)
        observed += [] if seen is None else [seen]
    if not observed:
        return x, None
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *observed)
