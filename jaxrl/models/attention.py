"""Softmax attention in plain XLA, the reference of every kernel, and what masks say.

Shape legend: B rows, T tokens, S keys, H query heads, K key/value heads, h head width.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.models.architecture import LayerFlags, TransformerConfig
from jaxrl.models.linear import einsum_float32
from jaxrl.models.rope import rotary

# Of queries. Eight blocks instead of four: the same at 192 tokens, 335 instead of 411 ms at 512
# (LOG.md), and twice the operations to compile. Blocks above 128 queries leave a CPU's cache.
CAUSAL_BLOCKS, LEAST_CAUSAL_BLOCK, MOST_CAUSAL_BLOCK = 4, 32, 128


class Segments(NamedTuple):
    """Hold what a fused kernel takes in place of a mask: look back within one's own segment."""

    ids: jax.Array  # [B, T] int, 0 = padding
    sliding: jax.Array | bool  # [] bool, whether the layer slides


class Intervals(NamedTuple):
    """Hold what `tree_attention` takes in place of a mask: a key is seen up to where it ends."""

    ends: jax.Array  # [B, T] int, the place behind the last token that sees this one
    positions: jax.Array  # [B, T] int, of which the window is one
    sliding: jax.Array | bool  # [] bool, whether the layer slides


Mask = jax.Array | Segments | Intervals  # [B, T, S] bool, True = attend
Attend = Callable[..., jax.Array]  # of q, k, v, mask, and sinks [H] where the model has them


class View(NamedTuple):
    """Hold what a layer knows of positions: mask; cos, sin [B, T, 1, r / 2] of r dims.

    `growth` [B, T, 1, 1] is the factor of queries, of a model that has `query_growth`.
    """

    mask: Mask
    cos: jax.Array
    sin: jax.Array
    growth: jax.Array | None = None


def layer_views(
    config: TransformerConfig, mask: Mask, positions: jax.Array, key_positions: jax.Array
) -> Callable[[LayerFlags], View]:
    """Return a function from the flags of a layer to its view; what it needs is computed once.

    mask [B, T, S] bool, or segments; positions [B, T] and key_positions [B or 1, S] int.
    """
    c, turned = config, config.rotary_dim or config.head_dim
    growth = None if c.query_growth is None else c.query_growth.factor(positions)
    full = View(mask, *rotary(positions, turned, c.rope_theta, c.rope_scaling), growth)

    def turn(view: View, turns: jax.Array | bool) -> View:
        if not c.rope_layers:
            return view
        cos, sin = jnp.where(turns, view.cos, 1), jnp.where(turns, view.sin, 0)
        return view._replace(cos=cos, sin=sin)

    if c.sliding_window is None:
        return lambda flags: turn(full, flags.turns)
    if isinstance(mask, Segments | Intervals):
        near: Mask = mask._replace(sliding=True)
    else:
        near = mask & (positions[:, :, None] - key_positions[:, None, :] < c.sliding_window)
    local = full._replace(mask=near)
    if c.local_rope_theta is not None:
        local = View(near, *rotary(positions, turned, c.local_rope_theta, None), growth)

    def view(flags: LayerFlags) -> View:
        of_layer = jax.tree.map(functools.partial(jnp.where, flags.slides), local, full)
        return turn(of_layer, flags.turns)

    return view


def causal_mask(segment_ids: jax.Array) -> jax.Array:
    """Return the mask [B, T, T] bool by which a token looks back within its own segment.

    Segment ids are [B, T], 0 = padding. Padding attends to padding, so that no softmax is over an
    empty set.
    """
    t = segment_ids.shape[-1]
    same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
    return same_segment & jnp.tril(jnp.ones((t, t), bool))


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """Return cap tanh(x / cap), or x itself without a cap.

    Gemma 2, https://arxiv.org/abs/2408.00118.
    """
    return x if cap is None else cap * jnp.tanh(x / cap)


def scale(config: TransformerConfig) -> float:
    """Return the factor of the attention scores."""
    if config.attention_scale is not None:
        return config.attention_scale
    return (config.query_pre_attn_scalar or config.head_dim) ** -0.5


def attention(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute grouped-query softmax attention, with the softmax in float32.

    q [B, T, H, h]; k, v [B, K, S, h] (the cache layout); mask [B, T, S] bool, True = attend.
    Returns [B, T, H, h]. Ainslie et al., https://arxiv.org/abs/2305.13245. Sinks [H] are scores of
    no key, which take their share of the softmax (gpt-oss, https://arxiv.org/abs/2508.10925).
    """
    b, t, heads, hd = q.shape
    kv = k.shape[1]
    grouped = q.reshape(b, t, kv, heads // kv, hd)
    scores = einsum_float32("btkgh,bksh->bkgts", grouped, k)
    scores = softcap(scores * scale(config), config.attention_softcap)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], -1)
    probs = jax.nn.softmax(scores, axis=-1)[..., : k.shape[2]].astype(v.dtype)
    return jnp.einsum("bkgts,bksh->btkgh", probs, v).reshape(b, t, heads, hd)


def causal_attention(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute `attention` where no token looks ahead: blocks of queries, the keys up to their end.

    Five eighths of the products and of the scores kept for the backward pass, nearer a half in long
    rows, and a block's find room in a CPU's cache (docs/performance.md). mask [B, T, T].
    """
    size = min(max(-(-q.shape[1] // CAUSAL_BLOCKS), LEAST_CAUSAL_BLOCK), MOST_CAUSAL_BLOCK)
    blocks = []
    for start in range(0, q.shape[1], size):
        end = start + size
        block = attention(
            config,
            q[:, start:end],
            k[:, :, :end],
            v[:, :, :end],
            mask[:, start:end, :end],
            sinks,
        )
        blocks.append(block)
    return jnp.concatenate(blocks, axis=1)
