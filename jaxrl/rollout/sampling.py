"""Drawing tokens: inverse CDF of the tempered, filtered distribution, one uniform per row."""

import jax
import jax.numpy as jnp

from jaxrl.array_ops import Array


def uniforms(keys: Array, positions: Array) -> Array:
    """One uniform in [0, 1) per row, a function of the row's key and position alone.

    keys [B, 2] uint32 key data, positions [B] int. Neither the batch nor its order plays a part.
    """

    def draw(key: Array, position: Array) -> Array:
        return jax.random.uniform(
            jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        )

    return jax.vmap(draw)(keys, positions)


def inverse_cdf(probs: Array, u: Array) -> Array:
    """Smallest i with cdf(i) > u * total and probs[i] > 0: probs [B, V] (unnormalised), u [B].

    The second condition matters: a parallel cumulative sum may rise by an ulp where probs is 0.
    """
    cdf = jnp.where(probs > 0, jnp.cumsum(probs, axis=-1), -jnp.inf)
    total = cdf.max(axis=-1)
    return jnp.argmax(cdf > (u * total)[:, None], axis=-1)


def sample(
    logits: Array,
    u: Array,
    *,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    filtered: bool,
) -> tuple[Array, Array]:
    """Draw one token per row.

    The distribution is softmax(logits / temperature), then tokens below `min_p` times the largest
    probability go, then all but the `top_k` largest, then all but the smallest set that reaches
    `top_p` of what is left. Ties are kept in token order.

    Args:
        logits: [B, V] float32.
        u: [B] uniforms in [0, 1).
        temperature: [B]; 0 = argmax.
        top_k, top_p, min_p: [B]; off at k <= 0, p >= 1, p <= 0.
        filtered: False skips the sort; only right if no row filters.

    Returns:
        tokens [B] int32 and their log-probs [B] under the distribution they were drawn from. A
        greedy token has the log-prob of the untempered softmax: a point mass would say 0.
    """
    greedy = temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    log_p = jax.nn.log_softmax(scaled)
    if not filtered:
        tokens = inverse_cdf(jnp.exp(log_p), u)
        log_mass = jnp.zeros_like(u)
    else:
        probs = jnp.exp(log_p)
        order = jnp.argsort(-log_p, axis=-1, stable=True)
        kept = filter_sorted(jnp.take_along_axis(probs, order, axis=-1), top_k, top_p, min_p)
        # drawn in token order, as without filters: what other rows ask for plays no part
        kept = jnp.put_along_axis(probs, order, kept, axis=-1, inplace=False)
        tokens = inverse_cdf(kept, u)
        whole = (top_k <= 0) & (top_p >= 1) & (min_p <= 0)
        log_mass = jnp.where(greedy | whole, 0.0, jnp.log(kept.sum(-1)))
    tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1), tokens)
    chosen = jnp.take_along_axis(log_p, tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), chosen - log_mass


def filter_sorted(probs: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Zero what min-p, top-k and top-p drop: probs [B, V] in descending order."""
    vocab = probs.shape[-1]
    rank = jnp.arange(vocab)
    limit = jnp.where(top_k > 0, top_k, vocab)[:, None]
    keep = (rank < limit) & (probs >= min_p[:, None] * probs[:, :1])
    probs = jnp.where(keep, probs, 0.0)
    before = jnp.cumsum(probs, axis=-1) - probs
    within = before < top_p[:, None] * probs.sum(-1, keepdims=True)
    unlimited = (top_p >= 1)[:, None]  # rounding of the sums must not drop the last token
    return jnp.where(within | unlimited | (rank == 0), probs, 0.0)
