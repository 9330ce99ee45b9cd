"""Drawing tokens: inverse CDF of the tempered, filtered distribution, one uniform per row.

The vocabulary may be split over mesh axes, in equal parts in the order of the ids. Then V is what a
device has, ids are those of the whole vocabulary, and all devices get the same results. What
travels is a number or two of a row, or the sums of blocks of tokens. `axes` names the mesh axes; by
none of them, the default, all is here.
"""

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


def inverse_cdf(weights: Array, u: Array, axes: tuple[str, ...] = ()) -> Array:
    """Return the token whose part of the cumulative sum holds u * total.

    Weights [B, V] are >= 0, u is [B]. First the block of `BLOCK` tokens, then the token in it: a
    cumulative sum over the whole vocabulary of 49,152 took 47 ms for 64 rows on two cores, this
    takes 2. Never a token of weight 0; the last one where weights are NaN.

    Of a split vocabulary each device gets the sums of all blocks, and the owner of the block looks
    into it. Blocks begin anew on each device, so their sums may be rounded in another way than
    on one: the token is another one only where u * total is as near as that to where it ends.
    """
    rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % BLOCK))).reshape(rows, -1, BLOCK)
    sums = jax.lax.all_gather(blocks.sum(-1), axes, axis=1, tiled=True)
    block, below = _first_above(sums, u * sums.sum(-1))
    here, owned = _own(block, blocks.shape[1], axes)
    inside = jnp.take_along_axis(blocks, here[:, None, None], axis=1)[:, 0]
    token = here * BLOCK + _first_above(inside, u * sums.sum(-1) - below)[0]
    token = jnp.minimum(token, vocab - 1) + jax.lax.axis_index(axes) * vocab
    return jax.lax.psum(jnp.where(owned, token, 0), axes)


def _own(numbers: Array, size: int, axes: tuple[str, ...]) -> tuple[Array, Array]:
    """Return numbers as this device counts its own `size`, 0 for others'; and which are its own."""
    local = numbers - jax.lax.axis_index(axes) * size
    owned = (local >= 0) & (local < size)
    return jnp.where(owned, local, 0), owned


def pick(x: Array, ids: Array, axes: tuple[str, ...] = ()) -> Array:
    """Return x [B, V] at ids [B], one in each row."""
    here, owned = _own(ids, x.shape[1], axes)
    chosen = jnp.take_along_axis(x, here[:, None], axis=-1)[:, 0]
    return jax.lax.psum(jnp.where(owned, chosen, 0), axes)


def assign(x: Array, ids: Array, value: Array | float | bool, axes: tuple[str, ...] = ()) -> Array:
    """Return x [B, V] with a value at ids [B, n]; ids that are none are passed over."""
    here, owned = _own(ids, x.shape[1], axes)
    rows = jnp.arange(len(x))[:, None]
    return x.at[rows, jnp.where(owned, here, x.shape[1])].set(value, mode="drop")


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


def _first_of(chosen: Array, axes: tuple[str, ...]) -> Array:
    """Return the first True of each row, [B, V] -> [B]; the last token where there is none (NaN).

    `argmax` of the logits reduces pairs of numbers, which XLA does not vectorise on CPUs.
    """
    ids = _ids(chosen.shape[-1], axes)
    last = chosen.shape[-1] * jax.lax.axis_size(axes) - 1
    return jax.lax.pmin(jnp.where(chosen, ids, last).min(axis=-1), axes)


def _ids(vocab: int, axes: tuple[str, ...]) -> Array:
    """Return the ids [V] of the tokens that this device has."""
    return jnp.arange(vocab) + jax.lax.axis_index(axes) * vocab


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
    axes: tuple[str, ...] = (),
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
    peak = jax.lax.pmax(scaled.max(axis=-1, keepdims=True), axes)
    weights = left = jnp.exp(scaled - peak)
    ids = jnp.full((len(logits), keep), -1)
    if filtered:
        left = filter_weights(weights, top_k, top_p, min_p, axes)
        if keep:
            probable, order = _largest_of(left, keep, axes)
            among = (probable > 0) & ~greedy[:, None]
            ids = ids.at[:, : order.shape[1]].set(jnp.where(among, order, -1))
        left = jnp.where(greedy[:, None], weights, left)  # greedy rows are scored by the whole
    tokens = jnp.where(greedy, _first_of(scaled == peak, axes), inverse_cdf(left, u, axes))
    chosen, total = pick(scaled - peak, tokens, axes), jax.lax.psum(left.sum(-1), axes)
    return tokens.astype(jnp.int32), chosen - jnp.log(total), ids


def _largest_of(x: Array, number: int, axes: tuple[str, ...]) -> tuple[Array, Array]:
    """Return the `number` largest of each row [B, V] and their ids, of equal ones the first.

    Both [B, number], or [B, V] if that is less.
    """
    values, ids = jax.lax.top_k(x, min(number, x.shape[1]))
    if axes:
        ids = ids + jax.lax.axis_index(axes) * x.shape[1]
        values, ids = (jax.lax.all_gather(y, axes, axis=1, tiled=True) for y in (values, ids))
        values, among = jax.lax.top_k(values, min(number, values.shape[1]))
        ids = jnp.take_along_axis(ids, among, axis=1)
    return values, ids


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


def top_tokens(
    logits: Array, temperature: Array, number: int, axes: tuple[str, ...] = ()
) -> tuple[Array, Array]:
    """Return the `number` most probable tokens of softmax(logits / temperature), with log-probs.

    Filters play no part; temperature 0 counts as 1, as in `sample`. Both [B, number].
    """
    if number == 0:
        return jnp.zeros((len(logits), 0), jnp.int32), jnp.zeros((len(logits), 0), jnp.float32)
    scaled = logits / jnp.where(temperature == 0, 1.0, temperature)[:, None]
    scaled -= jax.lax.pmax(scaled.max(-1, keepdims=True), axes)
    log_probs = scaled - jnp.log(jax.lax.psum(jnp.exp(scaled).sum(-1, keepdims=True), axes))
    values, ids = _largest_of(log_probs, number, axes)
    return ids.astype(jnp.int32), values


def filter_weights(
    weights: Array, top_k: Array, top_p: Array, min_p: Array, axes: tuple[str, ...] = ()
) -> Array:
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
    vocab = weights.shape[1] * jax.lax.axis_size(axes)
    first_k = jnp.minimum(top_k, vocab).astype(weights.dtype)
    weights = _until(weights, jnp.ones_like(weights), first_k, top_k > 0, axes)
    left = jax.lax.psum(weights.sum(-1), axes)
    mass = jnp.maximum(top_p * left, jnp.finfo(weights.dtype).tiny)
    return _until(weights, weights, mass, top_p < 1, axes)


def _until(
    weights: Array, amounts: Array, need: Array, chosen: Array, axes: tuple[str, ...]
) -> Array:
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
    zero, ids = jnp.zeros(rows, jnp.int32), _ids(vocab, axes)

    def total(tokens: Array) -> Array:
        return jax.lax.psum(jnp.where(tokens, amounts, 0).sum(-1), axes)

    def number(tokens: Array) -> Array:
        return jax.lax.psum(tokens.sum(-1), axes)

    def reached(bits: Array) -> Array:
        return total(weights >= _float(bits)) >= need

    least = _float(largest(reached, BITS_TO_ONE, zero, needed=chosen.any()))
    above, equal = weights > least, weights == least
    each = jax.lax.pmax(jnp.where(equal, amounts, 0).max(-1), axes)
    count = jnp.ceil((need - total(above)) / each)  # of the equals, at least one
    parted = chosen & (count < number(equal))

    def within(ends: Array) -> Array:
        return number(equal & (ids < ends[:, None])) <= count

    bits = (vocab * jax.lax.axis_size(axes)).bit_length()
    end = largest(within, bits, zero, needed=parted.any())
    before = (ids < end[:, None]) | ~parted[:, None]
    return jnp.where(above | (equal & before) | ~chosen[:, None], weights, 0)


def _float(bits: Array) -> Array:
    """Turn the bits of floats [B] into the floats [B, 1]."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)[:, None]
