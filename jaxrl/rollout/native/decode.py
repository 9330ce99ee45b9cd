"""What the native engine runs on its devices: blocks of steps, which prefill and decode.

Both run the trainer's own `decoder_layer`; only `attend` differs. A step first prefills chunks of
prompts, tiles of Q neighbouring tokens of any rows, then decodes a token of every row whose prompt
is there: so one program serves prompts and rows of any length, and they do not wait for each other.
Both have products of their own, whose shapes never change: so neighbours change no bit.

Everything but the cache is small and lives on the host, which says in every block where the pages
of each row are.

Shape legend: B rows, N steps of a block, C pages of a row, M chunks, W tiles of a chunk, Q tokens
of a tile, G parts of the batch (see kv_cache.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from jaxrl.array_ops import log_softmax, token_log_probs, top_ids
from jaxrl.models.architecture import (
    SOFTMAX,
    LayerFlags,
    by_kind,
    keeps_states,
    layer_flags,
    layer_mixers,
    layer_runs,
    layer_stacks,
)
from jaxrl.models.attention import Segments, layer_views
from jaxrl.models.exact import Tiles
from jaxrl.models.exact_head import exact_logits, exact_scores_of_logits
from jaxrl.models.experts import Routing
from jaxrl.models.kernels.choice import REFERENCE
from jaxrl.models.kernels.paged_attention import Pages
from jaxrl.models.linear import LoraStack, merge, of_rows, quantise
from jaxrl.models.lora import LoraConfig, adapter_specs
from jaxrl.models.transformer import (
    Params,
    TransformerConfig,
    decoder_layer,
    embed,
    fuse_projections,
    mixing,
    unembed,
)
from jaxrl.parallel.rules import Placement
from jaxrl.rollout.native.kv_cache import Cache, copy_pages, write_and_attend, write_routes
from jaxrl.rollout.native.sampling import adjust, assign, sample, top_tokens, uniforms
from jaxrl.rollout.native.states import Places, States, copy_states, kept_recurrence
from jaxrl.rollout.protocol import Sampling
from jaxrl.rollout.weights.groups import NOT_CAST, STACKED
from jaxrl.types import Array

MOST_ALTERNATIVES = 20  # that are told of a token of a prompt
LEAST_STOP_IDS = 4  # columns of `Rows.stop_ids`, for few shapes
# Matrices of a layer that can have 8 bits, and which dims their inputs are. All others keep the
# engine's dtype: embeddings and head, norms, biases and routers, whose errors no later sum evens
# out; latents' matrices of low rank, and those of layers that keep a state.
IN_EIGHT_BITS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("wqkv", "wq", "wk", "wv"), (0,)),
    "wo": (0, 1),
    **dict.fromkeys(("w_gate_up", "w_gate", "w_up", "w_down"), (0,)),
    **dict.fromkeys(("shared_gate", "shared_up", "shared_down"), (0,)),
    **dict.fromkeys(("experts_gate", "experts_up", "experts_down"), (1,)),
}


@dataclass(frozen=True)
class Features:
    """Name what some row of a block needs; there is a program for each combination.

    A row that needs less draws the same tokens with the same log-probs in all of them.

    Attributes:
        filtered: top_k, top_p or min_p.
        penalised: repetition_penalty.
        alternatives: most that are reported of a token, rounded up to a power of two.
        raw: log-probs of the model's own distribution.
        sampling_mask_size: most ids of a set that is reported, rounded up to a power of two.
        stop_ids: most of a row, rounded up to a power of two.
        drafts: tokens that are guessed in each step, of an engine that does.
        constrained: a constraint, which the host asks before each token: the block has one step.
    """

    filtered: bool = False
    penalised: bool = False
    alternatives: int = 0
    raw: bool = False
    sampling_mask_size: int = 0
    stop_ids: int = LEAST_STOP_IDS
    drafts: int = 0
    constrained: bool = False

    def including(self, s: Sampling) -> "Features":
        """Return these features, and what such sampling needs."""
        return self.union(
            Features(
                filtered=s.top_k > 0 or s.top_p < 1 or s.min_p > 0,
                penalised=s.repetition_penalty != 1,
                alternatives=_power_of_two(s.logprobs),
                raw=s.raw_log_probs,
                sampling_mask_size=_power_of_two(s.top_k if s.keep_sampling_mask else 0),
                stop_ids=_power_of_two(len(s.stop_token_ids)),
            )
        )

    def union(self, other: "Features") -> "Features":
        """Return what these features or the others need."""
        return Features(*map(max, dataclasses.astuple(self), dataclasses.astuple(other)))


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a number; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0


SETTINGS = {  # fields of Sampling that are columns of Rows
    np.float32: ("temperature", "top_p", "min_p", "repetition_penalty"),
    np.int32: ("top_k", "min_tokens"),
}


class Rows(struct.PyTreeNode):
    """Hold samples that are decoded together."""

    live: Array  # [B] bool; the others are padding, or have ended
    table: Array  # [B, C] where the row's pages are
    start: Array  # [B] the step that decodes it first: what it needs is prefilled then
    last_token: Array  # [B], not yet in the cache
    position: Array  # [B] position of last_token
    count: Array  # [B] tokens drawn before
    keys: Array  # [B, 2] PRNG key data
    max_tokens: Array  # [B]
    min_tokens: Array  # [B]
    stop_ids: Array  # [B, n], filled up with -1
    temperature: Array  # [B]
    top_k: Array  # [B]
    top_p: Array  # [B]
    min_p: Array  # [B]
    repetition_penalty: Array  # [B]
    history: Array | None = None  # [B, L] tokens up to last_token, then -1; None = nobody asks
    references: Array | None = None  # [B, H] of the request, then -1; None = there are none
    state: Array | None = None  # [B] where the row's state is; None = the model keeps none
    adapter: Array | None = None  # [B] place of the row's adapter; None = there are none
    constrained: Array | None = None  # [B] bool; None = no row is
    allowed: Array | None = None  # [B, V / 8] bits of the ids that may come next; None = all
    features: Features = struct.field(pytree_node=False, default=Features())


class Prompts(struct.PyTreeNode):
    """Hold what a block prefills, and which pages and states it copies.

    Step i prefills the chunks i `pace` to (i + 1) `pace`, then copies the pages and states that are
    due. The tiles of a row are in their order.
    """

    tokens: Array  # [M, W, Q]
    table: Array  # [M, W, C] where the pages of a tile's row are
    first: Array  # [M, W] position of the first token; below 0, there is no tile
    count: Array  # [M, W] tokens of the tile
    chunks: Array  # []
    pace: Array  # []
    copies: Array  # [G n, 2] pages (from, to), see `copy_pages`
    copied: Array  # [G, N + 1]
    states: Places | None = None  # [M, W] of each tile; None = the model keeps none
    state_copies: Array | None = None  # [G n, 2] states (from, to)
    state_copied: Array | None = None  # [G, N + 1]
    adapter: Array | None = None  # [M, W] place of the adapter of a tile's row


PROGRESS = ("live", "last_token", "position", "count", "history")  # of Rows: what a block changes


def go_on(given: Mapping[str, Array], before: Mapping[str, Array], begins: Array) -> dict:
    """Return the `PROGRESS` of rows as the block before leaves it, but for those that begin.

    Args:
        given: as the host knows it; what it does not say of the block before is left out.
        before: as that block leaves it. A row that ended there ends here, too.
        begins: [B] bool.
    """
    held = {**before, "live": before["live"] & given["live"]}
    if "history" in given:  # rows may have become longer since
        more = given["history"].shape[1] - before["history"].shape[1]
        held["history"] = jnp.pad(before["history"], ((0, 0), (0, more)), constant_values=-1)
    return {
        name: jnp.where(begins if x.ndim == 1 else begins[:, None], x, held[name])
        for name, x in given.items()
    }


class Block(struct.PyTreeNode):
    """Hold what a block of decode steps drew: `count` tokens in each row.

    N is the number of steps, times one more than there are drafts.
    """

    tokens: Array  # [B, N]
    log_probs: Array  # [B, N]
    count: Array  # [B]
    steps: Array  # [B] that drew them, where some are guessed
    stopped: Array  # [B] bool, the last one is a stop token
    top_ids: Array  # [B, N, alternatives]
    top_log_probs: Array  # [B, N, alternatives]
    raw_log_probs: Array  # [B, N], or [B, 0] where nobody asks for them
    sampling_mask_ids: Array  # [B, N, k] ids, then -1


class Run(struct.PyTreeNode):
    """Hold rows in the middle of a block."""

    cache: Cache
    last_token: Array
    position: Array
    done: Array
    seen: Array | None  # [B, V] bool
    history: Array | None  # as in Rows
    block: Block


def decode_params(
    config: TransformerConfig,
    params: Params,
    dtype: jnp.dtype,
    *,
    shards: int | None = 1,
    quantization: str | None = None,
) -> Params:
    """Return the decode layout: adapters merged, cast, layers a tuple and fused, the head [D, V].

    Fused for `shards` devices over which heads and MLP width are split; None = not fused. Matrices
    `IN_EIGHT_BITS` are then quantised, of the kind that `quantization` names; None = they are not.

    An unrolled loop over layers updates each cache in place, where a scan would restack them.
    """
    rest = {name: x for name, x in params.items() if name != STACKED}
    stored = by_kind(config, params[STACKED])
    layers = {
        kind: decode_layers(
            stored[kind], len(numbers), dtype, shards=shards, quantization=quantization
        )
        for kind, numbers in layer_stacks(config)
    }
    return {**decode_rest(rest, dtype), STACKED: in_order(config, layers)}


def in_order(config: TransformerConfig, layers: Mapping[str, Sequence[Any]]) -> tuple:
    """Return the layers of each kind in the order of the model."""
    return tuple(layer for run in layer_runs(config) for layer in layers[run.kind][run.in_stack])


def decode_layers(
    stacked: Params,
    count: int,
    dtype: jnp.dtype,
    *,
    shards: int | None,
    quantization: str | None = None,
) -> tuple:
    """Return the decode layout of `count` stacked layers."""
    cast = jax.tree.map(lambda x: x.astype(dtype), merge(stacked))
    layers = [jax.tree.map(lambda x, i=i: x[i], cast) for i in range(count)]
    if shards is not None:
        layers = [fuse_projections(layer, shards) for layer in layers]
    if quantization is None:
        return tuple(layers)
    return tuple(
        {
            name: quantise(w, quantization, IN_EIGHT_BITS[name]) if name in IN_EIGHT_BITS else w
            for name, w in layer.items()
        }
        for layer in layers
    )


def with_places(
    config: TransformerConfig, params: Params, lora: LoraConfig, held: Sequence[tuple[Array, Array]]
) -> Params:
    """Return the decode layout, not fused, with places for adapters at their matrices.

    Args:
        held: what is in the places, of `empty_places` or `in_places`.
    """
    params = {**params, STACKED: tuple(map(dict, params[STACKED]))}
    homes = [home for leaf in adapter_specs(lora) for home in _homes(config, params, leaf)]
    for (home, name, _), pair in zip(homes, held, strict=True):
        home[name] = LoraStack(home[name], *pair)
    return params


def empty_places(
    config: TransformerConfig, params: Params, lora: LoraConfig, places: int
) -> list[tuple[Array, Array]]:
    """Return places for adapters with nothing in them, at each of their matrices."""
    found = []
    for leaf, pair in adapter_specs(lora).items():
        for home, name, at in _homes(config, params, leaf):
            (*inputs, rank), dtype = pair["a"].shape[len(at) :], home[name].dtype
            a = jnp.zeros((*inputs, places, rank), dtype)
            found.append((a, jnp.zeros((places, *pair["b"].shape[len(at) :]), dtype)))
    return found


def in_places(
    config: TransformerConfig, params: Params, lora: LoraConfig
) -> list[tuple[Array, Array]]:
    """Return the adapters of all places, at each of their matrices."""
    homes = [home for leaf in adapter_specs(lora) for home in _homes(config, params, leaf)]
    return [(home[name].a, home[name].b) for home, name, _ in homes]


def put_adapter(
    config: TransformerConfig, params: Params, adapters: Params, scale: Array, place: Array
) -> Params:
    """Return the decode layout with an adapter at a place."""
    params = {**params, STACKED: tuple(map(dict, params[STACKED]))}
    for leaf, pair in adapters.items():
        for home, name, at in _homes(config, params, leaf):
            of = home[name]
            a, b = pair["a"][at].astype(of.a.dtype), (scale * pair["b"][at]).astype(of.b.dtype)
            home[name] = of.replace(a=of.a.at[..., place, :].set(a), b=of.b.at[place].set(b))
    return params


def _homes(config: TransformerConfig, params: Params, leaf: str) -> list[tuple[dict, str, tuple]]:
    """Return the matrices of a leaf of adapters: whose, its name, and where in the leaf it is."""
    kind, _, name = leaf.rpartition("/")
    if name in params:
        return [(params, name, ())]  # the head
    kinds = dict(layer_stacks(config))
    numbers = kinds[kind] if kind else next(iter(kinds.values()))
    return [(params[STACKED][number], name, (i,)) for i, number in enumerate(numbers)]


def decode_rest(params: Params, dtype: jnp.dtype) -> Params:
    """Return the decode layout of the parameters that are not stacked."""
    whole = merge(params)
    cast = {name: x if name in NOT_CAST else x.astype(dtype) for name, x in whole.items()}
    return {**cast, "unembed": cast["unembed"] if "unembed" in cast else cast["embed"].T}


def decode(
    config: TransformerConfig,
    params: Params,
    cache: Cache,
    rows: Rows,
    prompts: Prompts,
    *,
    steps: int,
    placement: Placement | None = None,
    kernel: str = REFERENCE,
    experts_kernel: str = REFERENCE,
    rule_kernel: str = REFERENCE,
    tiles: Tiles | None = None,
) -> tuple[Cache, Rows, Block]:
    """Prefill chunks of prompts, and draw up to `steps` tokens for every row, step by step.

    It ends early when all rows are done and all chunks prefilled, or after a step where a row is
    constrained. The rows that come back are those of the next block.

    Args:
        kernel, experts_kernel, rule_kernel: of `PAGED_ATTENTION`, `GROUPED_PRODUCT` and
            `DELTA_RULE`.
        tiles: of the exact mode.
    """
    size, features = len(rows.live), rows.features
    steps = 1 if features.constrained else steps
    most = steps * (1 + features.drafts)
    alternatives = (size, most, min(features.alternatives, config.vocab_size))
    run = Run(
        cache=cache,
        last_token=rows.last_token,
        position=rows.position,
        done=~rows.live | (rows.count >= rows.max_tokens),
        seen=_seen(config, rows.history) if features.penalised else None,
        history=rows.history,
        block=Block(
            tokens=jnp.zeros((size, most), jnp.int32),
            log_probs=jnp.zeros((size, most), jnp.float32),
            count=jnp.zeros(size, jnp.int32),
            steps=jnp.zeros(size, jnp.int32),
            stopped=jnp.zeros(size, bool),
            top_ids=jnp.zeros(alternatives, jnp.int32),
            top_log_probs=jnp.zeros(alternatives, jnp.float32),
            raw_log_probs=jnp.zeros((size, most if features.raw else 0), jnp.float32),
            sampling_mask_ids=jnp.full((size, most, features.sampling_mask_size), -1),
        ),
    )
    settings: dict[str, Any] = {"placement": placement, "kernel": kernel}
    settings |= {"experts_kernel": experts_kernel, "rule_kernel": rule_kernel, "tiles": tiles}
    layers = functools.partial(run_layers, config, **settings)

    def prefill(chunk: Array, cache: Cache) -> Cache:
        with_adapters = of_rows(params, None if prompts.adapter is None else prompts.adapter[chunk])
        of = (x[chunk] for x in (prompts.tokens, prompts.table, prompts.first, prompts.count))
        places = jax.tree.map(lambda x: x[chunk], prompts.states)
        return layers(with_adapters, cache, *of, places)[1]

    def unfinished(carry: tuple[Array, Run]) -> Array:
        step, run = carry
        return (step < steps) & (~run.done.all() | (step * prompts.pace < prompts.chunks))

    def one_step(carry: tuple[Array, Run]) -> tuple[Array, Run]:
        step, run = carry
        begin = step * prompts.pace
        end = jnp.minimum(begin + prompts.pace, prompts.chunks)
        cache = jax.lax.fori_loop(begin, end, prefill, run.cache)
        cache = copy_pages(cache, prompts.copies, prompts.copied, step, placement)
        places = None
        if prompts.state_copies is not None and prompts.state_copied is not None:
            due = prompts.state_copies, prompts.state_copied, step
            states = copy_states(cache.states, *due, placement)
            cache, places = cache._replace(states=states), Places(rows.state, rows.state)
        live = ~run.done & (rows.start <= step)
        first = jnp.where(live, run.position, -1)
        guesses = jnp.zeros((size, 0), jnp.int32)
        if features.drafts:
            assert run.history is not None
            guesses = draft(run.history, run.position, features.drafts, rows.references)
            if rows.constrained is not None:  # what may follow a guess is not known
                guesses = jnp.where(rows.constrained[:, None], -1, guesses)
        left = rows.max_tokens - rows.count - run.block.count
        count = jnp.where(live, jnp.minimum(1 + (guesses >= 0).sum(axis=1), left), 0)
        tokens = jnp.concatenate([run.last_token[:, None], jnp.maximum(guesses, 0)], axis=1)
        of = of_rows(params, rows.adapter)
        x, cache = layers(of, cache, tokens, rows.table, first, count, places)
        real = jnp.arange(tokens.shape[1]) < count[:, None]
        logits = logits_of(config, of, x, real, placement=placement, tiles=tiles)
        run = run.replace(cache=cache)
        if features.drafts:
            run = run.replace(block=run.block.replace(steps=run.block.steps + live))
        for i in range(tokens.shape[1]):
            run = draw(config, run, logits[:, i], rows, live, placement, tiles)
            if i < features.drafts:  # the next logits are of a row that goes on as was guessed
                live = live & ~run.done & (run.last_token == guesses[:, i])
        return step + 1, run

    run = jax.lax.while_loop(unfinished, one_step, (jnp.int32(0), run))[1]
    after = rows.replace(
        live=~run.done,
        last_token=run.last_token,
        position=run.position,
        count=rows.count + run.block.count,
        history=run.history,
    )
    return run.cache, after, run.block


LEAST_MATCH, LONGEST_MATCH = 2, 4  # tokens that come again before what is guessed


def check_drafts(config: TransformerConfig, number: int, tiles: Tiles | None) -> None:
    """Refuse `speculative_tokens` where a wrong guess could not be taken back, or not exactly.

    Raises:
        ValueError: it is below 0; or the model keeps states; or tiles do not divide.
    """
    field = f"speculative_tokens={number}"
    if number < 0:
        raise ValueError(f"{field} must be at least 0")
    if number and keeps_states(config):
        raise ValueError(f"{field}: a state cannot go back behind a wrong guess; set 0")
    if tiles is not None and (1 + number) % tiles.queries and tiles.queries % (1 + number):
        raise ValueError(
            f"{field}: with trainer.exact one more must divide {tiles.queries}, or be a multiple; "
            "set 1, 3 or 7"
        )


def draft(history: Array, position: Array, number: int, references: Array | None = None) -> Array:
    """Guess the next tokens of rows from where their last ones stood before.

    The latest of the longest matches says how they go on, in the row before one in its references;
    one that comes nearer than `number` is taken to repeat. Prompt lookup: Saxena 2023,
    https://github.com/apoorvumang/prompt-lookup-decoding.

    Args:
        history: [B, L] tokens of a row, then -1.
        position: [B] of the last one.
        references: [B, H] of other texts, -1 between and after them; None = there are none.

    Returns:
        [B, number] tokens; -1 where nothing matches, and behind the end of a text.
    """
    last, row = position[:, None], jnp.arange(len(history))[:, None]
    asked = [history[row, jnp.maximum(last - back, 0)] for back in range(LONGEST_MATCH)]
    if references is not None:
        end = jnp.full((len(history), 1), -1)
        history = jnp.concatenate([references, end, history], axis=1)
        last = last + references.shape[1] + 1
    at = jnp.arange(history.shape[1])
    goes_on, length = at < last, jnp.zeros(history.shape, jnp.int32)
    for back, token in enumerate(asked):
        here = jnp.pad(history, ((0, 0), (back, 0)), constant_values=-1)[:, : history.shape[1]]
        goes_on = goes_on & (here == token) & (position[:, None] >= back)
        length = length + goes_on
    best = jnp.argmax(length * history.shape[1] + at, axis=1)[:, None]
    again = jnp.arange(number) % jnp.maximum(last - best, 1)
    found = history[row, best + 1 + again]
    matches = (length[row, best] >= LEAST_MATCH) & (jnp.minimum.accumulate(found, axis=1) >= 0)
    return jnp.where(matches, found, -1)


def _seen(config: TransformerConfig, history: Array) -> Array:
    """Turn tokens [B, L], -1 = none, into whether a row holds a token [B, V]."""
    rows = jnp.arange(len(history))[:, None]
    at = jnp.where(history < 0, config.vocab_size, history)
    return jnp.zeros((len(history), config.vocab_size), bool).at[rows, at].set(True, mode="drop")


def logits_of(
    config: TransformerConfig,
    params: Params,
    x: Array,
    real: Array,
    *,
    placement: Placement | None,
    tiles: Tiles | None,
) -> Array:
    """Return float32 logits [B, T, V] of states [B, T, D]; anything where not `real` [B, T]."""
    if isinstance(params["unembed"], LoraStack):
        return unembed(config, params, x)
    if tiles is None:
        return unembed(config, params, x.reshape(-1, x.shape[2])).reshape(*x.shape[:2], -1)
    head = {name: params[name] for name in ("final_norm", "unembed")}
    return exact_logits(config, tiles, head, x, real, placement=placement)


def states_of_layers(
    config: TransformerConfig,
    params: Params,
    cache: Cache,
    *given: Array,
    every: bool,
    **settings: Any,
) -> tuple[Array, Cache]:
    """Return hidden states [S, B, T, D] and the cache, as a block does, for those who look at them.

    Args:
        given: tokens, table, first and count of `run_layers`.
        every: behind each of the L layers, S = L; otherwise S = 1, behind the last.
        settings: of `run_layers`.
    """
    states: list[Array] = []
    x, cache = run_layers(config, params, cache, *given, note_states=states.append, **settings)
    return jnp.stack(states) if every else x[None], cache


def score(
    config: TransformerConfig,
    params: Params,
    cache: Cache,
    tokens: Array,
    table: Array,
    first: Array,
    count: Array,
    targets: Array,
    places: Places | None,
    **settings: Any,
) -> tuple[tuple[Array, ...], Cache]:
    """Return the fields of `PromptScores` for `targets` [B, T], behind their places; and the cache.

    Args:
        tokens, table, first, count, places, settings: of `run_layers`.
    """
    given = tokens, table, first, count, places
    x, cache = run_layers(config, params, cache, *given, **settings)
    real = (jnp.arange(tokens.shape[1]) < count[:, None]) & (first >= 0)[:, None]
    where = {"placement": settings["placement"], "tiles": settings["tiles"]}
    log_probs = log_softmax(logits_of(config, params, x, real, **where))
    own = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)
    ids = top_ids(log_probs, MOST_ALTERNATIVES)
    best = jnp.take_along_axis(log_probs, ids, axis=-1)
    ranks = 1 + (log_probs > own).sum(axis=-1)
    return (own[..., 0], ranks, ids, best), cache


def run_layers(
    config: TransformerConfig,
    params: Params,
    cache: Cache,
    tokens: Array,
    table: Array,
    first: Array,
    count: Array,
    places: Places | None = None,
    *,
    placement: Placement | None,
    kernel: str,
    experts_kernel: str,
    rule_kernel: str = REFERENCE,
    tiles: Tiles | None = None,
    note_states: Callable[[Array], None] = lambda x: None,
) -> tuple[Array, Cache]:
    """Return the hidden states [B, T, D] of tokens, and the cache with what is to be kept of them.

    Args:
        tokens: [B, T] neighbouring tokens of each row.
        table, first, count: see `write_and_attend`.
        places: where the states of the rows are; None = the model keeps none.
        note_states: gets the hidden states behind each layer.
    """
    positions = first[:, None] + jnp.arange(tokens.shape[1])
    view = layer_views(config, Segments(positions, False), positions, positions)
    x = embed(config, params, tokens, params["embed"].dtype)
    new: list[Pages] = []
    states: list[States] = list(cache.states)
    routing: list[Routing] = []
    where = placement if tiles is None else None  # within a tile each device is by itself
    mix = mixing(config, placement=where, kernel=experts_kernel)
    real = None
    if tiles is not None:
        real = (jnp.arange(tokens.shape[1]) < count[:, None]) & (first >= 0)[:, None]
    kept = 0  # layers so far that keep a state
    for layer, mixer, *flags in zip(
        params["layers"], layer_mixers(config), *layer_flags(config), strict=True
    ):
        slides = bool(flags[0])

        def attend(
            q: Array, k: Array, v: Array, _: object, *sinks: Array, sliding: bool = slides
        ) -> Array:
            pages, out = write_and_attend(
                *(config, cache.layers[len(new)], q, k, v, table, first, count, *sinks),
                sliding=sliding,
                kernel=kernel,
                placement=placement,
                tiles=tiles,
            )
            new.append(pages)
            return out

        recurrence = None
        if mixer != SOFTMAX:
            assert places is not None
            note = functools.partial(states.__setitem__, kept)
            of_rows = places, first, count
            recurrence = kept_recurrence(states[kept], *of_rows, placement, note, rule_kernel)
            kept += 1
        of_layer = view(LayerFlags(*flags))
        parts = placement, mix, recurrence
        how = {"absorbed": True, "real": real, "tiles": tiles}
        x, of_router = decoder_layer(config, layer, x, of_layer, attend, *parts, **how)
        note_states(x)
        routing += [] if of_router is None else [of_router]
    routes = cache.routes
    if routes is not None:
        chosen = jnp.concatenate([of_layer.ids for of_layer in routing], axis=-1)
        routes = write_routes(routes, chosen, table, first, count, placement=placement)
    return x, Cache(tuple(new), routes, tuple(states))


class Choice(NamedTuple):
    """Hold what a step draws for each row, done or not."""

    token: Array  # [B]
    log_prob: Array  # [B]
    sampling_mask_ids: Array  # [B, k]
    top_ids: Array  # [B, alternatives]
    top_log_probs: Array  # [B, alternatives]
    raw_log_prob: Array | None  # [B]
    seen: Array | None  # [B, V], with the token


def draw(
    config: TransformerConfig,
    run: Run,
    logits: Array,
    rows: Rows,
    live: Array,
    placement: Placement | None = None,
    tiles: Tiles | None = None,
) -> Run:
    """Sample the next token of every live row [B], and note which rows end with it."""
    index, block = jnp.arange(len(run.done)), run.block
    position, drawn = run.position + 1, rows.count + block.count
    choose = functools.partial(_choose, block.top_ids.shape[2], ())
    allowed = None
    if rows.allowed is not None:
        bits = jnp.unpackbits(rows.allowed, axis=1, count=logits.shape[1], bitorder="little")
        allowed = bits.astype(bool)
    if placement is not None:
        by_row, by_id = placement.spec(logits.shape, ("batch", "vocab"))
        row, whole = PartitionSpec(by_row), PartitionSpec(by_row, by_id)
        choose = jax.shard_map(
            functools.partial(_choose, block.top_ids.shape[2], (by_id,) if by_id else ()),
            mesh=placement.mesh,
            in_specs=(whole, whole, whole, row, row, row),
            out_specs=Choice(*(row,) * 6, seen=whole),
            check_vma=False,  # of what a loop with collectives returns it is not known
        )
    own = rows.replace(history=None, allowed=None)
    choice = choose(logits, run.seen, allowed, own, position, drawn)
    if tiles is not None:
        ids = choice.sampling_mask_ids
        of_rows = rows.temperature, choice.token, ids if ids.shape[1] else None, live
        given = jax.tree.map(lambda x: x[:, None], (logits, *of_rows))
        scores = exact_scores_of_logits(config, tiles, *given, placement=placement)
        plain = (rows.repetition_penalty == 1) & (drawn >= rows.min_tokens)
        if rows.constrained is not None:
            plain &= ~rows.constrained
        choice = choice._replace(log_prob=jnp.where(plain, scores[:, 0], choice.log_prob))
    at = jnp.where(live, block.count, block.tokens.shape[1])  # out of bounds drops the write
    hit = (choice.token[:, None] == rows.stop_ids).any(-1) & live

    def put(into: Array, new: Array) -> Array:
        return into.at[index, at].set(new, mode="drop")

    history = run.history
    if history is not None:
        beyond = jnp.where(live, position, history.shape[1])
        history = history.at[index, beyond].set(choice.token, mode="drop")
    seen = run.seen
    if seen is not None and choice.seen is not None:
        seen = jnp.where(live[:, None], choice.seen, seen)
    raw_log_probs = block.raw_log_probs
    if choice.raw_log_prob is not None:
        raw_log_probs = put(raw_log_probs, choice.raw_log_prob)
    return run.replace(
        last_token=jnp.where(live, choice.token, run.last_token),
        position=jnp.where(live, position, run.position),
        done=run.done | hit | (live & (drawn + 1 >= rows.max_tokens)),
        seen=seen,
        history=history,
        block=Block(
            tokens=put(block.tokens, choice.token),
            log_probs=put(block.log_probs, choice.log_prob),
            count=block.count + live,
            steps=block.steps,
            stopped=block.stopped | hit,
            top_ids=put(block.top_ids, choice.top_ids),
            top_log_probs=put(block.top_log_probs, choice.top_log_probs),
            raw_log_probs=raw_log_probs,
            sampling_mask_ids=put(block.sampling_mask_ids, choice.sampling_mask_ids),
        ),
    )


def _choose(
    alternatives: int,
    axes: tuple[str, ...],
    logits: Array,
    seen: Array | None,
    allowed: Array | None,
    rows: Rows,
    position: Array,
    drawn: Array,
) -> Choice:
    """Draw a token of each row from logits [B, V]; `axes` as in `sampling.py`."""
    raw, features = logits, rows.features
    logits = adjust(logits, seen, rows.repetition_penalty)
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    early = (drawn < rows.min_tokens)[:, None]
    logits = assign(logits, jnp.where(early, rows.stop_ids, -1), -jnp.inf, axes)
    token, log_prob, mask_ids = sample(
        logits,
        uniforms(rows.keys, position),
        temperature=rows.temperature,
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        filtered=features.filtered,
        keep=features.sampling_mask_size,
        axes=axes,
    )
    return Choice(
        token,
        log_prob,
        mask_ids,
        *top_tokens(logits, rows.temperature, alternatives, axes),
        raw_log_prob=token_log_probs(raw, token, axes or None) if features.raw else None,
        seen=None if seen is None else assign(seen, token[:, None], True, axes),
    )
