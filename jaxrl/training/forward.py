"""Model -> what the losses need: log-probs, entropy, values, aligned to the predicted token.

The vocabulary head is the widest matrix of the model, and its logits the largest array of a step.
So it runs on the tokens that the loss asks for and on no others, a few columns at a time, and the
backward pass computes the logits again instead of keeping them: [B, T, V] never exists.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl.array_ops import Array, BoolBT, FloatBT, IntBT, entropy, keep_only, token_log_probs
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.linear import merge
from jaxrl.models.lora import with_dropout
from jaxrl.models.transformer import (
    Params,
    TransformerConfig,
    forward,
    head_axes,
    logical_axes,
    rms_norm,
    unembed,
)
from jaxrl.parallel.rules import Placement, gather_parameter
from jaxrl.types import ModelRows

# Per chunk of the head on one device; at least one column. Short responses want short chunks, but
# the gradient of the head is read and written for each: more tokens where products are fast. The
# logits are the largest temporary of a step, hence the last bound.
CHUNK_TOKENS, CPU_CHUNK_TOKENS, CHUNK_LOGITS = 1024, 256, 2**26


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
    placement: Placement | None = None,
) -> tuple[FloatBT, FloatBT]:
    """Return the wanted tokens' log-probs given those before, and the entropy they were drawn from.

    Args:
        rows: [R, L], one or several trajectories in each.
        temperature: divides the logits, as the sampler's does.
        dtype: compute dtype of the model.
        remat: what layers keep for the backward pass, see `models/remat.py`.
        kernel: of the attention, see `models/attention.py`.
        with_entropy: False returns zeros for it; it costs a pass over the vocabulary.
        placement: of the parameters and rows; None = one device, or as the partitioner decides.

    Returns:
        log_probs [B, T], entropy [B, T], float32: `log_probs[b, t] = log p(tokens[b, t] |
        tokens[b, :t])` where it is wanted, else 0. One trajectory in each row b, whatever the rows
        of the model held; T = L where `rows.source` is None.
    """
    params = with_dropout(params, rows.keys)
    hidden = forward(
        config,
        params,
        rows.tokens,
        rows.positions,
        rows.segment_ids,
        dtype=dtype,
        remat=remat,
        kernel=kernel,
        placement=placement,
    )
    with jax.named_scope("log_probs"):
        head = Head(config, temperature, dtype, with_entropy)
        targets = Targets(rows.tokens, rows.kept)
        targets, wanted = jax.tree.map(lambda x: x[:, 1:], (targets, rows.wanted))
        scores = score(head, params, hidden[:, :-1], targets, wanted, placement)
        first = ((0, 0), (1, 0))  # nothing predicts the first token
        log_probs, entropies = by_trajectory(rows, *(jnp.pad(x, first) for x in scores))
        return log_probs, entropies


def state_values(
    config: TransformerConfig,
    params: Params,
    rows: ModelRows,
    *,
    dtype: jnp.dtype,
    remat: str = "none",
    kernel: str = "xla",
    placement: Placement | None = None,
) -> tuple[FloatBT, ...]:
    """Return a critic's value of the state before each token, see `log_probs_and_entropy`.

    Returns:
        values [B, T] float32, alone in a tuple: `values[b, t]` is that of tokens[b, :t]; 0 for the
        first token and for padding.
    """
    params = with_dropout(params, rows.keys)
    hidden = forward(
        config,
        params,
        rows.tokens,
        rows.positions,
        rows.segment_ids,
        dtype=dtype,
        remat=remat,
        kernel=kernel,
        placement=placement,
    )
    with jax.named_scope("values"):
        normed = rms_norm(hidden, params["final_norm"], config).astype(jnp.float32)
        axes = logical_axes(config)["value_head"]
        head = gather_parameter(params["value_head"], axes, placement, jnp.float32)
        after = jnp.sum(normed * head[:, 0], axis=-1)  # a matrix product would round on TPUs
        before = jnp.pad(after[:, :-1], ((0, 0), (1, 0)))
        known = (rows.positions > 0) & (rows.segment_ids > 0)
        return by_trajectory(rows, jnp.where(known, before, 0.0))


def by_trajectory(rows: ModelRows, *scores: Array) -> tuple[FloatBT, ...]:
    """Move scores [R, L] to [B, T].

    Each place is read at most once, so the backward pass adds nothing up.
    """
    if rows.source is not None:
        read = {"mode": "fill", "fill_value": 0, "unique_indices": True}
        scores = tuple(x.reshape(-1).at[rows.source].get(**read) for x in scores)
    return scores


class Targets(NamedTuple):
    """Hold what is scored, by the place that predicts it."""

    tokens: IntBT
    kept: Array | None  # [B, T, k] ids that the token was drawn from, then -1; None = all


@dataclass(frozen=True)
class Head:
    """Describe the vocabulary head: which model, how its logits are scored, where its weights lie.

    Attributes:
        specs: how each weight is sharded; empty on one device.
        batch: mesh axes over which weights are stored in parts, and whole when used.
        vocab: mesh axis over which the vocabulary is split, in storage and in use.
        chunk_tokens: scored together, if their logits are not too many.
    """

    config: TransformerConfig | AdaptedModel
    temperature: float
    dtype: Any
    with_entropy: bool
    specs: tuple[tuple[str, PartitionSpec], ...] = ()
    batch: tuple[str, ...] = ()
    vocab: Any = None
    chunk_tokens: int = CHUNK_TOKENS

    def gather(self, weights: Params) -> Params:
        """Gather the weights whole over the batch axes."""

        def whole(name: str, w: Array) -> Array:
            for dim, axes in self._stored(name):
                w = jax.lax.all_gather(w, axes, axis=dim, tiled=True)
            return w

        return {name: whole(name, w) for name, w in weights.items()}

    def scatter(self, gradients: Params) -> Params:
        """Turn gradients of the gathered weights into this device's part of their sum.

        The parts are put one behind the other first: a reduce-scatter over a minor dim becomes an
        all-reduce on TPUs, which sends twice as much.
        """

        def part(name: str, g: Array) -> Array:
            for dim, axes in self._stored(name):
                parts = jax.lax.axis_size(axes)
                split = g.reshape(*g.shape[:dim], parts, -1, *g.shape[dim + 1 :])
                g = jax.lax.psum_scatter(jnp.moveaxis(split, dim, 0), axes)
            return g

        return {name: part(name, g) for name, g in gradients.items()}

    def _stored(self, name: str) -> list[tuple[int, tuple[str, ...]]]:
        """Return the dims of a weight that are split over batch axes, and these axes."""
        spec = dict(self.specs).get(name, ())
        named = [(axes,) if isinstance(axes, str) else axes or () for axes in spec]
        return [(dim, axes) for dim, axes in enumerate(named) if set(axes) & set(self.batch)]

    def cast(self, weights: Params) -> Params:
        """Cast matrices to the compute dtype; the scale of the norm stays float32."""
        return {n: w if n == "final_norm" else w.astype(self.dtype) for n, w in weights.items()}

    def __call__(self, weights: Params, hidden: Array, targets: Targets) -> tuple[Array, Array]:
        """Return log-probs and entropy [B, C] for hidden [B, C, D] and targets [B, C]."""
        logits = unembed(self.config, weights, hidden) / self.temperature
        if targets.kept is not None:
            logits = keep_only(logits, targets.kept, self.vocab)
        log_probs = token_log_probs(logits, targets.tokens, self.vocab)
        return log_probs, entropy(logits, self.vocab) if self.with_entropy else 0 * log_probs


def score(
    head: Head,
    params: Params,
    hidden: Array,
    targets: Targets,
    wanted: BoolBT,
    placement: Placement | None,
) -> tuple[FloatBT, FloatBT]:
    """Run `score_columns`, each device on its own rows and its own slice of the vocabulary.

    The weights are gathered once in each direction and their gradient is scattered once, in their
    own dtype; inside the loop over chunks the devices exchange only sums over the vocabulary.
    """
    axes = head_axes(head.config)
    # merged: an adapter of the head would be applied to every chunk anew
    weights = merge({name: params[name] for name in axes})
    platform = jax.default_backend() if placement is None else placement.platform
    chunk_tokens = CPU_CHUNK_TOKENS if platform == "cpu" else CHUNK_TOKENS
    head = dataclasses.replace(head, chunk_tokens=chunk_tokens)
    if placement is None:
        return score_columns(head, weights, hidden, targets, wanted)
    specs = {name: placement.spec(w.shape, axes[name]) for name, w in weights.items()}
    rows = PartitionSpec(placement.rules.batch)
    placed = dataclasses.replace(
        head,
        specs=tuple(specs.items()),
        batch=placement.batch_axes,
        vocab=_vocab_axis(axes, specs),
    )
    return jax.shard_map(
        functools.partial(score_columns, placed),
        mesh=placement.mesh,
        in_specs=(specs, rows, rows, rows),
        out_specs=rows,
        check_vma=False,
    )(weights, hidden, targets, wanted)


def _vocab_axis(axes: Params, specs: dict[str, PartitionSpec]) -> Any:
    """Return the mesh axis of the vocabulary dim of the head's matrix, if it is split."""
    name = "unembed" if "unembed" in axes else "embed"
    return specs[name][axes[name].index("vocab")] if name in axes else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def score_columns(
    head: Head, weights: Params, hidden: Array, targets: Targets, wanted: BoolBT
) -> tuple[FloatBT, FloatBT]:
    """Return `head(weights, hidden, targets)` at the wanted tokens, 0 elsewhere.

    The wanted tokens of each row are moved to its front, and a loop runs over chunks of columns for
    as long as a row has one left: work follows the longest response of the microbatch, though
    the shapes are fixed. Rows stay where they are, so a sharded batch stays sharded.

    Args:
        weights: of the head, as stored.
        hidden: [B, T, D]; targets: of [B, T] tokens; wanted: [B, T] bool.
    """
    return _score_columns(head, weights, hidden, targets, wanted)[0]


def _score_columns(
    head: Head, weights: Params, hidden: Array, targets: Targets, wanted: Array
) -> tuple[tuple[Array, Array], tuple]:
    whole = head.gather(head.cast(weights))
    length = wanted.shape[1]
    order = jnp.argsort(~wanted, axis=1, stable=True)  # wanted first
    width = _columns(head, wanted.shape, whole)
    pad = -length % width
    front = jax.tree.map(lambda x: _take(x, order, pad), (hidden, targets))
    chunks = -(-wanted.sum(1).max() // width)

    def body(i: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
        new = head(whole, *jax.tree.map(lambda x: _chunk(x, i, width), front))
        return tuple(_write(x, y, i, width) for x, y in zip(out, new, strict=True))  # type: ignore

    zeros = jnp.zeros(front[1].tokens.shape, jnp.float32)
    scores = jax.lax.fori_loop(0, chunks, body, (zeros, zeros))
    back = jnp.argsort(order, axis=1)
    scores = tuple(jnp.where(wanted, _take(x, back), 0.0) for x in scores)
    return scores, (weights, front, order, back, wanted, chunks)  # type: ignore[return-value]


def _score_columns_backward(head: Head, residuals: tuple, cotangents: tuple) -> tuple:
    weights, front, order, back, wanted, chunks = residuals
    whole = head.gather(head.cast(weights))
    hidden, targets = front
    width = _columns(head, wanted.shape, whole)
    pad = targets.tokens.shape[1] - wanted.shape[1]
    cotangents = tuple(_take(jnp.where(wanted, g, 0.0), order, pad) for g in cotangents)

    def body(i: Array, grads: tuple[Params, Array]) -> tuple[Params, Array]:
        targets_i = jax.tree.map(lambda x: _chunk(x, i, width), targets)
        pull_back = jax.vjp(lambda w, x: head(w, x, targets_i), whole, _chunk(hidden, i, width))[1]
        for_head, for_hidden = pull_back(tuple(_chunk(g, i, width) for g in cotangents))
        return (
            jax.tree.map(lambda total, g: total + g, grads[0], for_head),
            _write(grads[1], for_hidden, i, width),
        )

    no_gradient = {name: jnp.zeros(w.shape, weights[name].dtype) for name, w in whole.items()}
    zeros = (no_gradient, jnp.zeros_like(hidden))
    for_head, for_hidden = jax.lax.fori_loop(0, chunks, body, zeros)
    none = jax.tree.map(
        lambda x: np.zeros((*wanted.shape, *x.shape[2:]), jax.dtypes.float0), (targets, wanted)
    )
    return head.scatter(for_head), _take(for_hidden, back), *none


score_columns.defvjp(_score_columns, _score_columns_backward)


def _columns(head: Head, shape: tuple[int, ...], weights: Params) -> int:
    axes = head_axes(head.config)
    sizes = (dict(zip(axes[name], w.shape, strict=True)) for name, w in weights.items())
    vocabulary = max((size.get("vocab", 1) for size in sizes), default=1)
    return chunk_columns(head.chunk_tokens, vocabulary, *shape)


def chunk_columns(chunk_tokens: int, vocabulary: int, rows: int, length: int) -> int:
    """Return how many columns the head scores together, for rows [rows, length] on one device."""
    width = max(min(chunk_tokens, CHUNK_LOGITS // vocabulary) // rows, 1)
    return min(width - width % 8 or width, length)  # TPUs lay columns out by eights


def _take(x: Array, order: Array, pad: int = 0) -> Array:
    """Return x [B, T, ...] with each row's columns in `order` [B, T], then `pad` columns of 0."""
    index = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
    taken = jnp.take_along_axis(x, index, axis=1)
    return jnp.pad(taken, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))


def _chunk(x: Array, i: Array, width: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * width, width, axis=1)


def _write(x: Array, part: Array, i: Array, width: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, i * width, axis=1)
