"""Softmax attention over packed rows in training, by the platform's fused kernel.

A fused kernel never writes the scores [B, H, T, S]: it goes through them in blocks and computes
them again in its backward pass (Dao, https://arxiv.org/abs/2307.08691). All of them are of
libraries that are kept: JAX's splash attention on the TPU, cuDNN and tokamax on the GPU. cuDNN's
public interface takes no segments; rows of one trajectory need none, as their padding lies at the
end, where no token of it looks. `chunked` is plain XLA without the scores, for all they cannot do.

Shape legend: B rows, T tokens, H query heads, K key/value heads, h head width.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.models.architecture import TransformerConfig
from jaxrl.models.attention import (
    CAUSAL_BLOCKS,
    Mask,
    Segments,
    attention,
    causal_attention,
    causal_mask,
    scale,
)
from jaxrl.models.kernels import tokamax_package
from jaxrl.models.kernels.choice import (
    AMPERE,
    HOPPER,
    REFERENCE,
    Facts,
    Implementation,
    Operation,
    at_least,
    no_sinks,
    unmet,
)
from jaxrl.parallel.rules import Placement

BLOCK = 128  # splash and tokamax take whole blocks of tokens
RTX_BLACKWELL = 11.0  # compute capability from which tokamax has no kernel
CHUNK = 256  # queries whose scores `chunked` holds at once


def training_mask(segment_ids: jax.Array, kernel: str) -> Mask:
    """Return what `self_attention` of a kernel masks with; only the plain one needs [B, T, T]."""
    return causal_mask(segment_ids) if kernel == REFERENCE else Segments(segment_ids, False)


def self_attention(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    sinks: jax.Array | None = None,
    *,
    kernel: str = REFERENCE,
    placement: Placement | None = None,
) -> jax.Array:
    """Compute causal attention within segments, for training: `attention`, by any kernel.

    Args:
        q, k, v: [B, T, H, h], [B, K, T, h] twice.
        mask: `training_mask` of the kernel.
        sinks: see `attention`.
        kernel: of `PACKED_ATTENTION`.
        placement: the mesh over whose batch and head axes a fused kernel is split, as the compiler
            cannot split it; None = one device.

    Returns:
        [B, T, H, h].
    """
    run = functools.partial(PACKED_ATTENTION.implementations[kernel].run, config)
    scores = () if sinks is None else (sinks,)
    if kernel == REFERENCE or placement is None:
        return run(q, k, v, mask, *scores)
    assert isinstance(mask, Segments)
    rows, _, heads, _ = placement.spec(q.shape, ("batch", None, "heads", None))
    if placement.spec(k.shape, ("batch", "kv_heads", None, None))[1] != heads:
        heads = None  # a device's query heads would miss their keys
    q_spec, kv_spec = PartitionSpec(rows, None, heads), PartitionSpec(rows, heads)
    mask_spec = Segments(PartitionSpec(rows), PartitionSpec())  # type: ignore[arg-type]
    return jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=(q_spec, kv_spec, kv_spec, mask_spec, *(PartitionSpec(heads) for _ in scores)),
        out_specs=q_spec,
        check_vma=False,  # a kernel does not say over which axes its output varies
    )(q, k, v, mask._replace(sliding=jnp.asarray(mask.sliding)), *scores)


# ---------------------------------------------------------------- TPU


def splash(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute `attention` by JAX's kernel for TPUs; `interpret` runs it anywhere, for tests.

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


def splash_over(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    order: np.ndarray,
    placement: Placement,
    axes: tuple[Any, str, Any],
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute `splash` of rows that are spread over devices, each with its queries and all keys.

    Args:
        q, k, v: [B, S, H, h], [B, K, S, h] twice, in the order of places.
        segments: ids [B, S].
        order: [S] which token of a row stands at each place.
        axes: over which rows, places and heads are spread.

    Returns:
        [B, S, H, h].
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    rows, seq, heads = axes
    mesh, places = placement.mesh, q.shape[1]
    parts, place = mesh.shape[seq], np.argsort(order)
    block = next(b for b in (512, 256, BLOCK) if places // parts % b == 0)
    scaled = (q * jnp.asarray(scale(config), q.dtype)).transpose(0, 2, 1, 3)

    def run(make: Callable[[], splash_attention_mask.Mask]) -> Callable[[], jax.Array]:
        mask: Any = make()
        mask.q_sequence = order  # the keys lie in the order of tokens
        kernel: Any = splash_attention_kernel.make_splash_mha(
            mask=splash_attention_mask.MultiHeadMask([mask] * q.shape[2]),
            block_sizes=_splash_blocks(block),
            attn_logits_soft_cap=config.attention_softcap,
            residual_checkpoint_name="attention",
            head_shards=placement.size(heads),
            q_seq_shards=parts,
            interpret=interpret,
        )
        spec = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(heads, seq)))

        def on_device(kernel: Any, q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
            k, v = (jax.lax.all_gather(x, seq, axis=2, tiled=True)[:, :, place] for x in (k, v))
            every = jax.lax.all_gather(ids, seq, axis=1, tiled=True)[:, place]
            both = splash_attention_kernel.SegmentIds(ids, every)
            return jax.vmap(kernel)(q, k, v, both)

        held = PartitionSpec(rows, heads, seq)
        spread = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(spec, held, held, held, PartitionSpec(rows, seq)),
            out_specs=held,
            check_vma=False,
        )
        return lambda: spread(kernel, scaled, k, v, segments.ids)

    shape = places, places
    causal = run(lambda: splash_attention_mask.CausalMask(shape, shard_count=parts))
    if config.sliding_window is None:
        out = causal()
    else:
        window = (config.sliding_window - 1, 0)
        local = run(lambda: splash_attention_mask.LocalMask(shape, window, 0, shard_count=parts))
        out = jax.lax.cond(segments.sliding, local, causal)
    return out.transpose(0, 2, 1, 3)


def splash_near(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ids: jax.Array,
    key_ids: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute `splash` within the window where more keys come in front of the queries' own.

    Args:
        q, k, v: [B, T, H, h], [B, K, S, h] twice; the last T of the S keys are of the queries'
            tokens. `BLOCK` divides T and S.
        ids, key_ids: segments [B, T] and [B, S].
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    assert config.sliding_window is not None
    shape = q.shape[1], k.shape[2]
    window, offset = (config.sliding_window - 1, 0), k.shape[2] - q.shape[1]
    block = next(b for b in (512, 256, BLOCK) if all(n % b == 0 for n in shape))
    mask = splash_attention_mask.LocalMask(shape, window, offset)
    kernel: Any = splash_attention_kernel.make_splash_mha_single_device(
        mask=splash_attention_mask.MultiHeadMask([mask] * q.shape[2]),
        block_sizes=_splash_blocks(block),
        attn_logits_soft_cap=config.attention_softcap,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )
    scaled = (q * jnp.asarray(scale(config), q.dtype)).transpose(0, 2, 1, 3)
    segments = splash_attention_kernel.SegmentIds(ids, key_ids)
    return jax.vmap(kernel)(scaled, k, v, segments).transpose(0, 2, 1, 3)


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


def _pad(x: jax.Array, axis: int, block: int = BLOCK) -> jax.Array:
    """Pad the end of an axis with zeros, to whole blocks; as tokens they are padding, segment 0."""
    missing = -x.shape[axis] % block
    return jnp.pad(x, [(0, missing if d == axis else 0) for d in range(x.ndim)])


def _splash_needs(facts: Facts) -> list[str]:
    assert facts.model is not None
    width = facts.model.head_dim
    divides = width % 64 == 0, f"a head_dim that 64 divides, not {width}"
    return unmet([divides, no_sinks(facts.model)])


# ---------------------------------------------------------------- GPU


def cudnn(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    implementation: str = "cudnn",
) -> jax.Array:
    """Compute `attention` for rows of one segment, each followed by nothing but padding.

    Args:
        q, k, v: [B, T, H, h], [B, K, T, h] twice.
        segments: only `sliding` is read: a token that looks back meets its own segment alone.
        implementation: of `jax.nn.dot_product_attention`; "xla" runs anywhere, for tests.
    """
    run = functools.partial(
        jax.nn.dot_product_attention,
        q,
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        scale=scale(config),
        is_causal=True,
        implementation=implementation,  # type: ignore[arg-type]
    )
    if config.sliding_window is None:
        return run()
    local = functools.partial(run, local_window_size=(config.sliding_window - 1, 0))
    return jax.lax.cond(segments.sliding, local, run)


def _cudnn_needs(facts: Facts) -> list[str]:
    assert facts.model is not None
    width, widest = facts.model.head_dim, 256 if at_least(facts, HOPPER) else 128
    return unmet(
        [
            (
                at_least(facts, AMPERE),
                f"an Ampere GPU or later, not compute capability {facts.capability}",
            ),
            (not facts.packed, "trainer.use_sample_packing=False"),
            (facts.dtype == jnp.bfloat16, "trainer.bf16=True"),
            (
                width <= widest and width % 8 == 0,
                f"a head_dim that 8 divides, of at most {widest}, not {width}",
            ),
            (facts.model.attention_softcap is None, "a model without attention softcap"),
            no_sinks(facts.model),
        ]
    )


def tokamax(
    config: TransformerConfig, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments
) -> jax.Array:
    """Compute `attention` by tokamax's kernel for Hopper, which knows where a query's keys begin.

    q [B, T, H, h]; k, v [B, K, T, h]; returns [B, T, H, h].
    """
    from tokamax._src.ops.attention.base import Mask as Bounds  # pyright: ignore
    from tokamax._src.ops.attention.pallas_mosaic_gpu import (  # pyright: ignore
        PallasMosaicGpuFlashAttention,
    )

    tokamax_package.prepare()
    t = q.shape[1]  # of tokamax 0.0.12 a whole number of blocks
    q, k, v = _pad(q, axis=1), _pad(k, axis=2), _pad(v, axis=2)
    first = _pad(first_keys(config, segments), axis=1)[:, None]
    out: Any = PallasMosaicGpuFlashAttention()(
        q,
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        logits_scale=scale(config),
        logits_soft_cap=config.attention_softcap,
        mask=Bounds(k_start=first, is_causal=True),
    )
    return out[:, :t]


def first_keys(config: TransformerConfig, segments: Segments) -> jax.Array:
    """Return the first key that each token sees [B, T]: of its segment, or of its window."""
    ids = segments.ids
    place = jnp.arange(ids.shape[1], dtype=jnp.int32)
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first = jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
    if config.sliding_window is None:
        return first
    near = jnp.maximum(first, place - config.sliding_window + 1)
    return jnp.where(segments.sliding, near, first)


def _tokamax_needs(facts: Facts) -> list[str]:
    assert facts.model is not None
    width = facts.model.head_dim
    return tokamax_package.missing() + unmet(
        [
            (
                facts.capability is None or HOPPER <= facts.capability < RTX_BLACKWELL,
                f"a Hopper GPU or a B200, not compute capability {facts.capability}",
            ),
            (facts.dtype == jnp.bfloat16, "trainer.bf16=True"),
            (width in (64, 128, 256), f"a head_dim of 64, 128 or 256, not {width}"),
            no_sinks(facts.model),
        ]
    )


# ---------------------------------------------------------------- any platform


def chunked(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute `attention` in plain XLA, with the scores of few queries at once, twice.

    Again in the backward pass: what it keeps is its input. Queries of each quarter of a row see the
    keys up to its end. q [B, T, H, h]; k, v [B, K, T, h]; returns [B, T, H, h].
    """
    rows, t, heads, width = q.shape
    padded = _pad(q, axis=1, block=CHUNK)
    first = _pad(first_keys(config, segments), axis=1, block=CHUNK)
    parts = padded.shape[1] // CHUNK
    by_part = padded.reshape(rows, parts, CHUNK, heads, width).swapaxes(0, 1)
    first = first.reshape(rows, parts, CHUNK).swapaxes(0, 1)
    place = jnp.arange(parts * CHUNK).reshape(parts, CHUNK)

    @jax.checkpoint
    def part(
        keys: jax.Array, values: jax.Array, given: tuple[jax.Array, jax.Array, jax.Array]
    ) -> jax.Array:
        queries, first, place = given
        at = jnp.arange(keys.shape[2])
        mask = (at >= first[:, :, None]) & (at <= place[:, None])
        return attention(config, queries, keys, values, mask, sinks)

    quarter, done = -(-parts // CAUSAL_BLOCKS), []
    for start in range(0, parts, quarter):
        some, end = slice(start, start + quarter), (start + quarter) * CHUNK
        run = functools.partial(part, k[:, :, :end], v[:, :, :end])
        done.append(jax.lax.map(run, (by_part[some], first[some], place[some])))
    out = jnp.concatenate(done).swapaxes(0, 1)
    return out.reshape(rows, parts * CHUNK, heads, width)[:, :t]


PACKED_ATTENTION = Operation(
    "packed_attention",
    "attention within segments, in training and scoring",
    {
        "splash": Implementation(splash, _splash_needs, "64 divides head_dim, no sinks"),
        "cudnn": Implementation(
            cudnn,
            _cudnn_needs,
            "rows are not packed, Ampere or later, bf16, 8 divides head_dim, head_dim <= 256 (128 "
            "before Hopper), no soft cap, no sinks",
        ),
        "tokamax": Implementation(
            tokamax,
            _tokamax_needs,
            "tokamax, Hopper or B200, bf16, head_dim 64, 128 or 256, no sinks",
        ),
        "chunked": Implementation(chunked),
        REFERENCE: Implementation(causal_attention),
    },
    {
        "tpu": ("splash", "chunked", REFERENCE),
        "gpu": ("cudnn", "tokamax", "chunked", REFERENCE),
        "cpu": (REFERENCE, "chunked"),
    },
)
