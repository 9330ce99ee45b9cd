"""Drawing tokens: inverse CDF of the tempered, filtered distribution, one uniform per row."""

import jax
import jax.numpy as jnp

from jaxrl.array_ops import Array, largest

BLOCK = 256  # tokens per block of `inverse_cdf`
BITS_TO_ONE = 30  # of a float32 from 0 to 1; all such bits are of a float below 2


def uniforms(keys: Array, positions: Array) -> Array:
    """Draw one uniform in [0, 1) per row, a function of the row's key and position alone.

    keys [B, 2] uint32 key data, positions [B] int. Neither the batch nor its order plays a part.
    """

    def draw(key: Array, position: Array) -> Array:
        return jax.random.uniform(
            jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        )

    return jax.vmap(draw)(keys, positions)


def inverse_cdf(weights: Array, u: Array) -> Array:
    """Return the token whose part of the cumulative sum holds u * total.

    Weights [B, V] are >= 0, u is [B]. First the block of `BLOCK` tokens, then the token in it: a
    cumulative sum over the whole vocabulary of 49,152 took 47 ms for 64 rows on two cores, this
    takes 2. Never a token of weight 0; the last one where weights are NaN.
    """
    rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % BLOCK))).reshape(rows, -1, BLOCK)
    sums = blocks.sum(-1)
    block, below = _first_above(sums, u * sums.sum(-1))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token = block * BLOCK + _first_above(inside, u * sums.sum(-1) - below)[0]
    return jnp.minimum(token, vocab - 1)


def _first_above(weights: Array, target: Array) -> tuple[Array, Array]:
    """Find the least i with weights[i] > 0 and sum(weights[: i + 1]) > target, and the sum before.

    Where rounding leaves none above, the last with a positive weight.
    """
    cdf = jnp.cumsum(weights, axis=-1)
    positive = weights > 0
    above = positive & (cdf > target[:, None])
    last = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    first = jnp.where(above.any(-1), jnp.argmax(above, axis=-1), last)
    before = jnp.take_along_axis(cdf - weights, first[:, None], axis=-1)[:, 0]
    return first, before


def _first_of(chosen: Array) -> Array:
    """Return the first True of each row, [B, V] -> [B]; the last token where there is none (NaN).

    `argmax` of the logits reduces pairs of numbers, which XLA does not vectorise on CPUs.
    """
    last = chosen.shape[-1] - 1
    return jnp.where(chosen, jnp.arange(last + 1), last).min(axis=-1)


def sample(
    logits: Array,
    u: Array,
    *,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    filtered: bool,
    keep: int = 0,
) -> tuple[Array, Array, Array]:
    """Draw one token per row.

    The distribution is softmax(logits / temperature), then tokens below `min_p` times the largest
    probability go, then all but the `top_k` largest, then all but the smallest set that reaches
    `top_p` of what is left. Ties are kept in token order; see `filter_weights`.

    Args:
        logits: [B, V] float32.
        u: [B] uniforms in [0, 1).
        temperature: [B]; 0 = argmax.
        top_k, top_p, min_p: [B]; off at k <= 0, p >= 1, p <= 0.
        filtered: False skips the filters; only right if no row has one.
        keep: most tokens of a set that is reported.

    Returns:
        tokens [B] int32; their log-probs [B] under the distribution they were drawn from; the ids
        that filters left [B, keep], most probable first, then -1. A greedy token has the log-prob
        of the untempered softmax, a point mass would say 0; and no ids.
    """
    greedy = temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    peak = scaled.max(axis=-1, keepdims=True)
    weights = left = jnp.exp(scaled - peak)
    ids = jnp.full((len(logits), keep), -1)
    if filtered:
        left = filter_weights(weights, top_k, top_p, min_p)
        if keep:
            probable, order = jax.lax.top_k(left, min(keep, left.shape[1]))
            among = (probable > 0) & ~greedy[:, None]
            ids = ids.at[:, : order.shape[1]].set(jnp.where(among, order, -1))
        left = jnp.where(greedy[:, None], weights, left)  # greedy rows are scored by the whole
    tokens = jnp.where(greedy, _first_of(scaled == peak), inverse_cdf(left, u))
    chosen = jnp.take_along_axis(scaled - peak, tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), chosen - jnp.log(left.sum(-1)), ids


def adjust(logits: Array, seen: Array | None, penalty: Array) -> Array:
    """Make tokens that a row holds less likely by its repetition penalty.

    logits / penalty where they are positive, logits * penalty where not (Keskar et al., 2019,
    https://arxiv.org/abs/1909.05858, in the form that `transformers` gave it). logits [B, V]; seen
    [B, V] bool, None = no row has a penalty; penalty [B].
    """
    if seen is None:
        return logits
    factor = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)


def top_tokens(logits: Array, temperature: Array, number: int) -> tuple[Array, Array]:
    """Return the `number` most probable tokens of softmax(logits / temperature), with log-probs.

    Filters play no part; temperature 0 counts as 1, as in `sample`. Both [B, number].
    """
    if number == 0:
        return jnp.zeros((len(logits), 0), jnp.int32), jnp.zeros((len(logits), 0), jnp.float32)
    log_probs = jax.nn.log_softmax(
        logits / jnp.where(temperature == 0, 1.0, temperature)[:, None], axis=-1
    )
    values, ids = jax.lax.top_k(log_probs, number)
    return ids.astype(jnp.int32), values


def filter_weights(weights: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Zero what min-p, top-k and top-p drop, in this order: weights [B, V] in [0, 1], largest 1.

    A token comes before another one if its weight is larger, or equal and its id smaller.

    - min-p keeps weights of at least `min_p`.
    - top-k keeps the first `top_k` tokens of what is left.
    - top-p keeps the fewest first ones of what is left then whose weights sum to at least `top_p`
      times the sum of all that is left, and one at least.

    Sums are float32, of all tokens in the order of their ids with 0 for those that do not count: no
    larger set has a smaller sum. Of equal weights w, as many are kept as w goes into what the
    larger ones leave to reach, rounded up.
    """
    weights = jnp.where(weights >= jnp.minimum(min_p, 1)[:, None], weights, 0)
    first_k = jnp.minimum(top_k, weights.shape[1]).astype(weights.dtype)
    weights = _until(weights, jnp.ones_like(weights), first_k, top_k > 0)
    mass = jnp.maximum(top_p * weights.sum(-1), jnp.finfo(weights.dtype).tiny)
    return _until(weights, weights, mass, top_p < 1)


def _until(weights: Array, amounts: Array, need: Array, chosen: Array) -> Array:
    """Zero weights behind the first ones whose amounts sum to `need`, in the `chosen` rows.

    Weights are floats in [0, 1], whose bits are in their order: the smallest that is kept is found
    bit by bit, and where not all of its equals are kept, the id of the last one. Accelerators do
    that sooner than they sort.

    Args:
        weights: [B, V].
        amounts: [B, V], equal where the weights are.
        need: [B], positive.
        chosen: [B] bool; the others are left as they are.
    """
    rows, vocab = weights.shape
    zero = jnp.zeros(rows, jnp.int32)

    def total(tokens: Array) -> Array:
        return jnp.where(tokens, amounts, 0).sum(-1)

    def reached(bits: Array) -> Array:
        return total(weights >= _float(bits)) >= need

    least = _float(largest(reached, BITS_TO_ONE, zero, needed=chosen.any()))
    above, equal = weights > least, weights == least
    each = jnp.where(equal, amounts, 0).max(-1)
    count = jnp.ceil((need - total(above)) / each)  # of the equals, at least one
    parted = chosen & (count < equal.sum(-1))

    def within(ids: Array) -> Array:
        return (equal & (jnp.arange(vocab) < ids[:, None])).sum(-1) <= count

    end = largest(within, vocab.bit_length(), zero, needed=parted.any())
    before = (jnp.arange(vocab) < end[:, None]) | ~parted[:, None]
    return jnp.where(above | (equal & before) | ~chosen[:, None], weights, 0)


def _float(bits: Array) -> Array:
    """Turn the bits of floats [B] into the floats [B, 1]."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)[:, None]
