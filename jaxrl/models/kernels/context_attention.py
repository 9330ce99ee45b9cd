"""Softmax attention of rows that are spread over devices, each with some tokens of every row.

Three ways, which give the same numbers:

- `gather`: each device gathers keys and values of whole rows, and attends from its own tokens. With
  few key/value heads that is little to send (Llama 3, https://arxiv.org/abs/2407.21783, 3.3.2).
- `ring`: keys and values go round, and each device merges what it finds in them by the online
  softmax; nobody holds a whole row (Liu et al., 2023, https://arxiv.org/abs/2310.01889).
- `ulysses`: tokens are exchanged for heads, each device attends in whole rows for some of the
  heads, by any kernel, and they are exchanged back (Jacobs et al., 2023,
  https://arxiv.org/abs/2309.14509).

In layers that slide, `gather` and `ring` give way to `_near`, where it sends less: only what lies
within the window in front of a device's tokens comes to it.

Places are in the order of `parallel.context`. Shape legend: B rows, T tokens of a row on a device,
C devices, S = C T places, H query heads, K key/value heads, G = H / K, h head width.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl.models.architecture import TransformerConfig
from jaxrl.models.attention import Segments, attention, scale, softcap
from jaxrl.models.kernels.choice import REFERENCE
from jaxrl.models.kernels.packed_attention import (
    BLOCK,
    CHUNK,
    PACKED_ATTENTION,
    splash_near,
    splash_over,
)
from jaxrl.models.linear import einsum_float32
from jaxrl.parallel.context import order_of_places
from jaxrl.parallel.rules import Placement

AXIS = "context"
MOST_GATHERED = 2**30
LEAST = jnp.finfo(jnp.float32).min


def context_attention(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    strategy: str,
    kernel: str,
    placement: Placement,
) -> jax.Array:
    """Compute causal attention within segments of rows over devices, for training.

    Args:
        q, k, v: [B, S, H, h], [B, K, S, h] twice.
        segments: ids [B, S].
        strategy: a name above; `ulysses` needs heads that the devices divide. "auto": `gather`
            where the keys and values of whole rows are at most `MOST_GATHERED` bytes on a device,
            else `ring`.
        kernel: of `PACKED_ATTENTION`, for `ulysses`; "splash" for `gather`, too. Where it is none
            of these it is plain XLA.

    Returns:
        [B, S, H, h].
    """
    devices = placement.mesh.shape[AXIS]
    rows, _, heads, _ = placement.spec(q.shape, ("batch", None, "heads", None))
    if placement.spec(k.shape, ("batch", "kv_heads", None, None))[1] != heads:
        heads = None  # a device's query heads would miss their keys
    length = q.shape[1]
    order = order_of_places(length, devices)
    if strategy == "auto":
        held = placement.size(placement.rules.batch) * placement.size(heads)
        strategy = "gather" if (k.nbytes + v.nbytes) // held <= MOST_GATHERED else "ring"
    q_spec, kv_spec = PartitionSpec(rows, AXIS, heads), PartitionSpec(rows, heads, AXIS)
    mask_spec = Segments(PartitionSpec(rows, AXIS), PartitionSpec())  # type: ignore[arg-type]
    over = functools.partial(
        jax.shard_map,
        mesh=placement.mesh,
        in_specs=(q_spec, kv_spec, kv_spec, mask_spec),
        out_specs=q_spec,
        check_vma=False,  # a kernel does not say over which axes its output varies
    )

    def of_all(config: TransformerConfig, *given: Any) -> jax.Array:
        if strategy == "gather" and kernel == "splash" and length // devices % BLOCK == 0:
            return splash_over(
                config, *given, order=order, placement=placement, axes=(rows, AXIS, heads)
            )
        run: Any = {"gather": _gather, "ring": _ring, "ulysses": _ulysses}[strategy]
        run = functools.partial(run, kernel=kernel) if strategy == "ulysses" else run
        return over(functools.partial(run, config, order))(*given)

    given = q, k, v, segments._replace(sliding=jnp.asarray(segments.sliding))
    window = config.sliding_window
    everything = keys_received(length, devices)
    if (
        window is None
        or strategy == "ulysses"
        or keys_received(length, devices, window) == everything
    ):
        return of_all(config, *given)
    near = over(functools.partial(_near, config, kernel))
    far = functools.partial(of_all, dataclasses.replace(config, sliding_window=None))
    return jax.lax.cond(segments.sliding, near, far, *given)


def keys_received(length: int, devices: int, window: int | None = None) -> int:
    """Return how many keys of a row come to a device in a layer, of which it has its own.

    Args:
        length: of the row.
        window: of a layer that slides.
    """
    everything = length - length // devices
    return everything if window is None else min(everything, 2 * (window - 1))


class Places(NamedTuple):
    """Hold which tokens of a row these are, and the segments they are of."""

    at: jax.Array  # [T]
    ids: jax.Array  # [B, T]


def _sees(
    config: TransformerConfig, queries: Places, keys: Places, sliding: jax.Array
) -> jax.Array:
    """Return which keys a query sees [B, T, S] bool: of its segment, not ahead, in its window."""
    ahead = queries.at[:, None] - keys.at[None]
    near = ahead >= 0
    if config.sliding_window is not None:
        near &= ~sliding | (ahead < config.sliding_window)
    return near & (queries.ids[:, :, None] == keys.ids[:, None])


def _with(places: Places, x: jax.Array) -> Places:
    """Return the same places, as if they followed from x.

    Else what a query sees would follow from nothing in a layer, and be kept for all layers together
    in front of their loop: L^2 numbers for every head.
    """
    return jax.lax.optimization_barrier((places, x))[0]


def _here(order: np.ndarray) -> jax.Array:
    """Return which tokens of a row this device has [T]."""
    devices = jax.lax.axis_size(AXIS)
    return jnp.asarray(order).reshape(devices, -1)[jax.lax.axis_index(AXIS)]


# ---------------------------------------------------------------- keys of whole rows


def _gather(
    config: TransformerConfig,
    order: np.ndarray,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
) -> jax.Array:
    """Attend from this device's tokens to the keys of all."""
    k, v = (jax.lax.all_gather(x, AXIS, axis=2, tiled=True) for x in (k, v))
    ids = jax.lax.all_gather(segments.ids, AXIS, axis=1, tiled=True)
    keys, sliding = Places(jnp.asarray(order), ids), jnp.asarray(segments.sliding)

    @jax.checkpoint  # the scores of few queries at once, twice: what is kept is the input
    def part(given: tuple[jax.Array, Places]) -> jax.Array:
        queries, places = given
        return attention(config, queries, k, v, _sees(config, places, keys, sliding))

    parts, mine = _parts(q), _with(Places(_here(order), segments.ids), q)
    return _joined(jax.lax.map(part, (parts, _places_of_parts(mine, parts))), q)


def _parts(x: jax.Array) -> jax.Array:
    """Cut [B, T, ...] into [parts, B, T / parts, ...], of at most `CHUNK` tokens."""
    tokens = x.shape[1]
    size = next(size for size in range(min(CHUNK, tokens), 0, -1) if tokens % size == 0)
    return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)


def _places_of_parts(places: Places, parts: jax.Array) -> Places:
    return Places(places.at.reshape(len(parts), -1), _parts(places.ids))


def _joined(parts: jax.Array, like: jax.Array) -> jax.Array:
    return parts.swapaxes(0, 1).reshape(*like.shape[:2], *parts.shape[3:])


# ---------------------------------------------------------------- keys within a window


def _near(
    config: TransformerConfig,
    kernel: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
) -> jax.Array:
    """Attend from this device's two pieces to themselves and to what is just in front of them."""
    window = config.sliding_window
    assert window is not None
    rows, piece, before = q.shape[0], q.shape[1] // 2, window - 1
    fused = kernel == "splash" and piece % BLOCK == 0
    if fused:
        before = -(-before // BLOCK) * BLOCK
    # a piece is a row of its own from here on, and what is missing in front of the first is of no
    # segment
    keys, values = (_with_those_before(x, 2, before) for x in (k, v))
    key_ids = _with_those_before(segments.ids + 1, 1, before) - 1
    queries, ids = _pieces(q, 1), _pieces(segments.ids, 1)
    if fused:
        out = splash_near(config, queries, keys, values, ids, key_ids)
        return jnp.concatenate([out[:rows], out[rows:]], axis=1)

    @jax.checkpoint
    def part(given: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        queries, ids, start = given
        size = queries.shape[1]
        near = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=before + size
        )
        ahead = jnp.arange(size)[:, None] + before - jnp.arange(before + size)
        mask = (ahead >= 0) & (ahead < window)
        mask &= ids[:, :, None] == near(key_ids, axis=1)[:, None]
        return attention(config, queries, near(keys, axis=2), near(values, axis=2), mask)

    parts = _parts(queries)
    key_ids, ids = jax.lax.optimization_barrier(((key_ids, ids), q))[0]  # see `_with`
    starts = jnp.arange(len(parts)) * parts.shape[2]
    out = _joined(jax.lax.map(part, (parts, _parts(ids), starts)), queries)
    return jnp.concatenate([out[:rows], out[rows:]], axis=1)


def _pieces(x: jax.Array, axis: int) -> jax.Array:
    """Make a device's two pieces rows: [B, ..., T, ...] -> [2 B, ..., T / 2, ...]."""
    return jnp.concatenate(jnp.split(x, 2, axis=axis))


def _with_those_before(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Return a device's pieces, each with `count` tokens of the row that are in front of it.

    Zeros stand for those before the row. The pieces in front of piece c are c - 1, c - 2, ..., and
    device c has piece c and piece 2 C - 1 - c.

    Returns:
        [2 B, ..., count + T / 2, ...].
    """
    devices, (head, tail) = jax.lax.axis_size(AXIS), jnp.split(x, 2, axis=axis)
    piece = head.shape[axis]
    pieces = [jnp.concatenate([head, tail])]
    for hop in range(1, -(-count // piece) + 1):
        most = min(piece, count - (hop - 1) * piece)
        ends = (jax.lax.slice_in_dim(y, piece - most, piece, axis=axis) for y in (head, tail))
        end_of_head, end_of_tail = ends
        later = [(c, c + hop) for c in range(devices - hop)]
        earlier = [(c + hop, c) for c in range(devices - hop)]
        across = [(c, 2 * devices - 1 - hop - c) for c in range(devices - hop, devices)]
        before_tail = jax.lax.ppermute(end_of_tail, AXIS, earlier)
        before_tail += jax.lax.ppermute(end_of_head, AXIS, across)  # zeros where nothing comes
        before_head = jax.lax.ppermute(end_of_head, AXIS, later)
        pieces.insert(0, jnp.concatenate([before_head, before_tail]))
    return jnp.concatenate(pieces, axis=axis)


# ---------------------------------------------------------------- keys that go round


class _Softmax(NamedTuple):
    """Hold a softmax over the keys so far, float32: of [B, T, H] its greatest score and sum of
    exponentials, and [B, T, H, h] their sum times the values."""

    most: jax.Array
    total: jax.Array
    out: jax.Array


def _scores(
    config: TransformerConfig, q: jax.Array, k: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return scores [B, K, G, T, S] float32, LEAST where a key is not seen, and mask with heads."""
    b, t, heads, width = q.shape
    grouped = q.reshape(b, t, k.shape[1], heads // k.shape[1], width)
    scores = einsum_float32("btkgh,bksh->bkgts", grouped, k) * scale(config)
    return jnp.where(mask[:, None, None], softcap(scores, config.attention_softcap), LEAST), grouped


def _by_heads(x: jax.Array) -> jax.Array:
    """[B, K, G, T, ...] -> [B, T, H, ...]."""
    moved = jnp.moveaxis(x, 3, 1)
    return moved.reshape(*moved.shape[:2], -1, *moved.shape[4:])


def _by_groups(x: jax.Array, kv: int) -> jax.Array:
    """[B, T, H] -> [B, K, G, T]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], kv, -1), 1, 3)


def _merge(
    config: TransformerConfig,
    softmax: _Softmax,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
) -> _Softmax:
    """Return the softmax with more keys."""
    scores, _ = _scores(config, q, k, mask)
    most = jnp.maximum(softmax.most, _by_heads(scores.max(axis=-1)))
    kv = k.shape[1]
    weights = jnp.where(mask[:, None, None], jnp.exp(scores - _by_groups(most, kv)[..., None]), 0.0)
    before = jnp.exp(softmax.most - most)
    found = einsum_float32("bkgts,bksh->bkgth", weights.astype(v.dtype), v)
    return _Softmax(
        most,
        softmax.total * before + _by_heads(weights.sum(axis=-1)),
        softmax.out * before[..., None] + _by_heads(found),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_of(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: Places,
    sliding: Any,
) -> jax.Array:
    return _ring_forward(config, q, k, v, places, sliding)[0]


def _ring(
    config: TransformerConfig,
    order: np.ndarray,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
) -> jax.Array:
    """Attend to the keys of one device after the other, as they come."""
    return _ring_of(config, q, k, v, Places(_here(order), segments.ids), segments.sliding)


def _next(tree: Any) -> Any:
    """Give arrays to the next device, and take those of the one before."""
    devices = jax.lax.axis_size(AXIS)
    pairs = [(i, (i + 1) % devices) for i in range(devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)


def _ring_forward(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: Places,
    sliding: Any,
) -> tuple[jax.Array, tuple]:
    devices, parts = jax.lax.axis_size(AXIS), _parts(q)
    of_parts = _places_of_parts(_with(places, q), parts)

    def visit(softmax: _Softmax, held: tuple[jax.Array, jax.Array, Places]) -> _Softmax:
        keys, values, key_places = held

        def part(given: tuple[_Softmax, jax.Array, Places]) -> _Softmax:
            so_far, queries, mine = given
            mask = _sees(config, mine, key_places, sliding)
            merge = functools.partial(_merge, config, so_far, queries, keys, values, mask)
            return jax.lax.cond(mask.any(), merge, lambda: so_far)

        return jax.lax.map(part, (softmax, parts, of_parts))

    shape = parts.shape[:-1]
    zeros = jnp.zeros(shape, jnp.float32)
    softmax = _Softmax(jnp.full(shape, LEAST), zeros, jnp.zeros(parts.shape, jnp.float32))
    held = k, v, places
    for step in range(devices):
        # sent before it is used, so that the two can go on side by side
        following = _next(held) if step + 1 < devices else held
        softmax, held = visit(softmax, held), following
    total = jnp.maximum(softmax.total, jnp.finfo(jnp.float32).tiny)
    out = _joined(softmax.out / total[..., None], q)
    log_total = softmax.most + jnp.log(total)
    return out.astype(v.dtype), (q, k, v, places, sliding, out, log_total)


def _ring_backward(config: TransformerConfig, residuals: tuple, g: jax.Array) -> tuple:
    q, k, v, places, sliding, out, log_total = residuals
    devices, parts, kv = jax.lax.axis_size(AXIS), _parts(q), k.shape[1]
    of_parts = _places_of_parts(_with(places, g), parts)
    slope = (g.astype(jnp.float32) * out).sum(axis=-1)  # [B, T, H]: sum over keys of p dp
    given = parts, of_parts, _parts(g), log_total, _parts(slope)

    def visit(for_q: jax.Array, held: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
        keys, values, key_places, for_k, for_v = held

        def part(carry: tuple[jax.Array, jax.Array], of_part: tuple) -> tuple[tuple, jax.Array]:
            so_far, queries, mine, g_part, total, slope_part = of_part
            mask = _sees(config, mine, key_places, sliding)

            def add() -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
                scores, grouped = _scores(config, queries, keys, mask)
                weights = jnp.exp(scores - _by_groups(total, kv)[..., None])
                weights = jnp.where(mask[:, None, None], weights, 0.0)
                g_grouped = g_part.reshape(grouped.shape)
                for_weights = einsum_float32("btkgh,bksh->bkgts", g_grouped, values)
                for_scores = weights * (for_weights - _by_groups(slope_part, kv)[..., None])
                if (cap := config.attention_softcap) is not None:
                    for_scores *= 1 - jnp.square(jnp.where(mask[:, None, None], scores, 0.0) / cap)
                for_scores = (for_scores * scale(config)).astype(q.dtype)
                new_q = einsum_float32("bkgts,bksh->btkgh", for_scores, keys)
                new_k = einsum_float32("bkgts,btkgh->bksh", for_scores, grouped)
                new_v = einsum_float32("bkgts,btkgh->bksh", weights.astype(q.dtype), g_grouped)
                found_q = so_far + new_q.reshape(so_far.shape)
                return (carry[0] + new_k, carry[1] + new_v), found_q

            return jax.lax.cond(mask.any(), add, lambda: (carry, so_far))

        (for_k, for_v), for_q = jax.lax.scan(part, (for_k, for_v), (for_q, *given))
        return for_q, for_k, for_v

    for_q = jnp.zeros(parts.shape, jnp.float32)
    zeros = jnp.zeros(k.shape, jnp.float32)
    held = (k, v, places, zeros, zeros)
    for step in range(devices):
        for_q, for_k, for_v = visit(for_q, held)
        # their gradients travel with keys and values, and one device farther, home
        kept = _next(held[:3]) if step + 1 < devices else held[:3]
        held = (*kept, *_next((for_k, for_v)))
    return (
        _joined(for_q, q).astype(q.dtype),
        held[3].astype(k.dtype),
        held[4].astype(v.dtype),
        None,
        None,
    )


_ring_of.defvjp(_ring_forward, _ring_backward)


# ---------------------------------------------------------------- heads for tokens


def _ulysses(
    config: TransformerConfig,
    order: np.ndarray,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    kernel: str,
) -> jax.Array:
    """Attend in whole rows for this device's share of the heads."""
    place = np.argsort(order)

    def whole(x: jax.Array, heads: int, tokens: int) -> jax.Array:
        x = jax.lax.all_to_all(x, AXIS, split_axis=heads, concat_axis=tokens, tiled=True)
        return jnp.take(x, place, axis=tokens)

    ids = jax.lax.all_gather(segments.ids, AXIS, axis=1, tiled=True)[:, place]
    plain = "chunked" if kernel == REFERENCE else kernel
    run = PACKED_ATTENTION.implementations[plain].run
    out = run(config, whole(q, 2, 1), whole(k, 1, 2), whole(v, 1, 2), segments._replace(ids=ids))
    return jax.lax.all_to_all(out[:, order], AXIS, split_axis=1, concat_axis=2, tiled=True)
