"""Attention of one new token per row to the keys and values of its past.

Shape legend: B rows, S cache positions, H query heads, K key/value heads, h head width.
"""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl.models import decode_kernels
from jaxrl.models.attention import scale, softcap
from jaxrl.models.linear import einsum_float32
from jaxrl.parallel.rules import Placement
from jaxrl.types import Array

if TYPE_CHECKING:
    from jaxrl.models.transformer import TransformerConfig

# On the CPU small groups of query heads multiply and add; from here on they are matrix products.
CPU_DOT_GROUP = 5


def decode_attention(
    config: "TransformerConfig",
    q: Array,
    keys: Array,
    values: Array,
    mask: Array,
    placement: Placement | None = None,
) -> Array:
    """Compute `attention.attention` for one query per row, by a kernel where the platform has one.

    Keys lie transposed. On the CPU a product that runs along the minor dim of both arrays, or along
    the minor dim of neither, takes 3 to 7 times as long (docs/performance.md).

    Args:
        q: [B, 1, H, h].
        keys: [B, K, h, S]; values: [B, K, S, h].
        mask: [B, S] bool, True = attend; one run of True in a row. A row without one may give
            anything finite.
        placement: the mesh over whose batch and head axes rows and heads are split; None = one
            device.

    Returns:
        [B, 1, H, h].
    """
    rows, _, heads, width = q.shape
    grouped = q.reshape(rows, keys.shape[1], -1, width)
    run = functools.partial(_on_device, config)
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
    config: "TransformerConfig", q: Array, keys: Array, values: Array, mask: Array
) -> Array:
    """Attend with q [B, K, G, h], all of it on one device; return [B, K, G, h] float32."""
    settings = {"scale": scale(config), "cap": config.attention_softcap}
    kernels = {"tpu": decode_kernels.tpu_attention, "gpu": decode_kernels.gpu_attention}
    platforms = {
        {"gpu": "cuda"}.get(name, name): functools.partial(kernel, **settings)
        for name, kernel in kernels.items()
        if decode_kernels.fits(name, keys.shape[3], keys.shape[2])
    }
    plain = functools.partial(_plain, **settings)
    return jax.lax.platform_dependent(q, keys, values, mask, default=plain, **platforms)


def _plain(
    q: Array, keys: Array, values: Array, mask: Array, *, scale: float, cap: float | None
) -> Array:
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
