"""Layers that keep a state of fixed size in the place of attention to all that was.

Gated DeltaNet (Qwen3-Next, Qwen3.5) and gated short convolutions (LFM2). Trainer and sampler run
the same functions; what differs is only the `Recurrence` that they pass: the trainer's begins anew
with every segment of a packed row, the sampler's goes on from what a row has kept.

Shape legend: see `transformer.py`; and of the delta rule K key heads, V value heads, d key width,
e value width, W tokens of a convolution's window.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.models.architecture import TransformerConfig
from jaxrl.models.delta_rule import convolve, unit_length
from jaxrl.models.kernels.choice import REFERENCE
from jaxrl.models.kernels.delta_rule import delta_rule
from jaxrl.models.linear import LoraWeight, Weight, add_bias, project, rounded
from jaxrl.parallel.rules import Placement

Layer = dict[str, Any]
Spread = Callable[..., jax.Array]


class Recurrence(NamedTuple):
    """Hold how a layer that keeps a state goes through tokens.

    Attributes:
        convolve: (inputs [B, T, ...] each, kernels [..., W] each) -> outputs, see
            `delta_rule.convolve`.
        recur: (q, k, v, log_decay, strength) -> [B, T, V, e] float32, see `delta_rule.chunked`.
    """

    convolve: Callable[[Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]]
    recur: Callable[..., jax.Array]


def packed_recurrence(
    segment_ids: jax.Array, kernel: str = REFERENCE, placement: Placement | None = None
) -> Recurrence:
    """Return how packed rows [B, T] are gone through in training.

    Args:
        kernel: of `DELTA_RULE`.
        placement: see `delta_rule`.
    """

    def convolve_all(
        inputs: Sequence[jax.Array], kernels: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        return [convolve(x, w, segment_ids) for x, w in zip(inputs, kernels, strict=True)]

    def recur(
        q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, strength: jax.Array
    ) -> jax.Array:
        given = q, k, v, log_decay, strength, segment_ids
        return delta_rule(*given, kernel=kernel, placement=placement)

    return Recurrence(convolve_all, recur)


def gated_delta_net(
    config: TransformerConfig,
    layer: Layer,
    y: jax.Array,
    recurrence: Recurrence,
    spread: Spread,
    shards: int,
) -> jax.Array:
    """Compute a gated DeltaNet layer: [B, T, D] -> [B, T, D].

    Args:
        spread: (array, logical axes behind batch and seq) -> the array, spread over devices.
        shards: devices over which heads are split.
    """
    net, dtype = config.delta_net, y.dtype
    assert net is not None
    keys, values = (net.key_heads, net.key_dim), (net.value_heads, net.value_dim)
    if net.grouped:
        q, k, v, gate, strength, decay = _by_group(config, layer, y)
    else:
        q, k, v = _parts(layer["delta_qkv"], y, (keys, keys, values), shards)
        gate = project(y, layer["delta_gate"])
        strength, decay = (project(y, layer[name]) for name in ("delta_strength", "delta_decay"))
    q, k, v, gate = (spread(x, "heads", None) for x in (q, k, v, gate))
    strength, decay = spread(strength, "heads"), spread(decay, "heads")

    kernel, window = rounded(layer["delta_kernel"], dtype), net.window
    ends = (keys[0] * keys[1], 2 * keys[0] * keys[1])
    of_parts = [
        part.reshape(*shape, window)
        for part, shape in zip(jnp.split(kernel, ends), (keys, keys, values), strict=True)
    ]
    q, k, v = (jax.nn.silu(x) for x in recurrence.convolve((q, k, v), of_parts))
    q, k = unit_length(q) * net.key_dim**-0.5, unit_length(k)
    rate = jnp.exp(rounded(layer["delta_rate"], dtype).astype(jnp.float32))
    bias = rounded(layer["delta_bias"], dtype).astype(jnp.float32)
    log_decay = -rate * jax.nn.softplus(decay.astype(jnp.float32) + bias)
    strength = jax.nn.sigmoid(strength.astype(jnp.float32))
    out = recurrence.recur(q, k, v.astype(jnp.float32), log_decay, strength)

    scale = rounded(layer["delta_norm"], dtype)
    normed = out * jax.lax.rsqrt(jnp.mean(jnp.square(out), -1, keepdims=True) + config.rms_norm_eps)
    gated = normed * scale * jax.nn.silu(gate.astype(jnp.float32))
    return project(spread(gated.astype(dtype), "heads", None), layer["delta_out"], contract=2)


def _by_group(config: TransformerConfig, layer: Layer, y: jax.Array) -> list[jax.Array]:
    """Return q, k, v, the gate, strength and decay of matrices that have them by key head."""
    net = config.delta_net
    assert net is not None
    group = net.value_heads // net.key_heads
    wide = group * net.value_dim
    all_of_heads, both = project(y, layer["delta_qkvz"]), project(y, layer["delta_ba"])
    ends = (net.key_dim, 2 * net.key_dim, 2 * net.key_dim + wide)
    q, k, *valued = jnp.split(all_of_heads, ends, axis=-1)
    valued = [x.reshape(*y.shape[:2], net.value_heads, net.value_dim) for x in valued]
    halves = jnp.split(both, 2, axis=-1)
    return [q, k, *valued, *(x.reshape(*y.shape[:2], net.value_heads) for x in halves)]


def _parts(
    w: Weight, y: jax.Array, shapes: Sequence[tuple[int, int]], shards: int
) -> list[jax.Array]:
    """Multiply y by a matrix whose outputs are several parts, of (heads, width) each.

    In one product where a device computes all; else in one for each, which can be split by head.
    """
    ends, at = [], 0
    for heads, width in shapes:
        at += heads * width
        ends.append(at)
    if shards == 1:
        parts = jnp.split(project(y, w), ends[:-1], axis=-1)
    else:
        begins = (0, *ends[:-1])
        parts = [project(y, _columns(w, *span)) for span in zip(begins, ends, strict=True)]
    return [x.reshape(*y.shape[:2], *shape) for x, shape in zip(parts, shapes, strict=True)]


def _columns(w: Weight, begin: int, end: int) -> Weight:
    if isinstance(w, LoraWeight):
        return w.replace(w=w.w[:, begin:end], b=w.b[:, begin:end])
    return w[:, begin:end]


def short_convolution(
    config: TransformerConfig, layer: Layer, y: jax.Array, recurrence: Recurrence
) -> jax.Array:
    """Compute a gated short convolution: [B, T, D] -> [B, T, D]."""
    assert config.convolution is not None
    bias = config.convolution.bias
    all_parts = project(y, layer["conv_in"])
    if bias:
        all_parts = add_bias(all_parts, layer["conv_in_bias"])
    before, behind, x = jnp.split(all_parts, 3, axis=-1)
    (out,) = recurrence.convolve([before * x], [rounded(layer["conv_kernel"], y.dtype)])
    if bias:
        out = add_bias(out, layer["conv_kernel_bias"])
    out = project(behind * out, layer["conv_out"])
    return add_bias(out, layer["conv_out_bias"]) if bias else out
