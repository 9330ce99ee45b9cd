"""Attention of one new token per row to the keys and values of its past.

Shape legend: B rows, S cache positions, H query heads, K key/value heads, h head width.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxrl.models.attention import scale, softcap
from jaxrl.types import Array

if TYPE_CHECKING:
    from jaxrl.models.transformer import TransformerConfig

# On the CPU small groups of query heads multiply and add; from here on they are matrix products.
CPU_DOT_GROUP = 5


def decode_attention(
    config: "TransformerConfig", q: Array, keys: Array, values: Array, mask: Array
) -> Array:
    """`attention.attention` for one query per row.

    Keys lie transposed. On the CPU a product that runs along the minor dim of both arrays, or along
    the minor dim of neither, takes 3 to 7 times as long (docs/performance.md).

    Args:
        q: [B, 1, H, h].
        keys: [B, K, h, S]; values: [B, K, S, h].
        mask: [B, S] bool, True = attend.

    Returns:
        [B, 1, H, h].
    """
    rows, _, heads, width = q.shape
    grouped = q.reshape(rows, keys.shape[1], -1, width)
    products = {"cpu": _multiply_and_add} if grouped.shape[2] < CPU_DOT_GROUP else {}
    scores = jax.lax.platform_dependent(grouped, keys, default=_product, **products)
    scores = softcap(scores * scale(config), config.attention_softcap)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    probs = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    out = jax.lax.platform_dependent(probs, values, default=_product, **products)
    return out.astype(values.dtype).reshape(rows, 1, heads, width)


def _product(x: Array, y: Array) -> Array:
    """x [B, K, G, a] times y [B, K, a, b] -> [B, K, G, b], float32."""
    batch = ((0, 1), (0, 1))
    return jax.lax.dot_general(x, y, (((3,), (2,)), batch), preferred_element_type=jnp.float32)


def _multiply_and_add(x: Array, y: Array) -> Array:
    products = x[..., None].astype(jnp.float32) * y[:, :, None].astype(jnp.float32)
    return products.sum(-2)
