"""The vocabulary head of the exact mode: logits, and what a token's are worth, a tile at a time.

The sampler computes the logits of its rows, draws, and asks what the token was worth; the trainer
has the tokens and computes both in one tile. See `models/exact.py`.

Shape legend: B rows, T tokens, n tokens of a tile, D model width, V vocabulary, v of it here, k ids
that a token was drawn from, S logical parts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.array_ops import Array, keep_only
from jaxrl.models.architecture import with_known_ids
from jaxrl.models.exact import Given, Tiles, by_tokens, each
from jaxrl.models.linear import gather_weight, merge
from jaxrl.models.transformer import (
    Params,
    TransformerConfig,
    logical_axes,
    only_known,
    unembed,
)
from jaxrl.parallel.rules import Placement

AXES = ("embed", "vocab")


def head_weights(
    config: TransformerConfig, params: Params, placement: Placement | None, dtype: Any
) -> Params:
    """Return the final norm and the matrix [D, V], whole over the batch axes."""
    norm = params["final_norm"]
    if "unembed" in params:
        w = gather_weight(params["unembed"], AXES, placement, dtype)
    else:
        w = gather_weight(params["embed"], AXES[::-1], placement, dtype)
        w = jnp.swapaxes(merge(w), 0, 1)
    axes = logical_axes(config)["final_norm"]
    return {"final_norm": gather_weight(norm, axes, placement, jnp.float32), "unembed": w}


def exact_logits(
    config: TransformerConfig,
    tiles: Tiles,
    weights: Params,
    hidden: Array,
    real: Array,
    *,
    placement: Placement | None,
) -> Array:
    """Return float32 logits [B, T, V], 0 in tiles of which nothing is `real` [B, T].

    Args:
        weights: see `head_weights`.
        hidden: [B, T, D], before the final norm.
    """

    def run(tiles: Tiles, weights: Params, moved: tuple, fixed: tuple) -> Array:
        del fixed
        return _logits(config, tiles, weights, *moved)

    return by_tokens(
        run,
        tiles,
        weights,
        Given((hidden,), (), real),
        dtype=weights["unembed"].dtype,
        placement=placement,
        specs=_specs(weights, placement),
        moved=(0,),
        outputs=config.vocab_size,
    )


def exact_scores_of_logits(
    config: TransformerConfig,
    tiles: Tiles,
    logits: Array,
    temperature: Array,
    tokens: Array,
    kept: Array | None,
    real: Array,
    *,
    placement: Placement | None,
) -> Array:
    """Return the log-probs [B, T] of tokens under softmax(logits / temperature).

    Args:
        logits: [B, T, V].
        temperature: [B, T]; 0 counts as 1.
        tokens: [B, T].
        kept: [B, T, k] ids that the token was drawn from, then -1; nothing but -1, or None: all.
    """

    def run(tiles: Tiles, weights: Params, moved: tuple, fixed: tuple) -> Array:
        del weights
        return _scores(config, tiles, *moved, *fixed)[0]

    return by_tokens(
        run,
        tiles,
        {},
        Given((logits,), (temperature, tokens, kept), real),
        dtype=jnp.float32,
        placement=placement,
        specs={},
        moved=(config.vocab_size,),
        outputs=0,
    )


def exact_scores(
    config: TransformerConfig,
    tiles: Tiles,
    weights: Params,
    hidden: Array,
    temperature: float,
    tokens: Array,
    kept: Array | None,
    wanted: Array,
    *,
    dtype: Any,
    placement: Placement | None,
) -> tuple[Array, Array]:
    """Return log-probs and entropy [B, T] of what is `wanted` [B, T], 0 elsewhere.

    Args:
        dtype: of the sampler.
        Others as in `exact_logits` and `exact_scores_of_logits`.
    """

    def run(tiles: Tiles, weights: Params, moved: tuple, fixed: tuple) -> tuple[Array, Array]:
        logits = jax.lax.optimization_barrier(_logits(config, tiles, weights, *moved))
        return _scores(config, tiles, logits, *fixed)

    temperatures = jnp.full(tokens.shape, temperature, jnp.float32)
    scores = by_tokens(
        run,
        tiles,
        weights,
        Given((hidden,), (temperatures, tokens, kept), wanted),
        dtype=dtype,
        placement=placement,
        specs=_specs(weights, placement),
        moved=(0,),
        outputs=(0, 0),
    )
    log_probs, entropies = (jnp.where(wanted, x, 0) for x in scores)
    return log_probs, entropies


def _specs(weights: Params, placement: Placement | None) -> Any:
    if placement is None:
        return None
    axes: dict[str, Any] = {"final_norm": (None,) * weights["final_norm"].ndim, "unembed": AXES}
    return {name: placement.whole_over_batch(w.shape, axes[name]) for name, w in weights.items()}


def _logits(config: TransformerConfig, tiles: Tiles, weights: Params, hidden: Array) -> Array:
    """Return logits [1, n, v], those of each part by a product of its own."""
    if not tiles.is_split(config.vocab_size):
        return unembed(config, weights, hidden)
    here = tiles.here(config.vocab_size)
    cut = weights["unembed"].reshape(len(weights["unembed"]), here, -1).swapaxes(0, 1)
    every = with_known_ids(config, None)

    def part(given: tuple[Array, Array, Array]) -> Array:
        hidden, norm, w = given
        return unembed(every, {"final_norm": norm, "unembed": w}, hidden)

    spread = (tiles.spread(x, here) for x in (hidden, weights["final_norm"]))
    parts = each(part, (*spread, cut))
    logits = jnp.moveaxis(parts, 0, 2).reshape(*hidden.shape[:2], -1)
    number = 0 if tiles.shared is None else jax.lax.axis_index(tiles.shared)
    return only_known(config, logits, number * logits.shape[-1])


def _scores(
    config: TransformerConfig,
    tiles: Tiles,
    logits: Array,
    temperature: Array,
    tokens: Array,
    kept: Array | None,
) -> tuple[Array, Array]:
    """Return log-probs and entropy [1, n] of logits [1, n, v]; sums over V are sums of parts."""
    split = tiles.is_split(config.vocab_size)
    shared = tiles.shared if split else None
    inverse = 1 / jnp.where(temperature == 0, 1, temperature)
    # behind a barrier: XLA makes a division a product with it, or not
    scaled = logits * jax.lax.optimization_barrier(inverse)[..., None]
    if kept is not None:
        scaled = keep_only(scaled, kept, shared)
    first = 0 if shared is None else jax.lax.axis_index(shared) * logits.shape[-1]
    here = tiles.here(config.vocab_size)
    parts = jnp.moveaxis(scaled.reshape(*tokens.shape, here, -1), 2, 0)  # [S here, 1, n, V / S]
    peak = each(lambda x: jax.lax.stop_gradient(x).max(axis=-1), parts).max(axis=0)
    peak = peak if shared is None else jax.lax.pmax(peak, shared)
    column = tokens - first
    mine = (column >= 0) & (column < logits.shape[-1])
    chosen = jnp.take_along_axis(scaled, jnp.where(mine, column, 0)[..., None], axis=-1)[..., 0]
    chosen = jnp.where(mine, chosen, 0)
    chosen = tiles.only(chosen) if split else chosen
    add_up = tiles.in_order if split else functools.partial(jnp.squeeze, axis=0)
    total = jnp.log(add_up(each(lambda x: jnp.exp(x - peak[..., None]).sum(axis=-1), parts)))

    def surprise(x: Array) -> Array:
        log_p = x - (peak + total)[..., None]
        return -(jnp.exp(log_p) * log_p).sum(axis=-1)

    return chosen - peak - total, add_up(each(surprise, parts))
