"""Attention of the exact mode: in training as the sampler has it, from tiles of queries to pages.

See `models/exact.py`. The gradient is that of the platform's kernel: the promise is about values.

Shape legend: B rows, T tokens, H query heads, K key/value heads, h head width, p keys of a page.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl.models.architecture import TransformerConfig
from jaxrl.models.attention import Segments, causal_mask, scale, softcap
from jaxrl.models.exact import Tiles, alone, each, in_pairs
from jaxrl.models.kernels.choice import REFERENCE
from jaxrl.models.kernels.packed_attention import PACKED_ATTENTION
from jaxrl.models.kernels.paged_attention import Pages, layout_of, paged_attention
from jaxrl.parallel.rules import Placement


def exact_attention(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Segments,
    sinks: jax.Array | None = None,
    *,
    tiles: Tiles,
    kernel: str = REFERENCE,
    placement: Placement | None = None,
) -> jax.Array:
    """Attend within rows of one segment, which begins with the row.

    Args:
        q, k, v: [B, T, H, h], [B, K, T, h] twice.
        mask: whose ids [B, T] are above 0 for the tokens of the row.
        sinks: see `attention`.
        kernel: of `PACKED_ATTENTION`, whose gradient it is.
        placement: the mesh that rows and heads are split over; None = one device.

    Returns:
        [B, T, H, h].
    """
    scores = () if sinks is None else (sinks,)
    sliding = jnp.asarray(mask.sliding)
    run = functools.partial(_attend, config, tiles, kernel)
    if placement is None or placement.mesh.size == 1:
        return run(q, k, v, mask.ids, sliding, scores)
    rows, _, heads, _ = placement.spec(q.shape, ("batch", None, "heads", None))
    if placement.spec(k.shape, ("batch", "kv_heads", None, None))[1] != heads:
        heads = None  # a device's query heads would miss their keys
    rows = PartitionSpec(placement.batch_axes)
    asks, held = PartitionSpec(*rows, None, heads), PartitionSpec(*rows, heads)
    return jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=(asks, held, held, rows, PartitionSpec(), PartitionSpec(heads)),
        out_specs=asks,
        check_vma=False,
    )(q, k, v, mask.ids, sliding, scores)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(
    config: TransformerConfig,
    tiles: Tiles,
    kernel: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ids: jax.Array,
    sliding: jax.Array,
    sinks: tuple[jax.Array, ...],
) -> jax.Array:
    del kernel
    rows, length = ids.shape
    room = (0, 0), (0, -length % tiles.page), (0, 0), (0, 0)
    q, k, v = (jnp.pad(x, room) for x in (q, k.swapaxes(1, 2), v.swapaxes(1, 2)))
    padded = q.shape[1]
    columns, asks = padded // tiles.page, padded // tiles.queries
    layout = layout_of(tiles.platform, config)
    number, at = rows * columns, jnp.arange(rows * padded)
    empty = Pages.empty(config, number, tiles.page, k.dtype, layout=layout, heads=k.shape[2])
    flat = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    pages = empty.write(at // tiles.page, at % tiles.page, *flat)
    table = jnp.repeat(jnp.arange(rows * columns).reshape(rows, columns), asks, axis=0)
    begin = jnp.tile(jnp.arange(0, padded, tiles.queries), rows)
    lengths = jnp.repeat((ids > 0).sum(axis=1), asks)
    out = paged_attention(
        config,
        q.reshape(rows * asks, tiles.queries, *q.shape[2:]),
        pages,
        table,
        jnp.where(begin < lengths, begin, -1),
        *sinks,
        sliding=sliding,
        tiles=tiles,
    )
    return out.reshape(q.shape)[:, :length]


def _keep(config: TransformerConfig, tiles: Tiles, kernel: str, *given: Any) -> tuple:
    return _attend(config, tiles, kernel, *given), given


def _backward(
    config: TransformerConfig, tiles: Tiles, kernel: str, given: tuple, cotangent: jax.Array
) -> tuple:
    q, k, v, ids, sliding, sinks = given
    none = (np.zeros(np.shape(x), jax.dtypes.float0) for x in (ids, sliding))
    if tiles.full:
        pull = functools.partial(_pull_row, config)

        def of_row(row: tuple) -> tuple:
            return alone(pull, *row, sinks, jnp.asarray(sliding))

        *found, for_sinks = jax.lax.map(of_row, (q, k, v, ids, cotangent))
        return *found, *none, jax.tree.map(in_pairs, for_sinks)
    mask: Any = Segments(ids, sliding)
    if kernel == REFERENCE:
        mask = causal_mask(ids) & _near(config, ids.shape[1], sliding)
    run = PACKED_ATTENTION.implementations[kernel].run
    _, pull = jax.vjp(lambda q, k, v, sinks: run(config, q, k, v, mask, *sinks), q, k, v, sinks)
    *found, for_sinks = pull(cotangent)
    return *found, *none, for_sinks


def _near(config: TransformerConfig, length: int, sliding: jax.Array | bool) -> jax.Array:
    """Return which keys are in the window of a query [T, T] bool."""
    at = jnp.arange(length)
    window = length if config.sliding_window is None else config.sliding_window
    return (at[:, None] - at < window) | ~jnp.asarray(sliding)


def _pull_row(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ids: jax.Array,
    cotangent: jax.Array,
    sinks: tuple[jax.Array, ...],
    sliding: jax.Array,
) -> tuple:
    """Return the gradients of one row, head by head, in one order on every mesh.

    With scores s = f(scale q k), p = softmax(s), and g the gradient of what is attended to,
    dv = p^T g, ds = p (g v^T - D), D = the sum of p (g v^T) over keys. Dao et al. 2022,
    arXiv:2205.14135, B.4. It is written out, as XLA makes a softmax's division a product or not.

    Args:
        q, cotangent: [T, H, h]; k, v: [K, T, h]; ids: [T].
    """
    length, width, cap = len(ids), q.shape[2], config.attention_softcap
    group = q.shape[1] // len(k)
    at = jnp.arange(length)
    sees = (at[:, None] >= at) & (ids > 0) & _near(config, length, sliding)

    def by_head(x: jax.Array) -> jax.Array:
        return x.reshape(length, -1, group, width).transpose(1, 2, 0, 3).astype(jnp.float32)

    def one(head: tuple) -> tuple:
        q, k, v, g, sink = head  # [G, T, h], [T, h] twice, [G, T, h], [G]
        raw = jnp.einsum("gth,sh->gts", q, k) * scale(config)
        scores = jnp.where(sees, softcap(raw, cap), -jnp.inf)
        most = jnp.maximum(scores.max(axis=-1), jnp.finfo(jnp.float32).min)
        most = jnp.maximum(most, sink[:, None])
        weights, of_sink = jnp.exp(scores - most[..., None]), jnp.exp(sink[:, None] - most)
        total = jnp.maximum(weights.sum(axis=-1) + of_sink, jnp.finfo(jnp.float32).tiny)
        share = jax.lax.optimization_barrier(1 / total)
        p, of_sink = weights * share[..., None], of_sink * share
        for_p = jnp.einsum("gth,sh->gts", g, v)
        d = (p * for_p).sum(axis=-1)
        for_raw = p * (for_p - d[..., None]) * scale(config)
        if cap is not None:
            for_raw = for_raw * (1 - jnp.square(jnp.tanh(raw * (1 / cap))))
        return (
            jnp.einsum("gts,sh->gth", for_raw, k),
            jnp.einsum("gts,gth->sh", for_raw, q),
            jnp.einsum("gts,gth->sh", p, g),
            -(of_sink * d).sum(axis=-1),
        )

    of_heads = jnp.full((len(k), group), -jnp.inf)
    if sinks:
        of_heads = sinks[0].astype(jnp.float32).reshape(len(k), group)
    wide = (x.astype(jnp.float32) for x in (k, v))
    for_q, for_k, for_v, for_sinks = each(one, (by_head(q), *wide, by_head(cotangent), of_heads))
    for_q = for_q.transpose(2, 0, 1, 3).reshape(q.shape)
    found = for_q.astype(q.dtype), for_k.astype(k.dtype), for_v.astype(v.dtype)
    return *found, (for_sinks.reshape(-1).astype(sinks[0].dtype),) if sinks else ()


_attend.defvjp(_keep, _backward)
