"""Softmax attention over packed rows: the plain one, and the fused kernels of TPU and GPU.

Shape legend: B rows, T tokens, S keys, H query heads, K key/value heads, h head width.

A fused kernel never writes the scores [B, H, T, S]: it goes through them in blocks and computes
them again in its backward pass (Dao, https://arxiv.org/abs/2307.08691). On the TPU that is JAX's
splash attention, on the GPU JAX's Pallas-Triton kernel: cuDNN's is faster there, but takes no
segment ids, and its packed form is no public interface of JAX. The CPU has none.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl.models.architecture import TransformerConfig
from jaxrl.models.linear import einsum_float32
from jaxrl.models.rope import rotary
from jaxrl.parallel.rules import Placement

BLOCK = 128  # the kernels take whole blocks of tokens
# Of queries. Eight blocks instead of four: the same at 192 tokens, 335 instead of 411 ms at 512
# (LOG.md), and twice the operations to compile.
CAUSAL_BLOCKS, LEAST_CAUSAL_BLOCK = 4, 32
KERNEL_OF_PLATFORM = {"tpu": "splash", "gpu": "triton", "cuda": "triton"}


class Segments(NamedTuple):
    """Hold what a fused kernel takes in place of a mask: look back within one's own segment."""

    ids: jax.Array  # [B, T] int, 0 = padding
    sliding: jax.Array | bool  # [] bool, whether the layer slides


Mask = jax.Array | Segments  # [B, T, S] bool, True = attend
Attend = Callable[[jax.Array, jax.Array, jax.Array, Mask], jax.Array]


class View(NamedTuple):
    """Hold what a layer knows of positions: mask; cos, sin [B, T, 1, h / 2]."""

    mask: Mask
    cos: jax.Array
    sin: jax.Array


def layer_views(
    config: TransformerConfig, mask: Mask, positions: jax.Array, key_positions: jax.Array
) -> Callable[[jax.Array | bool], View]:
    """Return a function from whether a layer slides to its view; both are computed once, here.

    mask [B, T, S] bool, or segments; positions [B, T] and key_positions [B or 1, S] int.
    """
    c = config
    full = View(mask, *rotary(positions, c.head_dim, c.rope_theta, c.rope_scaling))
    if c.sliding_window is None:
        return lambda sliding: full
    if isinstance(mask, Segments):
        near: Mask = mask._replace(sliding=True)
    else:
        near = mask & (positions[:, :, None] - key_positions[:, None, :] < c.sliding_window)
    local = full._replace(mask=near)
    if c.local_rope_theta is not None:
        local = View(near, *rotary(positions, c.head_dim, c.local_rope_theta, None))
    return lambda sliding: jax.tree.map(functools.partial(jnp.where, sliding), local, full)


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
    return (config.query_pre_attn_scalar or config.head_dim) ** -0.5


def attention(
    config: TransformerConfig, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> jax.Array:
    """Compute grouped-query softmax attention, with the softmax in float32.

    q [B, T, H, h]; k, v [B, K, S, h] (the cache layout); mask [B, T, S] bool, True = attend.
    Returns [B, T, H, h]. Ainslie et al., https://arxiv.org/abs/2305.13245.
    """
    b, t, heads, hd = q.shape
    kv = k.shape[1]
    grouped = q.reshape(b, t, kv, heads // kv, hd)
    scores = einsum_float32("btkgh,bksh->bkgts", grouped, k)
    scores = softcap(scores * scale(config), config.attention_softcap)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bksh->btkgh", probs, v).reshape(b, t, heads, hd)


def causal_attention(
    config: TransformerConfig, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> jax.Array:
    """Compute `attention` where no token looks ahead: blocks of queries, the keys up to their end.

    Five eighths of the products and of the scores kept for the backward pass, which then find room
    in a CPU's cache (docs/performance.md). mask [B, T, T].
    """
    size = max(-(-q.shape[1] // CAUSAL_BLOCKS), LEAST_CAUSAL_BLOCK)
    blocks = []
    for start in range(0, q.shape[1], size):
        end = start + size
        block = attention(
            config,
            q[:, start:end],
            k[:, :, :end],
            v[:, :, :end],
            mask[:, start:end, :end],
        )
        blocks.append(block)
    return jnp.concatenate(blocks, axis=1)


def choose_kernel(
    config: TransformerConfig, flash_attn: bool, platform: str, dtype: jnp.dtype
) -> str:
    """Choose the kernel of `trainer.flash_attn` on a platform: "xla" (plain), "splash" or "triton".

    Raises:
        ValueError: the platform's kernel cannot run this model.
    """
    kernel = KERNEL_OF_PLATFORM.get(platform, "xla") if flash_attn else "xla"
    if missing := kernel_needs(config, kernel, dtype):
        raise ValueError(
            f"trainer.flash_attn=True: the {platform} kernel needs {' and '.join(missing)}; set "
            "trainer.flash_attn=False for plain attention"
        )
    return kernel


def kernel_needs(config: TransformerConfig, kernel: str, dtype: jnp.dtype) -> list[str]:
    """List what a kernel wants of a model and does not find, in words; empty: it can run it."""
    limits = {
        "splash": [
            (config.head_dim % 64 == 0, f"a head_dim that 64 divides, not {config.head_dim}")
        ],
        "triton": [
            (config.head_dim <= 128, f"a head_dim of at most 128, not {config.head_dim}"),
            (dtype == jnp.bfloat16, "trainer.bf16=True"),
            (config.attention_softcap is None, "a model without attention softcap"),
            (config.sliding_window is None, "a model without sliding window"),
        ],
    }
    return [need for holds, need in limits.get(kernel, []) if not holds]


def training_mask(segment_ids: jax.Array, kernel: str) -> Mask:
    """Return what `self_attention` of a kernel masks with; only the plain one needs [B, T, T]."""
    return causal_mask(segment_ids) if kernel == "xla" else Segments(segment_ids, False)


def self_attention(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    *,
    kernel: str = "xla",
    placement: Placement | None = None,
) -> jax.Array:
    """Compute causal attention within segments, for training: `attention`, by any kernel.

    Args:
        q, k, v: [B, T, H, h], [B, K, T, h] twice.
        mask: `training_mask` of the kernel.
        kernel: "xla", "splash" (TPU) or "triton" (GPU).
        placement: the mesh over whose batch and head axes a fused kernel is split, as the compiler
            cannot split it; None = one device.

    Returns:
        [B, T, H, h].
    """
    if not isinstance(mask, Segments):
        return causal_attention(config, q, k, v, mask)
    run = functools.partial({"splash": splash, "triton": triton}[kernel], config)
    if placement is None:
        return run(q, k, v, mask)
    rows, _, heads, _ = placement.spec(q.shape, ("batch", None, "heads", None))
    if placement.spec(k.shape, ("batch", "kv_heads", None, None))[1] != heads:
        heads = None  # a device's query heads would miss their keys
    q_spec, kv_spec = PartitionSpec(rows, None, heads), PartitionSpec(rows, heads)
    mask_spec = Segments(PartitionSpec(rows), PartitionSpec())  # type: ignore[arg-type]
    return jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=(q_spec, kv_spec, kv_spec, mask_spec),
        out_specs=q_spec,
        check_vma=False,  # a kernel does not say over which axes its output varies
    )(q, k, v, mask._replace(sliding=jnp.asarray(mask.sliding)))


def splash(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute `attention` by the TPU's kernel; `interpret` runs it anywhere, slowly, for tests.

    Layers that slide skip the blocks outside their window. q [B, T, H, h]; k, v [B, K, T, h];
    returns [B, T, H, h].
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    t, heads = q.shape[1:3]
    scaled = (q * jnp.asarray(scale(config), q.dtype)).transpose(0, 2, 1, 3)
    q, k, v = (_pad(x, axis=2) for x in (scaled, k, v))
    ids = _pad(segments.ids, axis=1)
    shape = (ids.shape[1], ids.shape[1])
    block = next(b for b in (512, 256, BLOCK) if shape[0] % b == 0)

    def run(mask: splash_attention_mask.Mask) -> Callable[[], jax.Array]:
        kernel: Any = splash_attention_kernel.make_splash_mha_single_device(
            mask=splash_attention_mask.MultiHeadMask([mask] * heads),
            block_sizes=_splash_blocks(block),
            attn_logits_soft_cap=config.attention_softcap,
            residual_checkpoint_name="attention",
            interpret=interpret,
        )
        both = splash_attention_kernel.SegmentIds(ids, ids)
        return lambda: jax.vmap(kernel)(q, k, v, both)

    causal = run(splash_attention_mask.CausalMask(shape))
    if config.sliding_window is None:
        out = causal()
    else:
        window = (config.sliding_window - 1, 0)
        local = run(splash_attention_mask.LocalMask(shape, window, offset=0))
        out = jax.lax.cond(segments.sliding, local, causal)
    return out.transpose(0, 2, 1, 3)[:, :t]


def _splash_blocks(block: int) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )


def triton(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute `attention` by the GPU's kernel, which wants as many key heads as query heads.

    q [B, T, H, h]; k, v [B, K, T, h]; returns [B, T, H, h].
    """
    from jax.experimental.pallas.ops.gpu.attention import mha

    t, group = q.shape[1], q.shape[2] // k.shape[1]
    keys, values = (jnp.repeat(x, group, axis=1).transpose(0, 2, 1, 3) for x in (k, v))
    out: Any = mha(
        _pad(q, axis=1),
        _pad(keys, axis=1),
        _pad(values, axis=1),
        _pad(segments.ids, axis=1),
        sm_scale=scale(config),
        causal=True,
        interpret=interpret,
    )
    return out[:, :t]


def _pad(x: jax.Array, axis: int) -> jax.Array:
    """Pad the end of an axis with zeros, to whole blocks; as tokens they are padding, segment 0."""
    missing = -x.shape[axis] % BLOCK
    return jnp.pad(x, [(0, missing if d == axis else 0) for d in range(x.ndim)])
