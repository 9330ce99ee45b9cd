"""Softmax attention over rows that hold prefix trees, a pair of blocks at a time.

A row holds a forest depth first, see `data/prefix_trees.py`. Token k of it is seen by the tokens of
its subtree, which end before place `ends[k]`:

    q sees k  <=>  k <= q < ends[k]

So a block of queries and a block of keys are computed only where an interval of the keys meets the
queries; no array [T, T] is made. The sums go block by block with a running maximum (Milakov and
Gimelshein, https://arxiv.org/abs/1805.02867), and the backward pass computes the scores again (Dao,
https://arxiv.org/abs/2307.08691).

Shape legend: B rows, T tokens, N blocks of C tokens each, H query heads, K key/value heads, G = H /
K, h head width.
"""

import functools
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl.models.architecture import TransformerConfig
from jaxrl.models.attention import Intervals, scale, softcap
from jaxrl.models.kernels.choice import (
    AMPERE,
    REFERENCE,
    Facts,
    Implementation,
    Operation,
    at_least,
    no_sinks,
    unmet,
)
from jaxrl.models.kernels.tree_attention_gpu import tree_attention_gpu
from jaxrl.models.kernels.tree_attention_tpu import tree_attention_tpu
from jaxrl.models.linear import einsum_float32
from jaxrl.parallel.rules import Placement

BLOCK = 128
LEAST = float(jnp.finfo(jnp.float32).min)  # a score that is no score


def tree_attention(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Intervals,
    sinks: jax.Array | None = None,
    *,
    kernel: str = REFERENCE,
    placement: Placement | None = None,
) -> jax.Array:
    """Compute attention to the tokens above in a tree, for training.

    Args:
        q, k, v: [B, T, H, h], [B, K, T, h] twice.
        mask: which tokens see which.
        sinks: see `attention`.
        kernel: of `TREE_ATTENTION`.
        placement: see `self_attention`.

    Returns:
        [B, T, H, h].
    """
    run = functools.partial(TREE_ATTENTION.implementations[kernel].run, config)
    scores = () if sinks is None else (sinks,)
    if placement is None:
        return run(q, k, v, mask, *scores)
    rows, _, heads, _ = placement.spec(q.shape, ("batch", None, "heads", None))
    if placement.spec(k.shape, ("batch", "kv_heads", None, None))[1] != heads:
        heads = None  # a device's query heads would miss their keys
    q_spec, kv_spec = PartitionSpec(rows, None, heads), PartitionSpec(rows, heads)
    of_rows = PartitionSpec(rows)
    mask_spec = Intervals(of_rows, of_rows, PartitionSpec())  # type: ignore[arg-type]
    return jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=(q_spec, kv_spec, kv_spec, mask_spec, *(PartitionSpec(heads) for _ in scores)),
        out_specs=q_spec,
        check_vma=False,  # a kernel does not say over which axes its output varies
    )(q, k, v, mask._replace(sliding=jnp.asarray(mask.sliding)), *scores)


class Pairs(NamedTuple):
    """Hold the pairs of blocks that meet, by row, then queries, then keys; the others follow.

    Attributes:
        queries, keys: [P] numbers of blocks, those of all rows one behind the other.
        number: [] of the pairs that meet.
    """

    queries: jax.Array
    keys: jax.Array
    number: jax.Array


def pairs_that_meet(
    ends: jax.Array, positions: jax.Array, window: jax.Array, block: int = BLOCK
) -> Pairs:
    """Return the pairs of blocks in which a token sees another, and perhaps some more.

    Args:
        ends, positions: [B, T]; `block` divides T.
        window: [] positions that a token sees, its own among them.
    """
    blocks = ends.shape[1] // block
    by_block = [x.reshape(-1, blocks, block) for x in (ends, positions)]
    last, shallow, deep = by_block[0].max(2), by_block[1].min(2), by_block[1].max(2)
    place = jnp.arange(blocks)
    meets = (place[:, None] >= place) & (last[:, None, :] > block * place[:, None])
    meets &= shallow[:, :, None] - deep[:, None, :] < window
    row, above, below = np.nonzero(np.broadcast_to(np.tri(blocks, dtype=bool), meets.shape))
    order = jnp.argsort(~meets[row, above, below], stable=True)
    queries, keys = (jnp.asarray(row * blocks + x, jnp.int32)[order] for x in (above, below))
    return Pairs(queries, keys, meets.sum())


def blockwise(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Intervals,
    sinks: jax.Array | None = None,
    *,
    block: int = BLOCK,
) -> jax.Array:
    """Compute `tree_attention` in plain XLA, one pair of blocks after the other.

    q [B, T, H, h]; k, v [B, K, T, h]; returns [B, T, H, h].
    """
    rows, t, heads, width = q.shape
    kv, more = k.shape[1], -t % block
    blocks = (t + more) // block
    queries = jnp.pad(q, ((0, 0), (0, more), (0, 0), (0, 0)))
    queries = queries.reshape(rows * blocks, block, kv, -1, width).transpose(0, 2, 3, 1, 4)

    def by_block(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0)))
        x = x.reshape(rows, kv, blocks, block, width).swapaxes(1, 2)
        return x.reshape(-1, kv, block, width)

    place = jnp.arange(t + more, dtype=jnp.int32)
    ends = jnp.where(place < t, jnp.pad(mask.ends, ((0, 0), (0, more))), place + 1)
    positions = jnp.pad(mask.positions, ((0, 0), (0, more)))
    window = _window(config, mask)
    pairs = pairs_that_meet(ends, positions, window, block)
    known = [x.reshape(-1, block) for x in (jnp.tile(place, (rows, 1)), ends, positions)]
    of_sinks = jnp.full((heads,), -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    scoring = scale(config), config.attention_softcap
    given = queries, by_block(k), by_block(v), of_sinks.reshape(kv, -1)
    out: jax.Array = _attend(scoring, *given, pairs, (*known, window))
    out = out.transpose(0, 3, 1, 2, 4).reshape(rows, t + more, heads, width)
    return out[:, :t]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    scoring: tuple[float, float | None],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array,
    pairs: Pairs,
    known: tuple[jax.Array, ...],
) -> jax.Array:
    """Compute attention of blocks: q [B N, K, G, C, h]; k, v [B N, K, C, h]; sinks [K, G]."""
    return _forward(scoring, q, k, v, sinks, pairs, known)[0]


def _scores(
    scoring: tuple[float, float | None], q: jax.Array, k: jax.Array, i: Any, j: Any, known: tuple
) -> tuple[jax.Array, jax.Array]:
    """Return the scores [K, G, C, C] of two blocks, and their slope by the products."""
    factor, cap = scoring
    places, ends, positions, window = known
    products = einsum_float32("kgch,kdh->kgcd", q, k) * factor
    scores = softcap(products, cap)
    slope = factor if cap is None else factor * (1 - jnp.square(scores / cap))
    sees = (places[j] <= places[i][:, None]) & (places[i][:, None] < ends[j])
    sees &= positions[i][:, None] - positions[j] < window
    return jnp.where(sees, scores, LEAST), jnp.where(sees, slope, 0)


def _forward(
    scoring: tuple[float, float | None],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array,
    pairs: Pairs,
    known: tuple[jax.Array, ...],
) -> tuple[jax.Array, tuple]:
    def body(n: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i, j = pairs.queries[n], pairs.keys[n]
        most, total, mean = (x[i] for x in found)
        scores, _ = _scores(scoring, q[i], k[j], i, j, known)
        higher = jnp.maximum(most, scores.max(axis=-1))
        # what a row of strangers alone adds goes when its own token comes: the last block
        shares, before = jnp.exp(scores - higher[..., None]), jnp.exp(most - higher)
        total = total * before + shares.sum(axis=-1)
        part = einsum_float32("kgcd,kdh->kgch", shares.astype(v.dtype), v[j])
        new = higher, total, mean * before[..., None] + part
        return tuple(x.at[i].set(y) for x, y in zip(found, new, strict=True))

    shape = q.shape[:-1]
    most = jnp.broadcast_to(jnp.maximum(sinks, LEAST)[..., None], shape)
    total = jnp.broadcast_to(jnp.isfinite(sinks).astype(jnp.float32)[..., None], shape)
    zeros = jnp.zeros(q.shape, jnp.float32)
    most, total, mean = jax.lax.fori_loop(0, pairs.number, body, (most, total, zeros))
    out = (mean / total[..., None]).astype(q.dtype)
    return out, (q, k, v, sinks, pairs, known, out, most + jnp.log(total))


def _backward(scoring: tuple[float, float | None], residuals: tuple, slope: jax.Array) -> tuple:
    q, k, v, sinks, pairs, known, out, log_total = residuals
    pull = jnp.einsum("...h,...h->...", slope, out, preferred_element_type=jnp.float32)

    def body(n: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (for_q, for_k, for_v), i, j = found, pairs.queries[n], pairs.keys[n]
        scores, by_product = _scores(scoring, q[i], k[j], i, j, known)
        shares = jnp.exp(scores - log_total[i][..., None])
        part = einsum_float32("kgcd,kgch->kdh", shares.astype(v.dtype), slope[i])
        for_v = for_v.at[j].add(part)
        by_share = einsum_float32("kgch,kdh->kgcd", slope[i], v[j])
        change = (shares * (by_share - pull[i][..., None]) * by_product).astype(q.dtype)
        for_q = for_q.at[i].add(einsum_float32("kgcd,kdh->kgch", change, k[j]))
        for_k = for_k.at[j].add(einsum_float32("kgcd,kgch->kdh", change, q[i]))
        return for_q, for_k, for_v

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    found = jax.lax.fori_loop(0, pairs.number, body, zeros)
    for_sinks = -(jnp.exp(sinks[..., None] - log_total) * pull).sum(axis=(0, 3))
    none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (pairs, known))
    return *(g.astype(x.dtype) for g, x in zip(found, (q, k, v), strict=True)), for_sinks, *none


_attend.defvjp(_forward, _backward)


# ---------------------------------------------------------------- by kernels of accelerators


def mosaic(
    config: TransformerConfig, q: jax.Array, k: jax.Array, v: jax.Array, mask: Intervals
) -> jax.Array:
    """Compute `tree_attention` by our kernel for TPUs; shapes as there."""
    scoring = {"scale": scale(config), "softcap": config.attention_softcap}
    return tree_attention_tpu(q, k, v, mask.ends, mask.positions, _window(config, mask), **scoring)


def triton(
    config: TransformerConfig, q: jax.Array, k: jax.Array, v: jax.Array, mask: Intervals
) -> jax.Array:
    """Compute `tree_attention` by our kernel for NVIDIA GPUs; shapes as there."""
    scoring = {"scale": scale(config), "softcap": config.attention_softcap}
    return tree_attention_gpu(q, k, v, mask.ends, mask.positions, _window(config, mask), **scoring)


def _window(config: TransformerConfig, mask: Intervals) -> jax.Array:
    """Return how many positions a query sees, [] int32: more than there are without a window."""
    every = jnp.int32(mask.ends.shape[1] + 1)
    if config.sliding_window is None:
        return every
    return jnp.where(mask.sliding, config.sliding_window, every)


def _mosaic_needs(facts: Facts) -> list[str]:
    assert facts.model is not None
    width = facts.model.head_dim
    divides = width % 64 == 0, f"a head_dim that 64 divides, not {width}"
    return unmet([divides, no_sinks(facts.model)])


def _triton_needs(facts: Facts) -> list[str]:
    assert facts.model is not None
    width = facts.model.head_dim
    return unmet(
        [
            (find_spec("jax.experimental.pallas.triton") is not None, "a JAX with that backend"),
            (
                at_least(facts, AMPERE),
                f"an Ampere GPU or later, not compute capability {facts.capability}",
            ),
            (width <= 256, f"a head_dim of at most 256, not {width}"),
            no_sinks(facts.model),
        ]
    )


TREE_ATTENTION = Operation(
    "tree_attention",
    "attention within prefix trees, in training and scoring",
    {
        "mosaic": Implementation(mosaic, _mosaic_needs, "64 divides head_dim, no sinks"),
        "triton": Implementation(
            triton,
            _triton_needs,
            "Ampere or later, head_dim <= 256, no sinks, a JAX that has Pallas for Triton",
        ),
        REFERENCE: Implementation(blockwise),
    },
    {"tpu": ("mosaic", REFERENCE), "gpu": ("triton", REFERENCE), "cpu": (REFERENCE,)},
)
