"""Attention of one new token per row to the keys and values of its past.

Shape legend: B rows, S cache positions, H query heads, K key/value heads, h head width.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl.models.architecture import TransformerConfig
from jaxrl.models.attention import scale, softcap
from jaxrl.models.kernels import decode_kernels
from jaxrl.models.kernels.choice import (
    AMPERE,
    HOPPER,
    REFERENCE,
    Facts,
    Implementation,
    Operation,
    at_least,
    unmet,
)
from jaxrl.models.linear import einsum_float32
from jaxrl.parallel.rules import Placement
from jaxrl.types import Array

# On the CPU small groups of query heads multiply and add; from here on they are matrix products.
CPU_DOT_GROUP = 5


def decode_attention(
    config: TransformerConfig,
    q: Array,
    keys: Array,
    values: Array,
    mask: Array,
    placement: Placement | None = None,
    kernel: str | None = None,
    *,
    transposed: bool,
) -> Array:
    """Compute `attention.attention` for one query per row, by a kernel where the platform has one.

    Args:
        q: [B, 1, H, h].
        values: [B, K, S, h]; keys too, or [B, K, h, S] where `transposed`.
        mask: [B, S] bool, True = attend; one run of True in a row. A row without one may give
            anything finite.
        placement: the mesh over whose batch and head axes rows and heads are split; None = one
            device.
        kernel: of `DECODE_ATTENTION`; None = the TPU's where it is compiled for one, else "xla".

    Returns:
        [B, 1, H, h].
    """
    rows, _, heads, width = q.shape
    grouped = q.reshape(rows, keys.shape[1], -1, width)
    run = functools.partial(_on_device, config, kernel, transposed)
    if placement is not None:
        by_row, by_head, *_ = placement.spec(grouped.shape, ("batch", "kv_heads", None, None))
        split = PartitionSpec(by_row, by_head)
        run = jax.shard_map(
            run,
            mesh=placement.mesh,
            in_specs=(split, split, split, PartitionSpec(by_row)),
            out_specs=split,
            check_vma=False,  # a kernel does not say over which axes its output varies
        )
    out = run(grouped, keys, values, mask)
    return out.astype(values.dtype).reshape(rows, 1, heads, width)


def _on_device(
    config: TransformerConfig,
    kernel: str | None,
    transposed: bool,
    q: Array,
    keys: Array,
    values: Array,
    mask: Array,
) -> Array:
    """Attend with q [B, K, G, h], all of it on one device; return [B, K, G, h] float32."""
    settings = {"scale": scale(config), "cap": config.attention_softcap, "transposed": transposed}
    if kernel == "cudnn":  # can be traced only where cuDNN is: no branch for some platform
        windows = config.sliding_window is not None
        return cudnn(q, keys, values, mask, **settings, windows=windows)
    on_tpu = decode_kernel(Facts("tpu", keys.dtype, config), kernel) != REFERENCE
    kernels = {}
    if on_tpu and values.shape[2] % decode_kernels.POSITIONS == 0:
        kernels["tpu"] = functools.partial(decode_kernels.tpu_attention, **settings)
    plain = functools.partial(_plain, **settings)
    return jax.lax.platform_dependent(q, keys, values, mask, default=plain, **kernels)


def _plain(
    q: Array,
    keys: Array,
    values: Array,
    mask: Array,
    *,
    scale: float,
    cap: float | None,
    transposed: bool,
) -> Array:
    keys = keys if transposed else keys.swapaxes(2, 3)
    products = {"cpu": _multiply_and_add} if q.shape[2] < CPU_DOT_GROUP else {}
    scores = jax.lax.platform_dependent(q, keys, default=_product, **products)
    scores = softcap(scores * scale, cap)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    probs = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jax.lax.platform_dependent(probs, values, default=_product, **products)


def _product(x: Array, y: Array) -> Array:
    """Multiply x [B, K, G, a] by y [B, K, a, b] -> [B, K, G, b], float32."""
    return einsum_float32("bkgs,bksh->bkgh", x, y)


def _multiply_and_add(x: Array, y: Array) -> Array:
    products = x[..., None].astype(jnp.float32) * y[:, :, None].astype(jnp.float32)
    return products.sum(-2)


def decode_kernel(facts: Facts, named: str | None = None) -> str:
    """Return the name of the implementation that a device has.

    A named one is not asked what it misses; platforms that do not have it have the reference.
    """
    if named is None:
        return DECODE_ATTENTION.choose(facts).name
    return named if named in DECODE_ATTENTION.order.get(facts.platform, ()) else REFERENCE


def cudnn(
    q: Array,
    keys: Array,
    values: Array,
    mask: Array,
    *,
    scale: float,
    cap: float | None,
    transposed: bool,
    windows: bool,
    implementation: str = "cudnn",
) -> Array:
    """Attend by cuDNN, which reads a row's keys up to the last position in use.

    A key head with its queries is a row of its own there: so the cache lies as cuDNN wants it, and
    is not copied.

    Args:
        q, keys, values, mask, scale, transposed: see `decode_kernels.tpu_attention`.
        cap: None.
        windows: the first positions of a row may not be in use.
        implementation: of `jax.nn.dot_product_attention`; "xla" runs anywhere, for tests.

    Returns:
        [B, K, G, h] float32.
    """
    assert cap is None
    rows, heads, group, width = q.shape
    keys = keys.swapaxes(2, 3) if transposed else keys
    flat = rows * heads
    ends = jnp.where(mask, jnp.arange(1, mask.shape[1] + 1, dtype=jnp.int32), 1).max(1)
    out = jax.nn.dot_product_attention(
        q.reshape(flat, 1, group, width),
        keys.reshape(flat, -1, 1, width),
        values.reshape(flat, -1, 1, width),
        mask=jnp.repeat(mask, heads, axis=0)[:, None, None] if windows else None,
        key_value_seq_lengths=jnp.repeat(ends, heads),
        scale=scale,
        implementation=implementation,  # type: ignore[arg-type]
    )
    return out.reshape(q.shape).astype(jnp.float32)


def _cudnn_needs(facts: Facts) -> list[str]:
    assert facts.model is not None
    width, widest = facts.model.head_dim, 256 if at_least(facts, HOPPER) else 128
    return unmet(
        [
            (
                at_least(facts, AMPERE),
                f"an Ampere GPU or later, not compute capability {facts.capability}",
            ),
            (facts.dtype == jnp.bfloat16, "an engine in bfloat16"),
            (
                width <= widest and width % 8 == 0,
                f"a head_dim that 8 divides, of at most {widest}, not {width}",
            ),
            (facts.model.attention_softcap is None, "a model without attention softcap"),
        ]
    )


def _tpu_needs(facts: Facts) -> list[str]:
    assert facts.model is not None
    width = facts.model.head_dim
    return unmet([(width % 64 == 0, f"a head_dim that 64 divides, not {width}")])


DECODE_ATTENTION = Operation(
    "decode_attention",
    "attention of one new token of each row to its cache",
    {
        "pallas": Implementation(decode_kernels.tpu_attention, _tpu_needs, "64 divides head_dim"),
        "cudnn": Implementation(
            cudnn,
            _cudnn_needs,
            "Ampere or later, bfloat16, 8 divides head_dim, head_dim <= 256 (128 before Hopper), "
            "no soft cap",
        ),
        REFERENCE: Implementation(_plain),
    },
    {"tpu": ("pallas", REFERENCE), "gpu": ("cudnn", REFERENCE)},
)
