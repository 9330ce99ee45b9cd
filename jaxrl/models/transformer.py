"""Decoder-only transformer: the one forward that trainer and sampler share.

Shape legend: B rows, T tokens, L layers, D model width, H query heads, K key/value heads,
G = H / K, h head width, F MLP width, V vocabulary, S cache slots.

Parameters are a nested dict; the leaves under "layers" carry a leading L and are scanned over. The
sampler runs the same `decoder_layer` over a key/value cache: what differs is only the `attend` it
passes.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# A scan writes every residual of the backward pass into a stacked buffer: for the two layers of the
# quickstart that was a quarter of the gradient's time (170 against 128 ms). Deep models keep the
# scan, whose compilation does not grow with depth.
MAX_UNROLLED_LAYERS = 4

Params = dict
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class TransformerConfig:
    """Architecture of a Llama- or Qwen-shaped decoder.

    Example: `TransformerConfig(vocab_size=32, hidden_size=64, intermediate_size=128, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=16)` is the 100k-parameter model of the quickstart.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    attention_bias: bool = False  # Qwen2: biases on q, k and v
    qk_norm: bool = False  # Qwen3: RMSNorm over each query and key head
    initializer_range: float = 0.02


class ParamSpec(NamedTuple):
    """Shape and logical axes of one parameter; `init` is "normal", "ones" or "zeros"."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"


def param_specs(config: TransformerConfig) -> Params:
    """The model as a table: a tree of `ParamSpec` with the structure of the parameters."""
    c = config
    d, heads, kv, hd, ff = (
        c.hidden_size,
        c.num_heads,
        c.num_kv_heads,
        c.head_dim,
        c.intermediate_size,
    )
    layers = {
        "attn_norm": ParamSpec((d,), ("norm",), "ones"),
        "wq": ParamSpec((d, heads, hd), ("embed", "heads", "head_dim")),
        "wk": ParamSpec((d, kv, hd), ("embed", "kv_heads", "head_dim")),
        "wv": ParamSpec((d, kv, hd), ("embed", "kv_heads", "head_dim")),
        "wo": ParamSpec((heads, hd, d), ("heads", "head_dim", "embed")),
        "mlp_norm": ParamSpec((d,), ("norm",), "ones"),
        "w_gate": ParamSpec((d, ff), ("embed", "mlp")),
        "w_up": ParamSpec((d, ff), ("embed", "mlp")),
        "w_down": ParamSpec((ff, d), ("mlp", "embed")),
    }
    if c.attention_bias:
        layers["bq"] = ParamSpec((heads, hd), ("heads", "head_dim"), "zeros")
        layers["bk"] = ParamSpec((kv, hd), ("kv_heads", "head_dim"), "zeros")
        layers["bv"] = ParamSpec((kv, hd), ("kv_heads", "head_dim"), "zeros")
    if c.qk_norm:
        layers["q_norm"] = ParamSpec((hd,), ("norm",), "ones")
        layers["k_norm"] = ParamSpec((hd,), ("norm",), "ones")
    stacked = {
        name: ParamSpec((c.num_layers, *spec.shape), ("layers", *spec.axes), spec.init)
        for name, spec in layers.items()
    }
    specs = {
        "embed": ParamSpec((c.vocab_size, d), ("vocab", "embed")),
        "layers": stacked,
        "final_norm": ParamSpec((d,), ("norm",), "ones"),
    }
    if not c.tie_embeddings:
        specs["unembed"] = ParamSpec((d, c.vocab_size), ("embed", "vocab"))
    return specs


def is_spec(x: object) -> bool:
    """Whether `x` is a leaf of `param_specs` (a `ParamSpec` is a tuple, hence itself a pytree)."""
    return isinstance(x, ParamSpec)


def logical_axes(config: TransformerConfig) -> Params:
    """Tree of logical axis names, parallel to the parameters."""
    return jax.tree.map(lambda spec: spec.axes, param_specs(config), is_leaf=is_spec)


def abstract_params(config: TransformerConfig) -> Params:
    """Shapes and dtypes of the parameters; nothing is allocated."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32),
        param_specs(config),
        is_leaf=is_spec,
    )


def init_params(config: TransformerConfig, seed: int, shardings: Params | None = None) -> Params:
    """Random float32 parameters: normal(0, initializer_range), norms 1, biases 0.

    Drawn on the host leaf by leaf and placed at once, so the host holds one leaf at a time and
    nothing is compiled: sharded random bits took 24 s of compilation on eight CPU devices.

    Args:
        seed: of numpy's generator; leaf i draws from (seed, i).
        shardings: tree parallel to the parameters; None = the default device.
    """
    specs, treedef = jax.tree.flatten(param_specs(config), is_leaf=is_spec)
    constant = {"ones": np.ones, "zeros": np.zeros}

    def draw(leaf: int, spec: ParamSpec) -> np.ndarray:
        if spec.init in constant:
            return constant[spec.init](spec.shape, np.float32)
        normal = np.random.default_rng((seed, leaf)).standard_normal(spec.shape, np.float32)
        return np.float32(config.initializer_range) * normal

    places = jax.tree.leaves(shardings) if shardings is not None else [None] * len(specs)
    leaves = [
        jax.device_put(draw(leaf, spec), place)
        for leaf, (spec, place) in enumerate(zip(specs, places, strict=True))
    ]
    return jax.tree.unflatten(treedef, leaves)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last dim, in float32.

    Zhang & Sennrich, https://arxiv.org/abs/1910.07467.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed * scale).astype(x.dtype)


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding, half-split layout of Hugging Face. Su et al., https://arxiv.org/abs/2104.09864.

    x [B, T, heads, h]; positions [B, T] int.
    """
    half = x.shape[-1] // 2
    inverse_frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * inverse_frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query softmax attention, softmax in float32.

    q [B, T, H, h]; k, v [B, K, S, h] (the cache layout); mask [B, T, S] bool, True = attend.
    Returns [B, T, H, h]. Ainslie et al., https://arxiv.org/abs/2305.13245.
    """
    b, t, heads, hd = q.shape
    kv = k.shape[1]
    grouped = q.reshape(b, t, kv, heads // kv, hd)
    scores = jnp.einsum("btkgh,bksh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * hd**-0.5, jnp.finfo(jnp.float32).min)
    probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bksh->btkgh", probs, v).reshape(b, t, heads, hd)


def project(x: jax.Array, w: jax.Array, contract: int = 1) -> jax.Array:
    """x [B, T, in...] times w [in..., out...] -> [B, T, out...], contracting `contract` dims.

    As one matrix product: on the CPU the backward of the einsum with two batch dims takes twice as
    long (12.4 against 6.7 ms for [256, 16, 64] x [64, 256] on two cores).
    """
    inner = math.prod(w.shape[:contract])
    out = x.reshape(-1, inner) @ w.reshape(inner, -1)
    return out.reshape(*x.shape[:2], *w.shape[contract:])


def decoder_layer(
    config: TransformerConfig, layer: Params, x: jax.Array, positions: jax.Array, attend: Attend
) -> jax.Array:
    """One pre-norm block; `attend` decides what is seen.

    attend(q, k, v) takes q [B, T, H, h], k, v [B, K, T, h] and returns [B, T, H, h].
    x [B, T, D]; positions [B, T]; returns [B, T, D].
    """
    dtype = x.dtype
    weights = {name: w.astype(dtype) for name, w in layer.items()}
    with jax.named_scope("attention"):
        y = rms_norm(x, weights["attn_norm"], config.rms_norm_eps)
        q = project(y, weights["wq"])
        k = project(y, weights["wk"])
        v = project(y, weights["wv"])
        if config.attention_bias:
            q, k, v = q + weights["bq"], k + weights["bk"], v + weights["bv"]
        if config.qk_norm:
            q = rms_norm(q, weights["q_norm"], config.rms_norm_eps)
            k = rms_norm(k, weights["k_norm"], config.rms_norm_eps)
        q = rope(q, positions, config.rope_theta)
        k = rope(k, positions, config.rope_theta)
        out = attend(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
        x = x + project(out, weights["wo"], contract=2)
    with jax.named_scope("mlp"):
        y = rms_norm(x, weights["mlp_norm"], config.rms_norm_eps)
        gate = project(y, weights["w_gate"])
        up = project(y, weights["w_up"])
        return x + project(jax.nn.silu(gate) * up, weights["w_down"])


def embed(params: Params, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Token embeddings [B, T, D] in the compute dtype."""
    return params["embed"][tokens].astype(dtype)


def unembed(config: TransformerConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Final norm and vocabulary head: [..., D] -> float32 logits [..., V]."""
    with jax.named_scope("unembed"):
        y = rms_norm(hidden, params["final_norm"], config.rms_norm_eps)
        head = params["unembed"] if "unembed" in params else params["embed"].T
        return jnp.einsum(
            "...d,dv->...v", y, head.astype(y.dtype), preferred_element_type=jnp.float32
        )


def causal_mask(segment_ids: jax.Array) -> jax.Array:
    """[B, T] segment ids (0 = padding) -> [B, T, T] bool: look back within one's own segment.

    Padding attends to padding, so that no softmax is over an empty set.
    """
    t = segment_ids.shape[-1]
    same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
    return same_segment & jnp.tril(jnp.ones((t, t), bool))


def forward(
    config: TransformerConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    dtype: jnp.dtype = jnp.float32,
    remat: bool = False,
) -> jax.Array:
    """Hidden states [B, T, D] before the final norm.

    Args:
        tokens, positions, segment_ids: [B, T] int; segment 0 is padding.
        dtype: compute dtype; norms, rotary angles, softmax and logits stay float32.
        remat: recompute each layer in the backward pass.
    """
    mask = causal_mask(segment_ids)

    def body(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        attend = functools.partial(attention, mask=mask)
        return decoder_layer(config, layer, x, positions, attend), None

    body = jax.checkpoint(body) if remat else body
    unroll = config.num_layers if config.num_layers <= MAX_UNROLLED_LAYERS else 1
    return jax.lax.scan(body, embed(params, tokens, dtype), params["layers"], unroll=unroll)[0]
