"""Hidden states and logits of the same rows, as the sampler computes them and as the trainer does.

The sampler's come from the functions that its blocks consist of (`states_of_layers`, `logits_of`),
with its weights, its pages, and the shapes of its chunks: "prefill" computes every token with its
neighbours, "decode" some of them alone, one after the other, behind what was prefilled. The
trainer's come from its forward pass, once without a gradient ("score") and once with ("train").

Shape legend: R rows, T tokens, S layers, D model width, V vocabulary, n tokens of a piece.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.data.packing import round_up
from jaxrl.models.exact_head import exact_logits, head_weights
from jaxrl.models.lora import trained, with_trained
from jaxrl.models.transformer import Params, TransformerConfig, routed_forward, unembed
from jaxrl.parallel.rules import spread_tokens
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.programs import Prefill
from jaxrl.training.forward_pass import ForwardPass

SAMPLER, WAYS = ("prefill", "decode"), ("prefill", "decode", "score", "train")
PIECE = 64  # tokens whose logits are there at a time, at least
SETTINGS = (  # of the trainer's forward pass that are those of the model's
    *("dtype", "remat", "kernel", "experts_kernel", "rule_kernel", "exchange", "context"),
    *("placement", "tiles"),
)


def original(jitted: Any) -> Any:
    """Return what a jitted function was made of; that of a forward pass is a `partial`."""
    return jitted.__wrapped__


class HiddenStates:
    """Compute rows of `length` tokens in all ways.

    Args:
        forward_pass, params, model: the trainer's.
        engine: with the trainer's weights, and nothing in flight.
        length: of a row, a multiple of the engine's page.
        decoded: positions that are decoded, ascending; elsewhere "decode" is 0.

    Attributes:
        rows: of a call.
        piece: tokens of a call for logits.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        params: Params,
        model: TransformerConfig,
        engine: NativeEngine,
        length: int,
        decoded: Sequence[int],
    ) -> None:
        self.forward_pass, self.params, self.programs = forward_pass, params, engine.programs
        self.length, self.decoded = length, decoded
        given = original(forward_pass.forward).keywords
        self.settings = {name: given[name] for name in SETTINGS}
        groups = math.lcm(self.programs.parts, forward_pass.microbatching.groups)
        self.rows, self.piece = round_up(2, groups), round_up(PIECE, groups)
        self._forward = jax.jit(
            functools.partial(_forward, model, self.settings),
            static_argnames=("every", "differentiated"),
        )
        self._logits = jax.jit(functools.partial(_logits, model, self.settings))

    def of_rows(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Return by way the hidden states [R, T, D] of tokens [R, T] behind the last layer."""
        found = self._of(WAYS, tokens, range(self.rows), every=False)
        return {way: x[0] for way, x in found.items()}

    def of_layers(self, ways: Sequence[str], tokens: np.ndarray, row: int) -> dict[str, np.ndarray]:
        """Return by way the hidden states [S, T, D] of one row behind each layer."""
        found = self._of(ways, tokens, range(row, row + 1), every=True)
        return {way: x[:, 0] for way, x in found.items()}

    def logits(self, way: str, hidden: np.ndarray) -> np.ndarray:
        """Return float32 logits [n, V] of hidden states [n, D], at most `piece` of them."""
        x = np.zeros((self.piece, 1, hidden.shape[1]), hidden.dtype)
        x[: len(hidden), 0] = hidden
        if way in SAMPLER:
            given = self.programs.params, x, np.ones((self.piece, 1), bool)
            return np.asarray(self.programs.functions.logits_of(*given))[: len(hidden), 0]
        return np.asarray(self._logits(self.params, x))[: len(hidden), 0]

    def _of(
        self, ways: Sequence[str], tokens: np.ndarray, rows: range, *, every: bool
    ) -> dict[str, np.ndarray]:
        """Return hidden states [S, len(rows), T, D], of all layers or the last one."""
        found = self._sampled(tokens, rows, every=every) if set(ways) & set(SAMPLER) else {}
        positions = np.broadcast_to(np.arange(self.length, dtype=np.int32), tokens.shape)
        placed = self.forward_pass.place((tokens, positions, np.ones_like(tokens)))
        for way in [way for way in ways if way not in SAMPLER]:
            how = {"every": every, "differentiated": way == "train"}
            states, _ = self._forward(self.params, placed, **how)
            found[way] = np.asarray(states[:, rows.start : rows.stop])
        return found

    def _sampled(self, tokens: np.ndarray, rows: range, *, every: bool) -> dict[str, np.ndarray]:
        """Return what prefill and decode make of rows."""
        programs, shape, functions = self.programs, self.programs.shape, self.programs.functions
        each, columns = self.rows // programs.parts, self.length // shape.page
        chunks = -(-each * self.length // (shape.tile * shape.tiles))
        sizes = {"parts": programs.parts, "chunks": chunks, "columns": columns, "steps": 1}
        collected = Prefill(shape, **sizes)
        pages = np.arange(self.rows * columns, dtype=np.int32) % (each * columns)
        tables = pages.reshape(self.rows, columns)  # those of a part have numbers of their own
        for row in range(self.rows):
            collected.add(row // each, tables[row], 0, tokens[row])
        prompts = collected.arrays(1)
        cache = functions.empty(pages=self.rows * columns, size=shape.page)
        found: dict[str, np.ndarray] = {}

        def compute(*given: np.ndarray) -> np.ndarray:
            nonlocal cache
            x, cache = functions.states_of_layers(programs.params, cache, *given, every=every)
            if not found:
                whole = (len(x), len(rows), self.length, x.shape[-1])
                found.update((way, np.zeros(whole, x.dtype)) for way in SAMPLER)
            return np.asarray(x)

        for chunk in range(chunks):
            first, table = prompts.first[chunk], prompts.table[chunk]
            x = compute(prompts.tokens[chunk], table, first, prompts.count[chunk])
            for tile in np.flatnonzero(first >= 0).tolist():
                row = tile // shape.tiles * each + int(table[tile, 0]) // columns
                if row in rows:
                    places = slice(first[tile], first[tile] + shape.tile)
                    found["prefill"][:, row - rows.start, places] = x[:, tile]
        for position in self.decoded:
            first = np.full(self.rows, position, np.int32)
            x = compute(tokens[:, position, None], tables, first, np.ones_like(first))
            found["decode"][:, :, position] = x[:, rows.start : rows.stop, 0]
        return found


def _forward(
    model: TransformerConfig,
    settings: Mapping[str, Any],
    params: Params,
    rows: tuple[jax.Array, ...],
    *,
    every: bool,
    differentiated: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the trainer's hidden states [S, R, T, D], and the norm of a gradient of theirs."""
    given = spread_tokens(rows, settings["placement"])

    def states(new: Any) -> jax.Array:
        parts = model, with_trained(params, new), *given
        x, behind = routed_forward(*parts, keep_states=every, **settings)
        return behind if every else x[None]

    if not differentiated:
        return states(trained(params)), None
    x, pull = jax.vjp(states, trained(params))
    return x, optax.global_norm(pull(jnp.ones_like(x)))


def _logits(
    model: TransformerConfig, settings: Mapping[str, Any], params: Params, x: jax.Array
) -> jax.Array:
    """Return the trainer's logits [n, 1, V] of hidden states [n, 1, D]."""
    placement, tiles = settings["placement"], settings["tiles"]
    weights = head_weights(model, params, placement, settings["dtype"])
    if tiles is None:
        return unembed(model, weights, x)
    real = jnp.ones(x.shape[:2], bool)
    return exact_logits(model, tiles, weights, x, real, placement=placement)
