"""Masked reductions and token distributions.

Masks are [B, T] float 0/1; NaN under a 0 never spreads.
"""

from collections.abc import Callable
from typing import Annotated, Any

import chex
import jax
import jax.numpy as jnp

Array = jax.Array
# Which numbers an array holds and its shape, by the legend of `jaxrl.types`.
FloatBT = Annotated[Array, "float [B, T]"]
MaskBT = Annotated[Array, "mask [B, T]"]  # float 0/1
BoolBT = Annotated[Array, "bool [B, T]"]
IntBT = Annotated[Array, "int [B, T]"]
BoolB = Annotated[Array, "bool [B]"]
IntB = Annotated[Array, "int [B]"]
FloatB = Annotated[Array, "float [B]"]
FloatBK = Annotated[Array, "float [B, K]"]
FloatK = Annotated[Array, "float [K]"]
FloatScalar = Annotated[Array, "float []"]
Logits = Annotated[Array, "float [..., V]"]
Tokens = Annotated[Array, "int [...]"]  # as many dims as the logits have before V
# Those that a config may name for weights and activations.
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def assert_per_token(*arrays: FloatBT, mask: MaskBT | None = None) -> None:
    """Refuse arrays that do not hold a float for each token, all in one shape [B, T].

    The mask has that shape too; it may be of bools or ints.

    Raises:
        AssertionError: names the array by its place, with its shape or type.
    """
    chex.assert_rank(arrays, 2)
    chex.assert_type(arrays, float)
    chex.assert_equal_shape([*arrays, *([] if mask is None else [mask])])


def masked_sum(x: Array, mask: Array | None, axis: int | None = None) -> Array:
    """Return the sum of x where mask is not 0, weighted by mask.

    `where` first, so that a masked NaN stays out.
    """
    if mask is None:
        return x.sum(axis)
    return (jnp.where(mask != 0, x, 0) * mask).sum(axis)


def masked_mean(x: Array, mask: Array | None, axis: int | None = None) -> Array:
    """Return the weighted mean of x under mask; 0 where the mask is empty."""
    if mask is None:
        return x.mean(axis)
    return masked_sum(x, mask, axis) / jnp.maximum(mask.sum(axis), 1.0)


def zero_masked(mask: Array | None, *arrays: Array) -> tuple[Array, ...]:
    """Return the arrays in at least float32, 0 where mask is 0.

    Before any formula: `0 * nan` is NaN, in values and in gradients.
    """
    wide = tuple(at_least_float32(x) for x in arrays)
    return wide if mask is None else tuple(jnp.where(mask != 0, x, 0) for x in wide)


def at_least_float32(x: Array) -> Array:
    """Return x in float32, or in float64 if it has that."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def whiten(x: FloatBT, mask: MaskBT, epsilon: float = 1e-8) -> FloatBT:
    """Shift and scale x to mean 0 and (unbiased) variance 1 over mask; 0 where masked.

    Fewer than two elements have no variance: they become 0.
    """
    centred = (jnp.where(mask != 0, x, 0) - masked_mean(x, mask)) * mask
    variance = jnp.square(centred).sum() / jnp.maximum(mask.sum() - 1, 1)
    return centred * jax.lax.rsqrt(variance + epsilon)


def absolute(x: Array) -> Array:
    """Return |x| with gradient sign(x), which is 0 at 0; that of `jnp.abs` is 1 there."""
    return x * jax.lax.stop_gradient(jnp.sign(x))


def safe_exp(x: Array, limit: float = 20.0) -> Array:
    """Return exp(x) in at least float32 with the exponent clamped to +-limit.

    The gradient is 0 beyond the clamp.
    """
    return jnp.exp(clamp(at_least_float32(x), -limit, limit))


@jax.custom_jvp
def clamp(x: Array, low: Array | float, high: Array | float) -> Array:
    """Limit x to [low, high]; the gradient is 1 inside and AT the bounds, 0 outside.

    `jnp.clip` passes half the gradient at a bound and `lax.clamp` none; the published losses (and
    their torch implementations) pass all of it, which decides on-policy ratios at a bound of
    exactly 1.
    """
    return jnp.clip(x, low, high)


@clamp.defjvp
def _clamp_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    x, low, high = primals
    inside = (x >= low) & (x <= high)
    return jnp.clip(x, low, high), jnp.where(inside, tangents[0], 0)


def token_log_probs(logits: Logits, tokens: Tokens, axis_name: Any = None) -> Array:
    """Return log softmax(logits)[tokens]: logits [..., V], tokens [...] int -> [...] float32.

    Args:
        axis_name: mesh axis over which the vocabulary is split, V of it here; None = all is here.
    """
    logits = at_least_float32(logits)
    if axis_name is None:
        chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        return chosen - logsumexp(logits)
    column = tokens - jax.lax.axis_index(axis_name) * logits.shape[-1]
    here = (column >= 0) & (column < logits.shape[-1])
    chosen = jnp.take_along_axis(logits, jnp.where(here, column, 0)[..., None], axis=-1)[..., 0]
    chosen = jax.lax.psum(jnp.where(here, chosen, 0), axis_name)
    return chosen - logsumexp(logits, axis_name)


# A logit whose probability is exactly 0. Not the lowest float: cotangents are multiplied by it.
FILTERED = -1e15


def keep_only(logits: Logits, sampling_mask_ids: Array, axis_name: Any = None) -> Logits:
    """Return logits [B, C, V] with all but some ids at `FILTERED`; float32.

    Args:
        sampling_mask_ids: [B, C, k] those that stay, then -1; nothing but -1 = all stay.
        axis_name: as in token_log_probs; the ids are those of the whole vocabulary.
    """
    logits = at_least_float32(logits)
    chosen = _chosen(logits, _local(logits, sampling_mask_ids, axis_name))
    unmasked = (sampling_mask_ids < 0).all(-1, keepdims=True)
    return jnp.where(chosen | unmasked, logits, FILTERED)


def event_log_probs(logits: Logits, ids: Array, axis_name: Any = None) -> Array:
    """Return the log-probs of some ids, and of all others together.

    The latter is a sum over the others, and no difference from 1, which has no digits where little
    is left.

    Args:
        logits: [B, C, V]; ids: [B, C, K] int, distinct; -1 = none, of probability 0.
        axis_name: as in token_log_probs; the ids are those of the whole vocabulary.

    Returns:
        [B, C, K + 1] float32, the others last.
    """
    logits = at_least_float32(logits)
    local = _local(logits, ids, axis_name)
    own = jnp.take_along_axis(logits, local, axis=-1, mode="fill", fill_value=0)
    own = own if axis_name is None else jax.lax.psum(own, axis_name)
    others = logsumexp(jnp.where(_chosen(logits, local), FILTERED, logits), axis_name)
    events = jnp.concatenate([jnp.where(ids < 0, FILTERED, own), others[..., None]], axis=-1)
    return events - logsumexp(logits, axis_name)[..., None]


def _local(logits: Logits, ids: Array, axis_name: Any) -> Array:
    """Return ids numbered by the columns of these logits; of one that is not here their number."""
    vocab = logits.shape[-1]
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * vocab
    return jnp.where((ids >= first) & (ids < first + vocab), ids - first, vocab)


def _chosen(logits: Logits, local: Array) -> Array:
    """Return which of logits [B, C, V] are those of `_local` ids [B, C, k]."""
    row, column = jnp.arange(logits.shape[0])[:, None, None], jnp.arange(logits.shape[1])[:, None]
    return jnp.zeros(logits.shape, bool).at[row, column, local].set(True, mode="drop")


def log_softmax(logits: Logits, axis_name: Any = None) -> Logits:
    """Return log-probs of all ids, [..., V] -> [..., V]; `axis_name` is as in token_log_probs."""
    logits = at_least_float32(logits)
    return logits - logsumexp(logits, axis_name)[..., None]


def top_ids(logits: Logits, count: int, axis_name: Any = None) -> Array:
    """Return the ids of the largest logits, the largest first: [..., V] -> [..., K] int32.

    K is `count`, or V where that is less. `axis_name` is as in token_log_probs.
    """
    values, ids = jax.lax.top_k(logits, min(count, logits.shape[-1]))
    if axis_name is not None:
        ids += jax.lax.axis_index(axis_name) * logits.shape[-1]
        values, ids = (
            jax.lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True) for x in (values, ids)
        )
        most = min(count, values.shape[-1])
        ids = jnp.take_along_axis(ids, jax.lax.top_k(values, most)[1], axis=-1)
    return ids.astype(jnp.int32)


def entropy(logits: Logits, axis_name: Any = None) -> Array:
    """Return the entropy of softmax(logits) in nats, [..., V] -> [...].

    `axis_name` is as in token_log_probs.
    """
    logits = at_least_float32(logits)
    log_p = logits - logsumexp(logits, axis_name)[..., None]
    minus = jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return -(minus if axis_name is None else jax.lax.psum(minus, axis_name))


def logsumexp(x: Logits, axis_name: Any = None) -> Array:
    """Return log sum exp over the last dim, [..., V] -> [...].

    `axis_name` is as in token_log_probs.
    """
    if axis_name is None:
        return jax.nn.logsumexp(x, axis=-1)
    largest = jax.lax.pmax(jax.lax.stop_gradient(x).max(-1), axis_name)
    return largest + jnp.log(jax.lax.psum(jnp.exp(x - largest[..., None]).sum(-1), axis_name))


@jax.jit  # a scan called eagerly is compiled at every call
def discounted_sums(x: FloatBT, gamma: Array | float) -> FloatBT:
    """Return y[:, t] = sum_{u >= t} gamma^(u - t) x[:, u], [B, T] -> [B, T]; gamma [] or [B]."""

    def step(later: Array, now: Array) -> tuple[Array, Array]:
        total = now + gamma * later
        return total, total

    return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.T, reverse=True)[1].T


def group_sum(x: Array, index: IntB) -> Array:
    """Return for each row the sum of x over its group: x [B, ...], index [B] -> [B, ...]."""
    return jax.ops.segment_sum(x, index, num_segments=x.shape[0])[index]


def group_centred(x: Array, index: IntB, counted: Array) -> Array:
    """Subtract from x the mean of its group, over rows: x [B, ...], index [B] -> [B, ...].

    Exactly 0 where all of a group are equal, which sum / n alone, rounded, is not.

    Args:
        counted: of x's shape, bool or the weight of each in the mean, 1 or more; what is not
            counted has no part in the mean, and becomes 0.
    """
    weights, counted = counted.astype(x.dtype), counted != 0
    least = jax.ops.segment_min(jnp.where(counted, x, jnp.inf), index, num_segments=x.shape[0])
    above = jnp.where(counted, x - least[index], 0)
    mean = group_sum(above * weights, index) / jnp.maximum(group_sum(weights, index), 1)
    return jnp.where(counted, above - mean, 0)


def group_std(centred: Array, index: IntB, counted: Array) -> Array:
    """Return for each row the standard deviation of its group, with n - 1: [B, ...] -> [B, ...].

    Args:
        centred: by `group_centred`.
        counted: bool, of its shape.
    """
    others = group_sum(counted.astype(centred.dtype), index) - 1
    return jnp.sqrt(group_sum(jnp.square(centred), index) / jnp.maximum(others, 1))


def step_ids(mask: MaskBT) -> IntBT:
    """Return for each token the number of the sampled token it belongs to: mask [B, T] -> int.

    A token that is not sampled (mask 0) belongs to the last sampled one before it, or to the first.
    """
    return jnp.maximum(jnp.cumsum(mask != 0, axis=-1) - 1, 0)


def sum_by_step(x: FloatBT, ids: IntBT) -> FloatBT:
    """Return y[b, k] = sum of x[b, t] over tokens with ids[b, t] = k: x, ids [B, T] -> [B, T]."""
    return jnp.zeros_like(x).at[jnp.arange(x.shape[0])[:, None], ids].add(x)


def top_tokens(keys: Array, valid: BoolBT, count: FloatScalar, row_ids: IntB) -> BoolBT:
    """Mark the `count` valid tokens with the largest keys, [B, T] bool; of equal ones the first.

    First by row id, then by position, so that the order of the rows does not matter. The smallest
    key among them is found bit by bit, which takes no sort of B T tokens (8 times as long for
    [512, 4096] on two cores).

    Args:
        keys: [B, T] float without NaN, or unsigned int.
        valid: [B, T] bool.
        count: []; with fewer valid tokens all of them are taken.
        row_ids: [B] int.
    """
    keys = keys if jnp.issubdtype(keys.dtype, jnp.unsignedinteger) else _sortable_bits(keys)
    bits, zero = jnp.iinfo(keys.dtype).bits, jnp.zeros((), keys.dtype)
    least = largest(lambda key: (valid & (keys >= key)).sum() >= count, bits, zero)
    above, equal = valid & (keys > least), valid & (keys == least)
    in_rows_before = jnp.where(row_ids[None, :] < row_ids[:, None], equal.sum(-1), 0).sum(-1)
    place = in_rows_before[:, None] + jnp.cumsum(equal, axis=-1)
    return above | (equal & (place <= count - above.sum()))


def largest(
    holds: Callable[[Array], Array], bits: Array | int, zero: Array, *, needed: Array | bool = True
) -> Array:
    """Return the largest number of so many bits for which `holds`; 0 if for none.

    Args:
        holds: numbers like `zero` -> bool, each by itself; true up to some number.
        zero: shape and integer type of the numbers.
        needed: False = 0 at once.
    """

    def set_bit(i: Array, found: Array) -> Array:
        higher = found | (jnp.ones((), zero.dtype) << (bits - 1 - i).astype(zero.dtype))
        return jnp.where(holds(higher), higher, found)

    return jax.lax.fori_loop(0, jnp.where(needed, bits, 0), set_bit, zero)


def _sortable_bits(x: Array) -> Array:
    """Map floats to unsigned ints in the same order."""
    unsigned = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0, x), unsigned)  # -0 equals 0
    sign = jnp.ones((), unsigned) << jnp.asarray(x.dtype.itemsize * 8 - 1, unsigned)
    return jnp.where(bits & sign, ~bits, bits | sign)
