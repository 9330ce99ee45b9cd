"""Model -> what the losses need: log-probs and entropy, aligned to the predicted token.

The vocabulary head is the widest matrix of the model, and its logits the largest array of a step.
So it runs on the tokens that the loss asks for and on no others, a few columns at a time, and the
backward pass computes the logits again instead of keeping them: [B, T, V] never exists.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.array_ops import Array, entropy, token_log_probs
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.transformer import Params, TransformerConfig, forward, unembed
from jaxrl.types import ModelRows

CHUNK_TOKENS = 1024  # per chunk of the head, over all rows; at least one column


def log_probs_and_entropy(
    config: TransformerConfig | AdaptedModel,
    params: Params,
    rows: ModelRows,
    *,
    temperature: float,
    dtype: jnp.dtype,
    remat: str = "none",
    kernel: str = "xla",
    with_entropy: bool = True,
) -> tuple[Array, Array]:
    """Log-prob of the wanted tokens given those before, and the entropy they were drawn from.

    Args:
        rows: [R, L], one or several trajectories in each.
        temperature: divides the logits, as the sampler's does.
        dtype: compute dtype of the model.
        remat: what layers keep for the backward pass, see `models/remat.py`.
        kernel: of the attention, see `models/attention.py`.
        with_entropy: False returns zeros for it; it costs a pass over the vocabulary.

    Returns:
        log_probs [B, T], entropy [B, T], float32: `log_probs[b, t] = log p(tokens[b, t] |
        tokens[b, :t])` where it is wanted, else 0. One trajectory in each row b, whatever the rows
        of the model held; T = L where `rows.source` is None.
    """
    given = rows.tokens, rows.positions, rows.segment_ids
    hidden = forward(config, params, *given, dtype=dtype, remat=remat, kernel=kernel)
    head = {name: params[name] for name in ("embed", "unembed", "final_norm") if name in params}

    def score(head: Params, hidden: Array, targets: Array) -> tuple[Array, Array]:
        logits = unembed(config, head, hidden) / temperature
        log_probs = token_log_probs(logits, targets)
        return log_probs, entropy(logits) if with_entropy else jnp.zeros_like(log_probs)

    with jax.named_scope("log_probs"):
        scores: tuple[Array, Array] = score_columns(
            score, head, hidden[:, :-1], rows.tokens[:, 1:], rows.wanted[:, 1:]
        )
        first = ((0, 0), (1, 0))  # nothing predicts the first token
        return _by_trajectory(rows, jnp.pad(scores[0], first), jnp.pad(scores[1], first))


def _by_trajectory(rows: ModelRows, *scores: Array) -> tuple[Array, Array]:
    """[R, L] -> [B, T]; each place is read at most once, so the backward pass adds nothing up."""
    if rows.source is not None:
        read = {"mode": "fill", "fill_value": 0, "unique_indices": True}
        scores = tuple(x.reshape(-1).at[rows.source].get(**read) for x in scores)
    return scores[0], scores[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def score_columns(
    score: Any, head: Params, hidden: Array, targets: Array, wanted: Array
) -> tuple[Array, Array]:
    """`score(head, hidden, targets)` at the wanted tokens, 0 elsewhere.

    The wanted tokens of each row are moved to its front, and a loop runs over chunks of columns for
    as long as a row has one left: work follows the longest response of the microbatch, though
    the shapes are fixed. Rows stay where they are, so a sharded batch stays sharded.

    Args:
        score: (head, hidden [B, C, D], targets [B, C]) -> two arrays [B, C].
        hidden: [B, T, D]; targets: [B, T]; wanted: [B, T] bool.
    """
    return _score_columns(score, head, hidden, targets, wanted)[0]


def _score_columns(
    score: Any, head: Params, hidden: Array, targets: Array, wanted: Array
) -> tuple[tuple[Array, Array], tuple]:
    length = wanted.shape[1]
    order = jnp.argsort(~wanted, axis=1, stable=True)  # wanted first
    width = _columns(*wanted.shape)
    pad = -length % width
    front = _take(hidden, order, pad), _take(targets, order, pad)
    chunks = -(-wanted.sum(1).max() // width)

    def body(i: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
        new = score(head, *(_chunk(x, i, width) for x in front))
        return tuple(_write(x, y, i, width) for x, y in zip(out, new, strict=True))  # type: ignore

    zeros = jnp.zeros(front[1].shape, jnp.float32)
    scores = jax.lax.fori_loop(0, chunks, body, (zeros, zeros))
    back = jnp.argsort(order, axis=1)
    scores = tuple(jnp.where(wanted, _take(x, back), 0.0) for x in scores)
    return scores, (head, front, order, back, wanted, chunks)  # type: ignore[return-value]


def _score_columns_backward(score: Any, residuals: tuple, cotangents: tuple) -> tuple:
    head, front, order, back, wanted, chunks = residuals
    hidden, targets = front
    width = _columns(*wanted.shape)
    pad = targets.shape[1] - wanted.shape[1]
    cotangents = tuple(_take(jnp.where(wanted, g, 0.0), order, pad) for g in cotangents)

    def body(i: Array, grads: tuple[Params, Array]) -> tuple[Params, Array]:
        targets_i = _chunk(targets, i, width)
        pull_back = jax.vjp(lambda w, x: score(w, x, targets_i), head, _chunk(hidden, i, width))[1]
        for_head, for_hidden = pull_back(tuple(_chunk(g, i, width) for g in cotangents))
        return (
            jax.tree.map(jnp.add, grads[0], for_head),
            _write(grads[1], for_hidden, i, width),
        )

    zeros = jax.tree.map(jnp.zeros_like, (head, hidden))
    for_head, for_hidden = jax.lax.fori_loop(0, chunks, body, zeros)
    no_gradient = np.zeros(wanted.shape, jax.dtypes.float0)
    return for_head, _take(for_hidden, back), no_gradient, no_gradient


score_columns.defvjp(_score_columns, _score_columns_backward)


def _columns(rows: int, length: int) -> int:
    return min(max(CHUNK_TOKENS // rows, 1), length)


def _take(x: Array, order: Array, pad: int = 0) -> Array:
    """x [B, T, ...] with the columns of each row in `order` [B, T], and `pad` columns of zeros."""
    index = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
    taken = jnp.take_along_axis(x, index, axis=1)
    return jnp.pad(taken, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))


def _chunk(x: Array, i: Array, width: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * width, width, axis=1)


def _write(x: Array, part: Array, i: Array, width: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, i * width, axis=1)
