"""The gated delta rule: linear attention whose state forgets, and corrects what it recalls.

    S_t = a_t S_{t-1} + k_t d_t^T        d_t = b_t (v_t - a_t S_{t-1}^T k_t)        o_t = S_t^T q_t

with decay a_t in (0, 1] and writing strength b_t in (0, 1). `chunked` computes a chunk of tokens at
a time, in products of matrices, for training and prefill; `step` one token, for decoding. Both have
a float32 state and give the same numbers but for rounding, as does the kernel for TPUs that stands
in for `chunked` (kernels/delta_rule.py). Yang et al., Gated Delta Networks,
https://arxiv.org/abs/2412.06464; the chunked form is that of section 3.3, with the decays within a
chunk in full instead of as a quotient of two, which would overflow.

Shape legend: B rows, T tokens, N chunks, C tokens of a chunk, K key heads, V value heads,
G = V / K, d key width, e value width.
"""

import functools

import jax
import jax.numpy as jnp

CHUNK = 64  # tokens, as in the authors' kernels
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    strength: jax.Array,
    segment_ids: jax.Array,
    state: jax.Array | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """Run the rule over rows, in float32; the state begins anew with every segment.

    Args:
        q, k: [B, T, K, d]; each key head serves V / K neighbouring value heads.
        v: [B, T, V, e].
        log_decay, strength: [B, T, V], the logarithm of a and b; 0 and 0 leave the state as it is.
        segment_ids: [B, T] int; those of a segment are neighbours.
        state: [B, V, d, e] that the first segment of each row begins with; None = 0.
        chunk: tokens that are computed together.

    Returns:
        Outputs [B, T, V, e], and the state [B, V, d, e] behind the last token, of its segment.
    """
    (b, t, heads, width), (values, value_width) = k.shape, v.shape[2:]
    size, group = min(chunk, t), values // heads
    more = -t % size

    def cut(x: jax.Array, *dims: int) -> jax.Array:
        """Cut [B, T, ...] into chunks [N, B, ..., C, last], or [N, B, ..., C] with dims alone."""
        padded = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, more), *((0, 0),) * (x.ndim - 2)])
        return padded.reshape(b, -1, size, *dims)

    q, k = (cut(x, heads, width).transpose(1, 0, 3, 2, 4) for x in (q, k))  # [N, B, K, C, d]
    v = cut(v, heads, group, value_width).transpose(1, 0, 3, 4, 2, 5)  # [N, B, K, G, C, e]
    log_decay, strength = (
        cut(x, heads, group).transpose(1, 0, 3, 4, 2) for x in (log_decay, strength)
    )
    ids = jnp.pad(segment_ids, ((0, 0), (0, more)), mode="edge")
    ids = ids.reshape(b, -1, size).swapaxes(0, 1)  # [N, B, C]
    before = jnp.concatenate([ids[:1, :, 0], ids[:-1, :, -1]])  # of the state, [N, B]

    # decay from behind token j to token i, [N, B, K, G, C, C]; each sum begins anew, so that its
    # rounding does not depend on what lies before j
    later = jnp.tril(jnp.ones((size, size), bool), -1)
    sums = jnp.cumsum(jnp.where(later, log_decay[..., None], 0), axis=-2)
    same = ids[:, :, :, None] == ids[:, :, None, :]
    sees = (same & (later | jnp.eye(size, dtype=bool)))[:, :, None, None]
    decay = jnp.exp(jnp.where(sees, sums, -jnp.inf))
    carried = (ids == before[..., None])[:, :, None, None]
    from_start = jnp.exp(jnp.where(carried, jnp.cumsum(log_decay, axis=-1), -jnp.inf))

    overlap = _einsum("nbkid,nbkjd->nbkij", k, k)[:, :, :, None] * decay
    solve = inverse_of_unit_lower(jnp.where(later, strength[..., None] * overlap, 0))
    new = _einsum("nbkgij,nbkgje->nbkgie", solve, strength[..., None] * v)
    scaled = (strength * from_start)[..., None] * k[:, :, :, None]
    recalled = _einsum("nbkgij,nbkgjd->nbkgid", solve, scaled)
    within = _einsum("nbkid,nbkjd->nbkij", q, k)[:, :, :, None] * decay
    queries = from_start[..., None] * q[:, :, :, None]
    keys = decay[..., -1, :, None] * k[:, :, :, None]

    def one_chunk(state: jax.Array, of: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        new, recalled, within, queries, keys, kept = of
        written = new - _einsum("bkgid,bkgde->bkgie", recalled, state)
        out = _einsum("bkgid,bkgde->bkgie", queries, state)
        out += _einsum("bkgij,bkgje->bkgie", within, written)
        state = kept[..., None, None] * state + _einsum("bkgid,bkgie->bkgde", keys, written)
        return state, out

    begin = jnp.zeros((b, values, width, value_width)) if state is None else state
    begin = begin.astype(jnp.float32).reshape(b, heads, group, width, value_width)
    given = new, recalled, within, queries, keys, from_start[..., -1]
    state, out = jax.lax.scan(one_chunk, begin, given)
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(b, -1, values, value_width)[:, :t]
    return out, state.reshape(b, values, width, value_width)


def step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    strength: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Run the rule for one token of each row, in float32.

    Args:
        q, k: [B, K, d]; v: [B, V, e]; log_decay, strength: [B, V].
        state: [B, V, d, e] float32.

    Returns:
        Outputs [B, V, e], and the state behind the token.
    """
    group = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x.astype(jnp.float32), group, axis=1)[..., None] for x in (q, k))
    state = jnp.exp(log_decay)[..., None, None] * state
    written = strength[..., None] * (v - jnp.sum(state * k, axis=-2))
    state = state + k * written[..., None, :]
    return jnp.sum(state * q, axis=-2), state


@jax.custom_vjp
def inverse_of_unit_lower(below: jax.Array) -> jax.Array:
    """Invert I + below, where `below` [..., C, C] is strictly lower triangular.

    Blocks of 2, 4, 8 ... are inverted from those of half their size: [[A, 0], [M, D]] is inverted
    by [[A', 0], [-D' M A', D']]. All are products of matrices, which accelerators do, where
    substitution goes row by row.
    """
    size = below.shape[-1]
    i, j = _places(size)
    inverse = jnp.broadcast_to(jnp.where(i == j, 1, 0).astype(below.dtype), below.shape)
    half = 1
    while half < size:
        same = jax.lax.div(i, 2 * half) == jax.lax.div(j, 2 * half)
        corner = same & (jax.lax.div(i, half) > jax.lax.div(j, half))
        between = jnp.where(corner, below, 0)
        inverse = inverse - _einsum("...ij,...jk,...kl->...il", inverse, between, inverse)
        half *= 2
    return inverse


def _places(size: int) -> list[jax.Array]:
    """Return the row and the column of each number of a matrix; kernels have no iota of one dim."""
    return [jax.lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in range(2)]


def _inverse_forward(below: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = inverse_of_unit_lower(below)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    i, j = _places(inverse.shape[-1])
    whole = -_einsum("...ji,...jk,...lk->...il", inverse, g, inverse)
    return (jnp.where(i > j, whole, 0),)


inverse_of_unit_lower.defvjp(_inverse_forward, _inverse_backward)


def convolve(
    x: jax.Array,
    kernel: jax.Array,
    segment_ids: jax.Array | None = None,
    before: jax.Array | None = None,
) -> jax.Array:
    """Convolve each channel with the tokens up to its own, in float32: sum_j kernel_j x_{t-W+1+j}.

    Args:
        x: [B, T, ...channels].
        kernel: [...channels, W].
        segment_ids: [B, T]; a token sees those of its own segment. None = all.
        before: [B, W - 1, ...channels], the inputs in front of the row; None = 0.

    Returns:
        [B, T, ...channels] in the dtype of x.
    """
    t, window = x.shape[1], kernel.shape[-1]
    if before is None:
        before = jnp.zeros((x.shape[0], window - 1, *x.shape[2:]), x.dtype)
    wide = jnp.concatenate([before.astype(x.dtype), x], axis=1).astype(jnp.float32)
    out = jnp.zeros(x.shape, jnp.float32)
    for at in range(window):
        seen = wide[:, at : at + t]
        if segment_ids is not None and (lag := window - 1 - at):
            ids = jnp.pad(segment_ids, ((0, 0), (lag, 0)), constant_values=-1)[:, :t]
            same = (ids == segment_ids).reshape(*ids.shape, *(1,) * (x.ndim - 2))
            seen = jnp.where(same, seen, 0)
        out += seen * kernel[..., at].astype(jnp.float32)
    return out.astype(x.dtype)


def unit_length(x: jax.Array) -> jax.Array:
    """Return x / |x| over the last dim, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
