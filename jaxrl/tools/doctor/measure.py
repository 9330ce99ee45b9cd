"""Gradients of one minibatch, cut in different ways, and how far they are apart."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.data.microbatches import Microbatching, microbatches
from jaxrl.data.packing import one_per_row, round_up
from jaxrl.models.lora import with_token_keys
from jaxrl.tools.doctor.bounds import exact_products
from jaxrl.training.update import Updater
from jaxrl.types import TrainBatch

KEY = 7  # seed of what a loss or dropout draws


class Difference(NamedTuple):
    """Describe how far two trees of arrays are apart.

    Attributes:
        relative: norm of the difference, of the norm of the first.
        worst: path of the array with the largest part of it.
    """

    relative: float
    worst: str


def whole(updater: Updater, rows: int) -> Microbatching:
    """Return the cut that makes `rows` trajectories one microbatch, one trajectory in each row."""
    groups = updater.microbatching.groups
    total = round_up(rows, groups)
    return Microbatching(rows=total, total=total, groups=groups)


def gradient(updater: Updater, params: Any, minibatch: TrainBatch, cut: Microbatching) -> Any:
    """Return the gradient of the objective of a minibatch, by the real update, in this cut."""
    other = copy.copy(updater)  # the compiled functions are shared
    other.microbatching = cut
    with exact_products():
        weights, _ = other.weights(minibatch)
        return other.gradients(params, minibatch, weights, jax.random.key(KEY))[0]


def longest_first(minibatch: TrainBatch) -> TrainBatch:
    """Return the rows in the order in which `gradient` gives them to model and loss."""
    order = np.argsort(-np.asarray(minibatch.lengths), kind="stable")
    return jax.tree.map(lambda x: np.asarray(x)[order], minibatch)


def widened(batch: TrainBatch, width: int) -> TrainBatch:
    """Return the batch with columns cut or padded to `width`."""

    def pad(x: Any) -> Any:
        x = np.asarray(x)[:, :width]
        more = ((0, 0), (0, width - x.shape[1]), *((0, 0),) * (x.ndim - 2))
        return np.pad(x, more)

    return jax.tree.map(lambda x: pad(x) if np.ndim(x) > 1 else x, batch)


def gradient_in_order(updater: Updater, params: Any, minibatch: TrainBatch, width: int) -> Any:
    """Return the gradient of a minibatch as one microbatch of `width` columns, its rows as given.

    `gradient` orders rows by length first, and cuts columns to a bucket.
    """
    rows, key = whole(updater, len(minibatch.index)).total, jax.random.key(KEY)
    wide = widened(minibatch, width)
    weights, _ = updater.weights(wide)
    given = updater.objective.seen(wide), weights, wide.tokens, wide.lengths, wide.kept
    more = rows - len(minibatch.index)
    batch, weights, tokens, lengths, kept = jax.tree.map(
        lambda x: np.pad(x, ((0, more), *((0, 0),) * (np.ndim(x) - 1))), given
    )
    model_rows = one_per_row(tokens, lengths, batch.loss_mask, kept)
    model_rows = with_token_keys(params, model_rows, batch.row_ids, key)
    with exact_products():
        placed = updater.place((model_rows, batch, weights))
        return updater.accumulate(updater.zeros(params), params, *placed, key)[0]


def compare(expected: Any, found: Any) -> Difference:
    """Compare two trees array by array on the host, in float64.

    They may be on different devices. NaN: the first is 0 or not finite;
    infinity: the second is not finite.
    """
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    squares, norm = {}, 0.0
    for (path, left), right in pairs:
        a, b = (np.asarray(jax.device_get(x), np.float64) for x in (left, right))
        squares[jax.tree_util.keystr(path)] = float(np.square(a - b).sum())
        norm += float(np.square(a).sum())
    total = sum(squares.values())
    if not norm or not np.isfinite(norm):
        return Difference(float("nan"), "")
    if not np.isfinite(total):
        return Difference(float("inf"), "not finite")
    return Difference((total / norm) ** 0.5, max(squares, key=lambda name: squares[name]))


def loss_slopes(
    updater: Updater, outputs: Sequence[np.ndarray], minibatch: TrainBatch, cut: Microbatching
) -> list[np.ndarray]:
    """Return derivatives of the loss by log-prob and entropy of each token, [B, T] each.

    They are those of this cut. The model has no part in it: where these differ the loss is at
    fault.
    """
    weights, _ = updater.weights(minibatch)
    tree = updater.objective.seen(minibatch), weights, tuple(outputs)
    found = [np.zeros(minibatch.tokens.shape) for _ in outputs]
    for chosen, _, (part, weight, given) in microbatches(tree, minibatch, cut):
        slopes, _ = updater.cotangents(*given, part, weight, jax.random.key(KEY))
        for array, slope in zip(found, jax.device_get(slopes), strict=True):
            array[chosen, : slope.shape[1]] = slope[: len(chosen)]
    return found


def slopes_in_order(
    updater: Updater, outputs: Sequence[np.ndarray], wide: TrainBatch
) -> list[np.ndarray]:
    """Return `loss_slopes` of rows as they are given, without a cut to the bucket."""
    weights, _ = updater.weights(wide)
    seen = updater.objective.seen(wide)
    return list(jax.device_get(updater.cotangents(*outputs, seen, weights, jax.random.key(KEY))[0]))
